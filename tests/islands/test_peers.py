"""Islands in a folder: they found, join, leave, return and end."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diloco.toy import Net, config, full, inner_step, parameters, sgd
from tests.islands.by_hand import newest, open_run, syncer
from tests.islands.test_one_job import Versions, one_job
from tests.islands.trainees import PATIENCE, SAMPLES, TOKENS, Trainee, trained
from tests.processes import ProcessPool
from tests.waiting import wait_until
from torchtitan_diloco.base.user import PeersLostError, UserError
from torchtitan_diloco.diloco import Beginning, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.state_dict import SHARED
from torchtitan_diloco.islands import waiting
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.islands.founding import JobCheckpoint
from torchtitan_diloco.islands.instructions import IslandFencedError
from torchtitan_diloco.islands.layout import hexadecimal
from torchtitan_diloco.islands.peers import IslandPeers
from torchtitan_diloco.islands.rules.note import JOIN
from torchtitan_diloco.islands.seat import Seat
from torchtitan_diloco.store import AwayError


def same(one: Trainee, other: Trainee) -> None:
    assert one.shared.keys() == other.shared.keys()
    for name, value in one.shared.items():
        assert torch.equal(value, other.shared[name]), name


def test_two_islands_have_the_versions_of_one_job(processes: ProcessPool, tmp_path: Path) -> None:
    chosen = config(8, delay=1)
    results = processes.run(one_job, 2, chosen, [TOKENS, TOKENS])
    store = tmp_path / "store"
    total = 100 * 2 * TOKENS
    pair = [Trainee(store, name, chosen, total_tokens=total, grace=60.0) for name in ("a", "b")]
    found: list[Versions] = [{}, {}]
    for one, versions in zip(pair, found, strict=True):

        def look(_: int, one: Trainee = one, versions: Versions = versions) -> None:
            for number, fragment in enumerate(one.peers.machine.fragments):
                key = number, fragment.applied
                versions.setdefault(key, one.outer.loop.states[number].outer.clone())

        one.on_step = look
    with syncer(store, tmp_path / "scratch"), trained(*pair):
        pass
    for versions in found:
        for key, value in results[0][0].items():
            assert torch.equal(versions[key], value), key
    same(*pair)
    decision = newest(store)
    assert decision.ended
    assert decision.fragments[0].clock >= 100 * 2 * TOKENS


def test_an_island_joins_leaves_and_returns(tmp_path: Path) -> None:
    store = tmp_path / "store"
    chosen = config(2, delay=1)
    total = 150 * 2 * TOKENS
    first = Trainee(store, "a", chosen, total_tokens=total, begin=1, step_seconds=0.01)
    second = Trainee(store, "b", chosen, total_tokens=total, begin=1, step_seconds=0.01)
    joins = threading.Event()
    returned = list[Trainee]()

    def leave(step: int) -> None:
        if step == 20:
            second.stop.set()

    def begin(step: int) -> None:
        if step == 10:
            joins.set()

    first.on_step = begin
    second.on_step = leave
    with syncer(store, tmp_path / "scratch"), trained(first):
        assert joins.wait(60)
        with trained(second):
            pass
        assert second.peers._link is None
        saved = second.saved
        returned.append(Trainee(store, "b", chosen, total_tokens=total, begin=1, saved=saved))
        with trained(*returned):
            pass
    same(first, returned[0])
    assert second.steps == 20
    decision = newest(store)
    assert decision.ended
    assert sum(ledger.lost for slot in decision.slots for ledger in slot.ledgers) == 0


def test_a_run_without_its_location_is_founded_again_only_if_asked(tmp_path: Path) -> None:
    chosen = config(8, delay=1)
    total = 60 * TOKENS
    first = Trainee(tmp_path / "store", "a", chosen, total_tokens=total, begin=1, slots=1)
    first.on_step = lambda step: first.stop.set() if step == 30 else None
    with syncer(tmp_path / "store", tmp_path / "one"), trained(first):
        pass
    empty = tmp_path / "empty"
    again = Trainee(empty, "a", chosen, total_tokens=total, begin=1, slots=1, saved=first.saved)
    message = "the location is empty, and the checkpoint is of run"
    with (
        pytest.raises(UserError, match=message) as raised,
        syncer(empty, tmp_path / "two"),
        trained(again),
    ):
        pass
    assert raised.value.__notes__ == [f"islands.join leads to {empty}"]
    more = Trainee(
        empty, "a", chosen, total_tokens=total, begin=1, slots=1, saved=first.saved, found=True
    )
    with syncer(empty, tmp_path / "two"), trained(more):
        pass
    decision = newest(empty)
    assert decision.run == newest(tmp_path / "store").run
    assert decision.ended
    assert more.steps < 60, "its clock goes on"


def test_a_run_is_founded_from_the_checkpoint_of_a_job(tmp_path: Path) -> None:
    """Its shared parameters, tokens and the places of its samples are those of the run."""
    begun = replace(config(8), beginning=Beginning(length=20))
    model = Net()
    optimizer = sgd(model)
    job = StreamingDiLoCo(model, None, begun, optimizer=optimizer)
    for step in range(1, 21):
        inner_step(model, optimizer, 0, step)
        job.step(TOKENS)
    shared = {name: full(value) for name, value in job.global_state_dict().items()}
    state = job.state_dict()
    tokens = 20 * TOKENS
    options: dict[str, Any] = {
        "total_tokens": 60 * TOKENS,
        "saved": state,
        "job": JobCheckpoint(tokens, position=20, entered=[10]),
        "phases": [0.1],
    }
    store = tmp_path / "store"
    refused = Trainee(store, "a", config(8), **options)
    message = "the checkpoint is of a job: .* set --islands.found true"
    with pytest.raises(UserError, match=message), syncer(store, tmp_path / "one"), trained(refused):
        pass
    pair = [Trainee(store, name, config(8), found=True, **options) for name in "ab"]

    def look(one: Trainee, seat: Seat) -> None:
        assert (seat.position, seat.entered) == (20, (10,))
        assert one.peers.clock == tokens
        for name, value in one.outer.global_state_dict().items():
            assert torch.equal(full(value), shared[name]), name
        assert all(
            torch.equal(value, shared[name]) for name, value in parameters(one.model).items()
        )

    for one in pair:
        one.on_join = partial(look, one)
    with syncer(store, tmp_path / "two"), trained(*pair):
        pass
    same(*pair)
    decision = newest(store)
    assert decision.ended
    for number, fragment in enumerate(decision.fragments):
        ledgers = [slot.ledgers[number] for slot in decision.slots]
        merged = sum(ledger.taken - 20 - ledger.lost for ledger in ledgers)
        assert fragment.clock == tokens + merged * TOKENS // SAMPLES
    assert sum(one.steps for one in pair) < 60, "the job has taken some of its steps"


def test_a_run_is_founded_from_the_model_of_a_job_without_an_outer_loop(tmp_path: Path) -> None:
    """As after data parallelism, whose checkpoint has a model and no shared parameters."""
    store = tmp_path / "store"

    def island(name: str, **options: Any) -> Trainee:
        one = Trainee(store, name, config(8), total_tokens=60 * TOKENS, **options)
        torch.nn.init.constant_(one.model.gain, 7.0)
        one.outer.restart_from_model(20)
        return one

    message = "the checkpoint is of a job: .* set --islands.found true"
    refused = island("a")
    with pytest.raises(UserError, match=message), syncer(store, tmp_path / "one"), trained(refused):
        pass
    job = JobCheckpoint(20 * TOKENS, position=20)
    pair = [island(name, found=True, job=job) for name in "ab"]
    wanted = parameters(pair[0].model)

    def look(one: Trainee, seat: Seat) -> None:
        assert (seat.position, one.outer.step_count) == (20, 20)
        assert one.peers.clock == 20 * TOKENS
        for shown in (one.outer.global_state_dict(), parameters(one.model)):
            assert all(torch.equal(full(value), wanted[name]) for name, value in shown.items())

    for one in pair:
        one.on_join = partial(look, one)
    with syncer(store, tmp_path / "two"), trained(*pair):
        pass
    same(*pair)
    assert newest(store).ended


def test_an_island_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with syncer(store, tmp_path / "scratch"), open_run(store):
        first = Trainee(store, "a", config(8), total_tokens=10**9, begin=1, facts={"data": "one"})
        began = threading.Event()
        first.on_step = lambda _: began.set()
        with trained(first):
            assert began.wait(60)
            for chosen, facts, says in (
                (config(8), {"data": "two"}, "data is two here and one in the run"),
                (config(2), {"data": "one"}, "parameter-layout is"),
            ):
                other = Trainee(store, "b", chosen, total_tokens=10**9, begin=1, facts=facts)
                with pytest.raises(UserError, match=says), trained(other):
                    pass
            first.stop.set()


def test_steps_before_a_join_are_refused(tmp_path: Path) -> None:
    one = Trainee(tmp_path / "store", "a", config(8), total_tokens=1000)
    with pytest.raises(RuntimeError, match="call join"):
        one.outer.step(1)
    assert isinstance(one.peers, IslandPeers)
    one.outer.close()


def test_an_island_that_saves_for_long_keeps_its_slot(tmp_path: Path) -> None:
    """Its notes go on meanwhile, and another island waits for the slot until it leaves."""
    store = tmp_path / "store"
    options: dict[str, Any] = {"begin": 1, "slots": 1, "slot_seconds": 2.0}
    first, second = (
        Trainee(store, name, config(8), total_tokens=10**9, **options) for name in "ab"
    )
    counters = list[int]()

    def wants_a_slot() -> bool:
        link = second.peers._link
        return link is not None and link.machine._wish() == JOIN

    def save(step: int) -> None:
        if step != 20:
            return
        second.thread.start()
        wait_until(wants_a_slot, "the wish for a slot")
        counters.append(first.peers.machine._counter)
        time.sleep(4.0)
        counters.append(first.peers.machine._counter)
        assert newest(store).owners() == [first.peers.machine.incarnation]
        first.stop.set()

    first.on_step = save
    second.on_step = lambda _: second.stop.set()
    with syncer(store, tmp_path / "scratch"):
        with trained(first):
            pass
        second.finish()
    assert counters[1] - counters[0] >= 3
    assert second.steps == 1


def test_a_checkpoint_of_any_step_has_the_bits_of_a_version(tmp_path: Path) -> None:
    """Also while the next one is prepared. Its parameters are those that validation uses."""
    store = tmp_path / "store"
    total = 60 * 2 * TOKENS
    pair = [Trainee(store, name, config(2, delay=1), total_tokens=total) for name in "ab"]
    saved = list[tuple[int, int, str]]()
    decided = dict[tuple[int, int], str]()

    def look(_: int) -> None:
        peers = pair[0].peers
        state = pair[0].outer.saved_state()
        for number, (one, facts) in enumerate(
            zip(pair[0].outer.loop.states, state.facts.fragments, strict=True)
        ):
            named = state.kind(SHARED)
            values = torch.cat([named[part.name].flatten() for part in one.fragment.parts])
            checksum = hexadecimal(peers._layouts[number].checksum(values))
            saved.append((number, facts.optimizer_steps, checksum))
            with pair[0].outer.global_parameters():
                assert torch.equal(torch.cat([part.local() for part in one.fragment.parts]), values)
            shared = peers.machine.fragments[number].shared
            for version in range(shared.version + 1):
                if known := shared.checksum(version):
                    decided[number, version] = known

    pair[0].on_step = look
    with syncer(store, tmp_path / "scratch"), trained(*pair):
        pass
    assert len({version for _, version, _ in saved}) > 4
    for number, version, checksum in saved:
        assert decided[number, version] == checksum


def test_wrong_bits_of_a_copy_are_found_when_the_next_one_is_applied(tmp_path: Path) -> None:
    store = tmp_path / "store"
    total = 60 * 2 * TOKENS
    chosen = replace(config(8), quantization=Quantization(codec="fp4_e3m0"))
    pair = [Trainee(store, name, chosen, total_tokens=total) for name in "ab"]
    news = list[str]()

    def damage(step: int) -> None:
        if step == 30:
            pair[0].outer.loop.states[0].outer[3] += 1.0
        news.extend(pair[0].peers.machine.news.lines)

    pair[0].on_step = damage
    with syncer(store, tmp_path / "scratch"), trained(*pair):
        pass
    same(*pair)
    assert any("its copy has wrong bits" in line for line in news)


def without_syncer(folder: Path, total_tokens: int) -> Trainee:
    """Return an island that trains, and whose syncer has ended after step 20."""
    store = folder / "store"
    options: dict[str, Any] = {"begin": 1, "slots": 1, "step_seconds": 0.02}
    island = Trainee(store, "a", config(8), total_tokens=total_tokens, **options)
    is_training = threading.Event()
    goes_on = threading.Event()

    def wait(step: int) -> None:
        if step == 20:
            is_training.set()
            assert goes_on.wait(PATIENCE)

    island.on_step = wait
    with syncer(store, folder / "scratch"):
        island.thread.start()
        assert is_training.wait(PATIENCE)
    goes_on.set()
    return island


def test_an_island_leaves_although_it_waits_for_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has trained all tokens, and nobody decides that the run has ended."""
    monkeypatch.setattr(waiting, "UNDECIDED_SECONDS", 2.5)
    only = without_syncer(tmp_path, total_tokens=60 * TOKENS)
    only.peers.is_asked_to_leave = only.stop.is_set
    until = time.monotonic() + PATIENCE
    while not (only.peers.clock >= 60 * TOKENS and only.peers.machine.is_stopped):
        assert time.monotonic() < until
        time.sleep(0.02)
    only.thread.join(0.5)
    assert only.thread.is_alive(), "it waits"
    only.stop.set()
    only.finish()
    assert only.peers.left
    assert only.saved, "it can save"
    only.outer.drain()
    assert caplog.text.count("leaves without its last parts: no syncer has decided for") == 1


