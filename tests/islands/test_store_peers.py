"""Islands in a folder: they found, join, leave, return and end."""

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.diloco.toy import config
from tests.islands.by_hand import newest, open_run, syncer
from tests.islands.test_one_job import Versions, one_job
from tests.islands.trainees import TOKENS, Trainee, trained
from tests.processes import ProcessPool
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.islands.store_peers import StorePeers
from torchtitan_diloco.islands_store.note import Part


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
                versions.setdefault(key, one.peers.states[number].outer.clone())

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
    assert isinstance(one.peers, StorePeers)
    one.outer.close()


def test_a_version_of_others_waits_for_the_buffer_of_a_slow_upload(tmp_path: Path) -> None:
    """It leaves the delta as it was taken, and is applied once the delta is encoded."""
    store = tmp_path / "store"
    chosen = config(0, delay=1)
    total = 80 * 2 * TOKENS
    slow, fast = (
        Trainee(store, name, chosen, total_tokens=total, step_seconds=0.02) for name in "ab"
    )
    encode = slow.peers._encode
    seen = list[tuple[int, int]]()  # version of a part's base, and the newest one afterwards

    def encode_late(part: Part, round_: Round) -> None:
        state = slow.peers.states[part.fragment]
        taken = state.delta.clone()
        if part.number in (2, 4):
            time.sleep(2.5)  # rounds close after a second
        assert torch.equal(state.delta, taken)
        seen.append((part.base, slow.peers.machine.fragments[0].shared.version))
        encode(part, round_)

    slow.peers._encode = encode_late  # type: ignore[method-assign]
    with syncer(store, tmp_path / "scratch"), trained(slow, fast):
        pass
    same(slow, fast)
    assert any(newest_version > base for base, newest_version in seen), "others were merged"
    assert not any(ledger.lost for slot in newest(store).slots for ledger in slot.ledgers)
