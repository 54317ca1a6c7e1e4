"""Islands know reports, verdicts and actions of each other."""

import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tests.diloco.toy import config
from tests.islands.by_hand import newest, syncer
from tests.islands.rules.desk import A, B
from tests.islands.trainees import Trainee
from tests.islands.written_run import WrittenRun
from tests.waiting import wait_until
from torchtitan_diloco.diagnosis.verdicts import Judge, Observation
from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.reports import STILL_SECONDS
from torchtitan_diloco.diloco.vitals import ALL_WORKERS, Action, VerdictKind, Vitals
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.islands.gauges import Gauges
from torchtitan_diloco.islands.island_reports import (
    EVICTED,
    LEFT_OUT,
    NOT_WAITED_FOR,
    Actions,
    IslandReports,
)
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.rules import note as notes
from torchtitan_diloco.islands.rules.decision import SICK
from torchtitan_diloco.islands.rules.note import decode_note
from torchtitan_diloco.islands.runs import FULL_SECONDS, Run
from torchtitan_diloco.islands.seen import KINDS, code_of, kind_of, reports_of
from torchtitan_diloco.islands.transfers import Transfers
from torchtitan_diloco.store import FullError, open_store

USUAL = notes.NotedVitals(compute=0.1, upload=0.5, download=0.2)
CYCLE = 1.0


def judged(run: WrittenRun, judge: Judge, count: int, **fields: notes.NotedVitals) -> list[str]:
    """Let islands train for some cycles, and return the verdicts about them that stand.

    `fields`: vitals of islands by name.
    """
    for number in range(count):
        for one in (A, B):
            vitals = fields.get(one[0], USUAL)
            # A transfer that took exactly as long as the one before is not a new one.
            vitals = msgspec.structs.replace(vitals, upload=vitals.upload + number / 100)
            vitals = msgspec.structs.replace(vitals, download=vitals.download + number / 100)
            run.train(one, vitals=vitals)
        run.pass_time(CYCLE)
        observed = Observation(reports_of(run.state), step=run.steps[A], now=run.now, cycle=CYCLE)
        judge.hear(observed)
    return sorted(f"{cause.culprit}: {cause.kind}" for cause in judge.verdicts)


# --- codes ----------------------------------------------------------------------------------------


def test_each_kind_of_verdict_has_a_code() -> None:
    assert sorted(KINDS) == sorted(VerdictKind)
    codes = [code_of([f"a: {kind}"], "a") for kind in KINDS]
    assert codes == list(range(1, len(KINDS) + 1))
    assert [kind_of(code) for code in codes] == list(KINDS)
    assert [kind_of(code) for code in (0, len(KINDS) + 1, 255)] == [""] * 3


@pytest.mark.parametrize(
    ("verdicts", "kind"),
    [
        ([], ""),
        (["b: stopped"], ""),
        (["a: slow compute", "b: stopped"], "slow compute"),
        (["a: slow sending", "a: hung in communication"], VerdictKind.STUCK),
        ([f"{ALL_WORKERS}: everybody slow"], "everybody slow"),
        (["a: some other text", "nonsense"], ""),
    ],
)
def test_the_worst_verdict_about_an_island_is_in_its_note(
    verdicts: Sequence[str], kind: str
) -> None:
    assert kind_of(code_of(verdicts, "a")) == kind


# --- verdicts -------------------------------------------------------------------------------------


def test_a_slow_island_is_found_and_recovers() -> None:
    run = WrittenRun()
    judge = Judge()
    assert judged(run, judge, 12) == []
    slow = notes.NotedVitals(compute=0.3, upload=0.5, download=0.2)
    assert judged(run, judge, 12, b=slow) == ["b: slow compute"]
    assert judged(run, judge, 14) == []


def test_a_slow_link_is_found() -> None:
    run = WrittenRun()
    judge = Judge()
    judged(run, judge, 12)
    slow = notes.NotedVitals(compute=0.1, upload=4.0, download=0.2)
    assert judged(run, judge, 12, b=slow) == ["b: slow sending"]
    both = WrittenRun()
    judge = Judge()
    judged(both, judge, 12)
    slow = notes.NotedVitals(compute=0.1, upload=0.5, download=4.0)
    assert judged(both, judge, 12, a=slow) == ["a: slow receiving"]


def test_busy_cores_are_found() -> None:
    run = WrittenRun()
    judge = Judge()
    judged(run, judge, 12)
    busy = notes.NotedVitals(compute=0.2, queued=0.15)
    assert judged(run, judge, 12, b=busy) == ["b: busy cores"]


@pytest.mark.parametrize(("norm", "flag"), [(math.nan, NOT_FINITE), (1e3, OUTLIER)])
def test_wrong_numbers_are_found(norm: float, flag: int) -> None:
    run = WrittenRun(norm_limit=20.0)
    run.rounds(6)
    run.norms[B] = norm
    run.rounds(1)
    reports = reports_of(run.state)
    assert (reports["a"].flags, reports["b"].flags) == (0, flag)
    run.norms[B] = 1.0
    run.rounds(2)
    assert reports_of(run.state)["b"].flags == 0, "a good part came"