def test_an_island_leaves_although_no_syncer_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after Ctrl-C of everything. What it has not sent is read again."""
    monkeypatch.setattr(waiting, "UNDECIDED_SECONDS", 2.5)
    only = without_syncer(tmp_path, total_tokens=10**9)
    only.stop.set()
    only.finish()
    assert "leaves without its last parts: no syncer has decided for" in caplog.text


# --- custom loops ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon_silent")
def test_a_lost_slot_is_an_error_for_people_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An island is cut off until another one has its slot. Started again, it gets a free slot."""
    store = tmp_path / "store"
    options: dict[str, Any] = {"total_tokens": 10**9, "step_seconds": 0.02, "slot_seconds": 3.0}
    first = Trainee(store, "a", config(8), **options)
    second = Trainee(store, "b", config(8), **options)
    spare = Trainee(store, "c", config(8), **options)
    spare_trains = threading.Event()
    is_cut = threading.Event()
    stops = threading.Event()

    def cut(step: int) -> None:
        if step == 20:
            link = second.peers._link
            assert link is not None
            monkeypatch.setattr(link.run.brief, "replace", refuse)
            second.saved = second.outer.state_dict()
            is_cut.set()

    def refuse(*_: Any, **__: Any) -> None:
        raise AwayError("the uplink is away")

    def stop(one: Trainee) -> None:
        if stops.is_set():
            one.stop.set()

    def step_of_spare(_: int) -> None:
        spare_trains.set()
        stop(spare)

    second.on_step = cut
    first.on_step = lambda _: stop(first)
    spare.on_step = step_of_spare
    with syncer(store, tmp_path / "scratch"), trained(first):
        second.thread.start()
        assert is_cut.wait(60)
        with trained(spare):
            with pytest.raises(
                PeersLostError, match="silent for long, or nothing of it was merged for long"
            ):
                second.finish()
            assert not second.peers.finished, "a loop goes on to the error"
            assert spare_trains.wait(60)
            spare.stop.set()
        again = Trainee(store, "b", config(8), saved=second.saved, **options)

        def step_again(step: int) -> None:
            if step == 10:
                stops.set()
            stop(again)

        again.on_step = step_again
        with trained(again):
            pass
    assert again.peers.left
    assert again.peers.clock > 0
    assert again.steps >= 10


