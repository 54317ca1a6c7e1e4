"""Islands that join, die, lag, leave and return."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.islands.running import FP4, Island, same, started
from tests.islands.servers import PATIENCE, need_server, running_server, wait_until
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.islands import IslandFencedError, machine
from torchtitan_diloco.islands.bulk import Bulk
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.members import IslandFailedError
from torchtitan_diloco.islands.records import Chunk

need_server()


pytestmark = pytest.mark.usefixtures("soon_gone")


Action = Callable[[Island], object]


def at(step: int, action: Action) -> Action:
    """Do something in one step of an island."""
    return lambda island: action(island) if island.step == step else None


def hold(step: int, condition: Callable[[], object]) -> Action:
    """Block an island in a step, so that the run does not end too early."""
    return at(
        step, lambda one: wait_until(lambda: one.died.is_set() or condition(), "the other", 500)
    )


def die(island: Island) -> None:
    island.died.set()


def save_in(saved: list[SavedState]) -> Action:
    return lambda island: saved.append(SavedState.from_dict(island.outer.state_dict()))


# --- islands that come and go ---------------------------------------------------------------------


def test_islands_join_and_leave(server: Join) -> None:
    """A second island with the name of a running one is refused without harm."""
    islands = [Island(server, name, steps=100, slots=3, grace=0.5) for name in "abca"]
    first, second, third, twin = islands
    for island in islands:
        island.step_seconds = 0.02
    first.each_step = hold(30, lambda: third.step)
    wait_for_third = hold(30, lambda: third.step)  # else it could take the slot of the second
    second.each_step = lambda island: (
        island.stop.set() if island.step == 50 else wait_for_third(island)
    )
    with started(first, second):
        first.wait_for_step(20)
        with started(twin), pytest.raises(ValueError, match="a is already running"):
            twin.finish()
        third.start()
        reader = first.peers._leader
        assert reader is not None
        left, results = second.finish(), [first.finish(), third.finish()]
        slot = reader.state.slots[left.peers.seat.slot]
    assert same(results[0].shared, results[1].shared)
    assert results[1].peers.seat.slot == 2
    assert results[1].steps < results[0].steps
    assert {3, 2} <= {round_.participants for round_ in results[0].rounds}
    assert slot.owner is None
    for ledger in slot.ledgers:
        assert not ledger.lost
        assert ledger.taken_to == 2 * left.steps, "it has sent all its work"


def test_an_old_start_that_wakes_up_ends_without_harm(
    server: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is silent for longer than islands wait, as after SIGSTOP."""
    first, stopped, again = (
        Island(server, name, steps=100, grace=0.2, step_seconds=0.02) for name in "abb"
    )
    first.each_step = hold(40, lambda: again.step >= 10)
    with started(first, stopped):
        stopped.wait_for_step(20)
        frozen = stopped.peers._leader
        assert frozen is not None
        frozen._work = lambda: time.sleep(0.1)  # type: ignore[method-assign]
        monkeypatch.setattr(frozen._connection, "beat", print)
        with started(again):
            again.wait_for_step(10)
            del frozen._work
            with pytest.raises(IslandFencedError, match="was taken by b/"):
                stopped.finish()
            assert same(first.finish().shared, again.finish().shared)