def test_an_island_that_says_that_its_numbers_are_wrong() -> None:
    run = WrittenRun()
    run.rounds(2)
    run.train(B, says=code_of(["b: wrong numbers"], "b"))
    run.pass_time(1.0)
    assert reports_of(run.state)["b"].flags == NOT_FINITE


def test_absent_islands_are_named_on_one_clock() -> None:
    run = WrittenRun()
    run.rounds(2)
    for _ in range(5):
        run.train(A)
        run.note(B, step=20)
        run.pass_time(1.0)
    assert reports_of(run.state)["b"].absent == "", "it may be slow"
    for _ in range(10):
        run.train(A)
        run.note(B, step=20)
        run.pass_time(1.0)
    report = reports_of(run.state)["b"]
    assert report.absent == VerdictKind.HUNG
    assert report.evidence.startswith("its last step, 20, was 1")
    assert report.vitals == Vitals(), "those of old steps do not count"
    run.pass_time(10.0, listens=False)
    assert reports_of(run.state)["b"].absent == VerdictKind.HUNG, "the syncer could not listen"
    for _ in range(6):
        run.train(A)
        run.pass_time(1.0)
    assert reports_of(run.state)["b"].absent == VerdictKind.STOPPED
    assert reports_of(run.state)["a"].absent == ""
    run.train(B, says=code_of([f"b: {VerdictKind.STUCK}"], "b"))
    run.pass_time(0.3)
    assert reports_of(run.state)["b"].absent == VerdictKind.STUCK
    run.train(B, says=code_of([f"b: {VerdictKind.NO_ROOM}"], "b"))
    run.pass_time(1.0)
    assert reports_of(run.state)["b"].absent == VerdictKind.NO_ROOM


@pytest.mark.parametrize("reason", ["is_idle", "compiles", "waits"])
def test_who_has_a_reason_to_stand_still_does_not_hang(reason: str) -> None:
    run = WrittenRun()
    if reason != "compiles":
        run.rounds(2)
    for _ in range(15):
        run.train(A)
        run.note(B, step=0 if reason == "compiles" else 20, is_idle=reason == "is_idle")
        run.pass_time(1.0)
    run.state.begun = reason != "waits"
    assert reports_of(run.state)["b"].absent == ""


# --- actions --------------------------------------------------------------------------------------


def test_an_island_that_is_late_for_long_is_an_action() -> None:
    run = WrittenRun()
    actions = Actions()
    assert actions.update(run.state, "a") == []
    run.rounds(3)
    began = list[Action]()
    ended = began
    for _ in range(14):
        run.train(A)
        run.train(B, sends=False)
        run.pass_time(1.0)
        began = began + actions.update(run.state, "a")
    assert [(one.culprit, one.what, one.over) for one in began] == [("b", NOT_WAITED_FOR, False)]
    for _ in range(4):
        run.rounds(1)
        ended = ended + actions.update(run.state, "a")
    assert [(one.culprit, one.what, one.over) for one in ended] == [("b", NOT_WAITED_FOR, True)]


def test_what_the_syncer_and_the_owner_do_are_actions() -> None:
    run = WrittenRun()
    actions = Actions()
    own = Actions()
    run.rounds(1)
    run.state.told[B] = SICK
    run.state.barred = ["c"]
    found = {(one.culprit, one.what) for one in actions.update(run.state, "a")}
    assert found == {("b", LEFT_OUT), ("c", EVICTED)}
    assert {one.culprit for one in own.update(run.state, "b")} == {"c"}, "not about itself"
    assert actions.update(run.state, "a") == []
    run.state.barred = []
    run.state.told = {}
    over = {(one.culprit, one.what, one.over) for one in actions.update(run.state, "a")}
    assert over == {("b", LEFT_OUT, True), ("c", EVICTED, True)}


# --- own transfers --------------------------------------------------------------------------------


def test_transfers_of_a_cycle_are_those_of_all_fragments() -> None:
    transfers = Transfers(4)
    assert transfers.cycle() == (0.0, 0.0)
    transfers.add_download(0, 1.0)
    transfers.add_download(1, 3.0)
    assert transfers.cycle() == (0.0, 8.0), "as if the others took as long"
    transfers.add_download(1, 1.0)
    assert transfers.cycle()[1] == 4.0
    with transfers.upload(0, 1000):
        pass
    assert transfers.cycle()[0] > 0
    assert transfers.upload_rate > 0