@pytest.mark.usefixtures("soon_silent")
def test_the_second_start_of_a_name_ends_and_the_first_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings: dict[str, Any] = {"total_tokens": 10**9, "begin": 1, "slots": 2, "step_seconds": 0.01}
    first, second = (Trainee(store, "a", config(8, delay=1), **settings) for _ in range(2))
    joined = threading.Event()
    first.on_join = lambda _: joined.set()
    with syncer(store, tmp_path / "scratch"), trained(first):
        assert joined.wait(60)
        with (
            pytest.raises(IslandFencedError, match="another process of this island is running"),
            trained(second),
        ):
            pass
        reached = first.steps
        wait_until(lambda: first.steps > reached + 10, "ten steps")
        first.stop.set()
    assert first.peers.left
    assert not second.steps


def test_the_end_of_an_own_loop_is_known_after_it_is_closed(tmp_path: Path) -> None:
    only = Trainee(
        tmp_path / "store", "a", config(8), total_tokens=30 * TOKENS, begin=1, slots=1, phases=[0.5]
    )
    assert (only.peers.finished, only.peers.clock, only.peers.entered) == (False, 0, [])
    only.on_step = lambda step: setattr(only.peers.gauges, "loss", 0.5 * step)
    with syncer(tmp_path / "store", tmp_path / "scratch"), trained(only):
        pass
    assert only.peers._link is None
    assert only.peers.finished
    assert not only.peers.left
    assert only.peers.clock >= 30 * TOKENS
    assert len(only.peers.entered) == 1
    with pytest.raises(RuntimeError, match="after close"):
        only.outer.step(1)


def test_settings_of_an_own_loop_are_checked(tmp_path: Path) -> None:
    def build(**options: Any) -> None:
        IslandPeers(Islands(str(tmp_path), "a"), total_tokens=1000, **options)

    with pytest.raises(UserError, match="corpus = 'web': give at most 64 hexadecimal digits"):
        build(corpus="web")
    for phases in ([0.5, 0.2], [0.5, 0.5], [0.0], [1.0]):
        with pytest.raises(UserError, match="increasing shares of the run"):
            build(phases=phases)
