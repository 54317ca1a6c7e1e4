"""Show people a run: any decision, notes and history."""

import json
import re

import msgspec
import pytest

from tests.islands.rules.desk import A, B, C, founded
from tests.islands.written_run import STEPS, WrittenRun
from torchtitan_diloco.islands.overview import View, overview
from torchtitan_diloco.islands.page_server import metrics
from torchtitan_diloco.islands.past import past_of
from torchtitan_diloco.islands.rules import history
from torchtitan_diloco.islands.rules.decision import BARRED, LEAVE, SICK, Decision
from torchtitan_diloco.islands.rules.note import decode_note
from torchtitan_diloco.islands.rules.presence import SILENT
from torchtitan_diloco.islands.tables import render

SOON = 20.0
SAMPLE = re.compile(
    r'[a-z_]+(?:\{(?:island|fragment)="(?:[^"\\]|\\.)*"\})? -?\d+(\.\d+)?(e[-+]\d+)?'
)
"""A sample of Prometheus."""


def seen(run: WrittenRun, **changed: object) -> dict[str, object]:
    """Return the overview of a run as it is now."""
    return overview(view_of(run, **changed))


def view_of(run: WrittenRun, **changed: object) -> View:
    notes = {one: decode_note(raw) for one, raw in run.notes.items()}
    fields = {"notes": notes, "past": past_of(run.state, run.history), **changed}
    return View(decision=run.state, **fields)  # type: ignore[arg-type]


def rows(found: dict[str, object], key: str = "islands") -> list[dict[str, object]]:
    value = found[key]
    assert isinstance(value, list)
    return value


def doing(found: dict[str, object]) -> dict[object, object]:
    return {row["island"]: row["doing"] for row in rows(found)}


def test_a_run_adds_up() -> None:
    run = WrittenRun()
    run.rounds(4, validated=(30, 3.25))
    found = seen(run)
    assert found["phase"] == "running"
    assert found["connection"] == "ok"
    assert (found["tokens_merged"], found["total_tokens"]) == (8 * STEPS, 10**6)
    assert found["tokens_per_second"] == 20
    assert found["eta_seconds"] == (10**6 - 8 * STEPS) / 20
    assert (found["loss"], found["loss_at_tokens"]) == (3.25, 30)
    assert found["kept_samples"] == 1.0
    last = found["last_merged"]
    assert isinstance(last, dict)
    assert (last["fragment"], last["version"]) == (0, 4)
    first = rows(found)[0]
    assert (first["island"], first["slot"], first["doing"], first["site"]) == (
        *("a", 0, "trains", "oslo"),
    )
    assert (first["loss"], first["waited"], first["step"]) == (2.5, 0.25, 4 * STEPS)
    assert (first["part_in_rounds"], first["late_parts"]) == (1.0, 0)
    assert [slot["merged"] for slot in rows(found, "slots")] == [4 * STEPS] * 2
    assert [slot["rounds_since_last_part"] for slot in rows(found, "slots")] == [0, 0]
    json.loads(json.dumps(found), parse_constant=pytest.fail)
    text = render(found, "store")
    for shown in (
        "80 of 1,000,000",
        "20 tokens/s",
        "3.2500 at 30 tokens",
        "8 Mbit/s",
        "4711 on node-1",
    ):
        assert shown in text


def test_it_is_a_function_of_what_was_read() -> None:
    run = WrittenRun()
    run.rounds(3)
    assert seen(run) == seen(run)
    assert past_of(run.state) == past_of(msgspec.convert(msgspec.to_builtins(run.state), Decision))


def test_the_keys_stay_what_they_are() -> None:
    """Programs read them."""
    run = WrittenRun()
    run.rounds(1)
    found = seen(run)
    assert {"run", "connection", "phase", "total_tokens", "tokens_merged", "tokens_per_second"} | {
        *("eta_seconds", "last_merged", "loss", "loss_at_tokens", "verdicts", "kept_samples"),
        *("islands", "fragments", "slots", "news"),
    } == found.keys()
    assert set(rows(found)[0]) == {
        *("island", "slot", "doing", "for_seconds", "site", "process", "tokens_per_second"),
        *("waited", "loss"),
        *("round_trip_seconds", "upload_bytes_per_second", "step", "tokens", "leaving"),
        *("part_in_rounds", "late_parts", "left_out", "left_out_reason"),
        *("heard_seconds_ago", "incarnation"),
    }
    assert set(rows(found, "fragments")[0]) == {
        *("fragment", "version", "merged_seconds_ago", "open", "open_seconds", "waits_for"),
        "waiting",
    }
    assert set(rows(found, "slots")[0]) == {
        *("slot", "owner", "merged", "lost", "waiting", "read_twice", "part_in_rounds"),
        "rounds_since_last_part",
    }