def test_a_full_store_is_no_path_that_loses_packets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("torchtitan_diloco.islands.runs.time.monotonic", lambda: now[0])
    written = WrittenRun()
    written.rounds(1)
    with closing(Run(open_store(tmp_path))) as run:
        reports = IslandReports(Islands(name="a"), Gauges())
        machine = SimpleNamespace(slot=0, decision=written.state)
        link = SimpleNamespace(machine=machine, run=run, transfers=Transfers(1), stuck_seconds=12.0)
        reports.link = cast(Link, link)

        def verdict() -> str:
            observed = Observation({"a": reports.latest()["a"]}, step=5, now=now[0])
            return "\n".join(map(str, Judge().hear(observed)))

        assert "Check this path" in verdict()
        run.say_full(FullError("No space left on device; free some space there"))
        assert verdict() == (
            "a has had no room in the store since step 5: its upload has made no progress for 12 "
            "s. Free space there, or raise the quota of its login. Until then, it trains on, and "
            "nothing of it is merged."
        )
        now[0] += FULL_SECONDS
        assert "Check this path" in verdict(), "there is room again"


def test_an_upload_without_progress_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = Transfers(1)
    now = [100.0]
    monkeypatch.setattr("torchtitan_diloco.islands.transfers.time.monotonic", lambda: now[0])
    with transfers.upload(0, 1000):
        now[0] += 0.5
    assert transfers.stuck_seconds(0.0, 1000) == 0.0
    with transfers.upload(0, 1000):
        now[0] += STILL_SECONDS
        assert transfers.stuck_seconds(0.0, 1000) == 0.0, "ten times the usual time is 5 s"
        now[0] += 1.0
        assert transfers.stuck_seconds(0.0, 1000) == STILL_SECONDS + 1
        assert transfers.stuck_seconds(now[0] - 1, 1000) == 0.0, "a chunk was stored"
    with pytest.raises(RuntimeError), transfers.upload(0, 10**9):
        raise RuntimeError
    assert transfers.upload_rate == 1000 / (STILL_SECONDS + 1), "of the last one that was stored"


def test_a_loss_that_is_not_finite_leaves_the_other_values() -> None:
    gauges = Gauges()
    gauges.loss = float("nan")
    gauges.validated = (5, float("inf"))
    gauges.site = "oslo"
    gauges.finish_step(10)
    found = gauges.read(Vitals(compute=0.1))
    assert found.process == f"{os.getpid()} on {socket.gethostname()}"[:80]
    assert (found.loss, found.validated, found.site) == (None, None, "oslo")


# --- live -----------------------------------------------------------------------------------------


def test_islands_know_of_each_other(tmp_path: Path) -> None:
    """Two train; one is paused, and then both are there again."""
    pair = [
        Trainee(tmp_path / "store", name, config(2, delay=1), total_tokens=10**9, step_seconds=0.02)
        for name in "ab"
    ]
    first, second = (one.peers.reports for one in pair)
    assert isinstance(first, IslandReports)
    assert first.latest() == {}
    pause = [0.0]

    def measure(one: Trainee) -> None:
        one.peers.reports.vitals = Vitals(compute=0.02)

    pair[0].on_step = lambda _: measure(pair[0])

    def wait(_: int) -> None:
        measure(pair[1])
        time.sleep(pause[0])

    pair[1].on_step = wait
    with syncer(tmp_path / "store", tmp_path / "scratch"):
        for one in pair:
            one.thread.start()
        try:
            wait_until(lambda: set(first.latest()) == {"a", "b"}, "both")
            wait_until(
                lambda: 0.019 < first.latest()["b"].vitals.compute < 0.021, "what b measures"
            )
            wait_until(lambda: first.latest()["b"].vitals.upload > 0, "its uploads")
            wait_until(lambda: first.latest()["a"].vitals.download > 0, "own downloads")
            assert first.late() == {}
            second.say(["b: slow data", "a: stopped"])
            wait_until(lambda: "slow data" in said_by(tmp_path / "store", "b"), "its note")
            second.say([])
            pause[0] = 8.0
            wait_until(lambda: first.latest()["b"].vitals.compute == 0, "the pause")
            pause[0] = 0.0
            wait_until(lambda: first.latest()["b"].vitals.compute > 0, "the next step")
            assert said_by(tmp_path / "store", "b") == ""
        finally:
            for one in pair:
                one.stop.set()
            for one in pair:
                one.thread.join(60)
    gauges = [pair[0].peers.gauges.round_trip, pair[1].peers.gauges.round_trip]
    assert all(0 < seconds < 60 for seconds in gauges)


def said_by(store: Path, name: str) -> str:
    decision = newest(store)
    seen = dict(zip((slot.owner for slot in decision.slots), decision.seen, strict=True))
    (found,) = [one for owner, one in seen.items() if owner and owner.startswith(f"{name}/")]
    return "" if found is None else kind_of(found.says)


def test_the_values_of_a_note_survive_the_store() -> None:
    run = WrittenRun()
    run.train(A, loss=2.5, validated=(10, 2.25))
    gauges = decode_note(run.notes[A]).read_gauges()
    assert (gauges.loss, gauges.validated) == (2.5, (10, 2.25))