def test_an_island_that_waits_long_for_a_part_keeps_its_slot(
    server: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link, parts may take longer than islands wait for a heartbeat."""
    first = Island(server, "a", steps=100, grace=0.2, step_seconds=0.05)
    second = Island(server, "b", steps=100, grace=0.2, step_seconds=0.05)
    third = Island(server, "c", steps=100)
    fetch, delays = Connection.fetch, [5.0]

    def slow(one: Connection, chunks: Sequence[Chunk], bulk: Bulk) -> bytearray:
        if one._name.startswith("b/") and third.is_alive() and delays:
            time.sleep(delays.pop())
        return fetch(one, chunks, bulk)

    monkeypatch.setattr(Connection, "fetch", slow)
    with started(first, second):
        second.wait_for_step(10)
        third.start()  # it waits for a slot
        assert same(first.finish().shared, second.finish().shared)
        with pytest.raises(ValueError, match="has ended"):
            third.finish()


@torch.no_grad()
def _move(island: Island) -> None:
    """Make the norm of a delta proportional to its number of steps."""
    island.optimizer.param_groups[0]["lr"] = 0.0
    island.model.embedding.weight[0] += 0.01


def test_a_server_that_is_away_holds_nobody_up(tmp_path: Path) -> None:
    """Work during an outage counts, although its delta is larger than usual."""
    chosen = replace(FP4, delta_norm_limit=2.0)
    with running_server(tmp_path / "server") as found:
        first = Island(found.join, "a", chosen, steps=120, grace=0.3, step_seconds=0.02)
        second = Island(found.join, "b", chosen, steps=120, grace=0.3, step_seconds=0.02)
        first.each_step = second.each_step = _move
        with started(first, second):
            first.wait_for_step(50)  # five rounds, which make a usual norm
            assert found.process is not None
            found.process.kill()
            found.process.wait()
            first.wait_for_step(first.step + 20)
            found.start()
            assert same(first.finish().shared, second.finish().shared)


def test_a_spare_island_keeps_one_copy_and_no_parts(server: Join) -> None:
    first, second = (Island(server, name, steps=100, grace=0.2, step_seconds=0.02) for name in "ab")
    spare = Island(server, "c", steps=100)
    with started(first, second):
        first.wait_for_step(10)
        with started(spare):
            first.wait_for_step(80)
            held = [len(copy.versions) for copy in spare.peers._copies.fragments]
            assert max(held) <= 2
            assert spare.peers._leader is not None
            assert len(spare.peers._leader._parts._fetched) <= 10


def test_an_island_leaves_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "AWAY", 0.5)
    with running_server(tmp_path / "server") as found:
        island = Island(found.join, "a", begin=1, slots=1, steps=1000, step_seconds=0.02)
        with started(island):
            island.wait_for_step(10)
            assert found.process is not None
            found.process.kill()
            island.wait_for_step(island.step + 5)
            island.stop.set()
            island.finish()


# --- the log is the run ---------------------------------------------------------------------------

STEPS = 90


def replayed(server: str, saved: SavedState | None = None) -> dict[str, Tensor]:
    """Replay the log without writing, and return the shared parameters."""
    island = Island(Join.parse(server), "reader", steps=STEPS)
    outer, peers = island.outer, island.peers
    if saved is not None:
        outer.load_state_dict(saved)
    reader = peers._leader = peers.build_leader()
    reader.catch_up(peers._saved)
    peers._copies.write_model([copy.newest for copy in peers._copies.fragments])
    outer.close()
    return outer.global_state_dict()


def test_the_log_gives_the_final_copy_and_begins_the_run_again(server: Join) -> None:
    """All islands die. Both continue from the checkpoint of one. The log gives every version."""
    saved: list[SavedState] = []

    first, second = (Island(server, name, steps=STEPS, grace=0.2) for name in "ab")
    first.each_step = lambda island: [at(30, save_in(saved))(island), at(45, die)(island)]
    second.each_step = at(45, die)
    with started(first, second):
        first.join(PATIENCE)
        second.join(PATIENCE)
    versions = [copy.newest for copy in first.peers._copies.fragments]
    again = Island(server, "a", steps=STEPS, grace=0.2, saved=saved[0])
    other = Island(server, "b", steps=STEPS, grace=0.2)
    again.each_step = hold(5, lambda: other.step)
    with started(again, other):
        results = [again.finish(), other.finish()]
    assert min(versions) > 0
    assert same(results[0].shared, results[1].shared)
    assert same(results[0].shared, replayed(str(server)))
    assert same(results[0].shared, replayed(str(server), saved[0]))


def test_an_island_with_a_flipped_bit_ends_and_the_others_know_why(
    server: Join, caplog: pytest.LogCaptureFixture
) -> None:
    def flip(island: Island) -> None:
        fragment = island.peers._copies.fragments[0]
        fragment.versions[fragment.newest].view(torch.int32)[0] ^= 1 << 20

    islands = [
        Island(server, name, steps=5000, begin=3, slots=3, grace=0.2, step_seconds=0.02)
        for name in "abc"
    ]
    islands[2].each_step = at(30, flip)
    with started(*islands):
        wait_until(lambda: not islands[2].is_alive(), "the end of c")
        with pytest.raises(
            IslandFailedError, match="different bits on island a, b than on this one"
        ):
            islands[2].finish()
        told = "different bits on island c than on this one and 1 more, which continue"
        wait_until(lambda: caplog.text.count(told) == 2, "what the others say")