def test_what_islands_do() -> None:
    run = WrittenRun()
    run.rounds(2)
    run.train(A)
    run.note(C, wish="join")
    run.note("d/0000")
    run.pass_time(0.3)
    full = WrittenRun(slots=2)
    full.rounds(1)
    full.note(C, wish="join")
    full.pass_time(0.3)
    assert doing(seen(full))["c"] == "waits for a slot"
    assert doing(seen(run))["d"] == "joins"
    run.state.told[A] = LEAVE
    assert doing(seen(run))["a"] == "leaves"
    run.state.told = {"d/0000": BARRED}
    assert doing(seen(run))["d"] == "refused: evicted"
    run.state.told = {B: SICK}
    assert seen(run)["verdicts"] == ["b: its numbers are repeatedly wrong"]
    run.train(B, sends=False, is_idle=True)
    run.pass_time(0.2)
    assert doing(seen(run))["b"] == "leaves"
    run.state.fragments[0].clock = 10**6
    assert doing(seen(run))["b"] == "sends its last work"
    run.state.ended = True
    assert set(doing(seen(run)).values()) == {"done"}
    assert seen(run)["phase"] == "ended"
    assert seen(run)["verdicts"] == []


def test_an_island_that_is_silent_or_stands_still_is_named() -> None:
    run = WrittenRun()
    run.rounds(2)
    for _ in range(20):
        run.train(A)
        run.note(B, step=2 * STEPS)  # it writes notes, and trains no longer
        run.pass_time(1.0)
    still = seen(run)
    assert doing(still)["b"] == "completes no step"
    since = rows(still)[1]["for_seconds"]
    assert isinstance(since, float)
    assert 19 <= since <= 22
    assert still["verdicts"] == ["b: hung outside communication"], "longer than slot_seconds"
    for _ in range(8):
        run.train(A)
        run.pass_time(1.0)
    gone = seen(run)
    assert doing(gone) == {"a": "trains", "b": "gone"}
    assert gone["verdicts"] == ["b: stopped"]
    assert gone["tokens_per_second"] == 10
    run.pass_time(2 * SILENT)
    assert seen(run)["phase"] == "no island is connected"


def test_a_new_syncer_knows_who_is_gone() -> None:
    """An island that died before it began has no note that it reads."""
    run = WrittenRun(founded())
    for _ in range(10):
        run.train(A)
        run.pass_time(1.0)
    assert doing(seen(run)) == {"a": "trains", "b": "gone"}


def test_what_a_round_waits_for() -> None:
    run = WrittenRun()
    run.rounds(2)
    run.merges_last = True
    run.train(A)
    run.pass_time(0.3)
    run.syncer.rounds[0].waiting.clear()  # as if it had been read a moment before
    found = seen(run)
    (row,) = rows(found, "fragments")
    assert row["open"]
    assert row["waits_for"] == ["b"]
    assert row["waiting"] == 1
    assert rows(found, "slots")[0]["waiting"] == STEPS
    assert rows(seen(run, opened={0: 1.5}), "fragments")[0]["open_seconds"] == 1.5


def test_phases_of_a_run() -> None:
    assert overview(View())["phase"] == "nothing has been written yet"
    founding = founded()
    founding.fragments = []
    founding.founder = "a/0000"
    found = overview(View(founding))
    assert found["phase"] == "waits for island a to store the first copies"
    assert found["total_tokens"] == 10_000
    render(found, "store")
    run = WrittenRun(founded((A,), start_with=2))
    run.state.begun = False
    assert seen(run)["phase"] == "waits for islands: 1 of 2 are there"
    run.rounds(1, A)
    stale = seen(run, still=12.0)
    assert stale["phase"] == ("no syncer decides since 12 s: islands train on, nothing is merged")
    assert seen(run, still=12.0, away_seconds=12.0)["phase"] == "running"
    run.state.stopped = True
    assert seen(run)["phase"] == "its syncer was stopped: islands train on, and nothing is merged"


def test_metrics_keep_their_names_and_have_bounded_labels() -> None:
    run = WrittenRun()
    run.rounds(2, validated=(10, 2.25))
    for number in range(50):
        run.note(f"joiner{number}/0000", wish="join")
    lines = metrics(seen(run)).splitlines()
    samples = [line for line in lines if not line.startswith("# TYPE ")]
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    assert 'islands_island_trains{island="a"} 1.0' in samples
    assert "islands_run_loss 2.25" in samples
    assert 'islands_fragment_version{fragment="0"} 2.0' in samples
    assert "joiner" not in "".join(samples)


def test_late_and_refused_parts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BIN_SECONDS", SOON)
    run = WrittenRun()
    run.rounds(3)
    late = run.part(1, samples=STEPS)
    run.rounds(2, A)
    run.note(B, late, step=5 * STEPS)
    run.train(A)
    run.pass_time(2.0)
    run.note(B, run.part(1, start=1), step=6 * STEPS)
    run.train(A)
    run.pass_time(SOON)
    found = seen(run)
    assert {row["island"]: row["late_parts"] for row in rows(found)} == {"a": 0, "b": 1}
    past = past_of(run.state, run.history)
    (stay,) = [stay for stay in past.stays if stay.name == "b"]
    assert (stay.late_parts, len(stay.late)) == (1, 1)
    assert 0 <= stay.late[0] - past.began <= SOON
    assert "parts of b: 1 refused" in [text for _, text in past.news]


def test_parts_that_are_left_out_and_a_run_that_merges_nothing_are_shown() -> None:
    """Such as with `fastest` set too low."""
    run = WrittenRun()
    run.rounds(2)
    assert "left out" not in render(seen(run), "store")
    for _ in range(40):
        for one in (A, B):
            run.train(one, sends=False)
        run.note(A, run.part(0, samples=10**5), step=run.steps[A])
        run.pass_time(1.0)
    found = seen(run)
    first, second = rows(found)
    assert first["left_out"] == 40
    assert first["left_out_reason"] == "too long"
    assert second["left_out"] is None
    assert doing(found) == {"a": "trains", "b": "trains"}
    assert str(found["phase"]).startswith("nothing was merged for ")
    assert str(found["phase"]).endswith(" s, although islands train")
    assert found["eta_seconds"] is None
    text = render(found, "store")
    assert "40: too long" in text
    assert "ETA" not in text
    run.rounds(1)
    merged = seen(run)
    assert merged["phase"] == "running"
    assert merged["eta_seconds"] is not None
    assert rows(merged)[0]["left_out"] == 40
    assert rows(merged)[0]["left_out_reason"] is None


def test_islands_that_have_just_come_have_time_for_a_first_version() -> None:
    run = WrittenRun()
    run.rounds(2)
    run.pass_time(100.0)
    run.train(A)
    run.note("b/1111", wish="join")
    for _ in range(5):
        run.train(A, sends=False)
        run.pass_time(0.5)
    assert seen(run)["phase"] == "running"


def test_lanes_and_news_of_a_history() -> None:
    run = WrittenRun(founded((A,), slots=2), wall=1000.0)
    for second in range(60):
        run.train(A)
        if 10 <= second < 20 or second >= 40:
            run.note(B, wish="join" if second in (10, 11) else "", step=second)
        if second == 50:
            run.note(B, wish="give", step=second)
        run.pass_time(1.0)
    past = past_of(run.state)
    assert past.began == pytest.approx(1000.0)
    assert [stay.name for stay in past.stays] == ["a", "b"]
    first, second_stay = past.stays
    assert first.spans == [[pytest.approx(1000.0, abs=1), pytest.approx(1060.0, abs=1)]]
    begins = [round(begin - 1000) for begin, _ in second_stay.spans]
    ends = [round(end - 1000) for _, end in second_stay.spans]
    assert begins == [pytest.approx(10, abs=1), pytest.approx(40, abs=1)]
    assert ends == [pytest.approx(19, abs=1), pytest.approx(50, abs=1)]
    assert second_stay.ended == "left"
    texts = [text for _, text in past.news if not text.startswith("a syncer")]
    assert texts == ["b joins", "b is silent", "b is heard again", "b leaves"]
