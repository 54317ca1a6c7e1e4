"""Islands with several ranks: only the first one talks to the store."""

import os
import random
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.diloco.toy import config, join, sharded
from tests.islands.by_hand import newest, open_run, syncer
from tests.islands.ranked import TOKENS, RankedIsland
from tests.processes import DIED, ProcessPool
from tests.waiting import wait_until
from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.diloco import DiLoCoConfig, Quantization
from torchtitan_diloco.diloco.codecs import Codec
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.islands import followers
from torchtitan_diloco.islands.layout import Layout, Ranks, hexadecimal, shapes_of
from torchtitan_diloco.islands.payload import PartHeader, encode, encode_into, memory_of
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.names import PART
from torchtitan_diloco.islands.rules.note import Part

FP4 = Quantization(codec="fp4_e3m0")
Shared = dict[str, Tensor]


def is_same(found: list[Shared]) -> bool:
    return all(torch.equal(one[name], found[0][name]) for one in found for name in found[0])


def lost_samples(decision: Decision) -> list[int]:
    """Return the samples of each slot whose work was lost."""
    return [max(ledger.lost for ledger in slot.ledgers) for slot in decision.slots]


def finish(island: RankedIsland) -> Shared:
    island.outer.drain()
    shared = island.shared()
    island.outer.close()
    return shared


# --- equal copies ---------------------------------------------------------------------------------


def to_the_end(store: Path, chosen: DiLoCoConfig, islands: int) -> tuple[Shared, list[str]]:
    """Return the shared parameters at the end of a run, and the checksums of the copies."""
    island = RankedIsland(store, chosen, islands=islands, total_tokens=40 * islands * TOKENS)
    island.peers.join()
    island.train()
    island.outer.drain()
    checksums = island.peers._copies.checksums()
    shared = island.shared()
    island.outer.close()
    return shared, checksums


@pytest.mark.parametrize(
    ("codec", "islands", "ranks"), [("fp4_e3m0", 2, 2), ("int8", 1, 3), ("bf16", 2, 1)]
)
def test_all_ranks_and_islands_have_the_bits_that_are_decided(
    processes: ProcessPool, tmp_path: Path, codec: Any, islands: int, ranks: int
) -> None:
    chosen = replace(config(2, delay=1), quantization=Quantization(codec=codec))
    store = tmp_path / "store"
    with syncer(store, tmp_path / "scratch"):
        found = processes.run(to_the_end, islands * ranks, store, chosen, islands)
    assert is_same([shared for shared, _ in found])
    decision = newest(store)
    decided = [one.checksum(one.version) for one in decision.fragments]
    assert all(checksums == decided for _, checksums in found)
    assert all(one.version > 3 for one in decision.fragments)
    assert lost_samples(decision) == [0] * islands


# --- two uses of a buffer -------------------------------------------------------------------------


def late_in_the_second_rank(store: Path, chosen: DiLoCoConfig) -> tuple[Shared, bool]:
    """Return the shared parameters, and whether another version was decided during an upload."""
    island = RankedIsland(store, chosen, total_tokens=80 * 2 * TOKENS, grace=1.0)
    peers = island.peers
    encode = peers._encode
    numbers = count(1)
    was_behind = False

    def encode_late(payload: Tensor, codec: Codec, delta: Tensor) -> None:
        if island.name == "a" and island.rank == 1 and next(numbers) in (2, 4):
            taken = delta.clone()
            time.sleep(2.5)  # rounds close after a second
            assert torch.equal(delta, taken)
        encode_into(payload, codec, delta)

    def look(part: Part, round_: Round) -> None:
        nonlocal was_behind
        encode(part, round_)
        if island.rank == 0:
            was_behind |= peers.machine.fragments[part.fragment].shared.version > part.base

    peers._encode = look  # type: ignore[method-assign]
    with patch.object(followers, "encode_into", encode_late):
        peers.join()
        island.train(on_step=lambda _: time.sleep(0.02))
        return finish(island), was_behind


def test_a_version_of_others_waits_until_all_ranks_have_encoded(
    processes: ProcessPool, tmp_path: Path
) -> None:
    """Also if the first rank has long encoded its own delta."""
    store = tmp_path / "store"
    chosen = replace(config(0, delay=1), quantization=FP4)
    with syncer(store, tmp_path / "scratch"):
        found = processes.run(late_in_the_second_rank, 4, store, chosen)
    assert is_same([shared for shared, _ in found])
    assert any(was_behind for _, was_behind in found)
    assert lost_samples(newest(store)) == [0, 0]


def two_downloads(chosen: DiLoCoConfig) -> tuple[list[str], list[str]]:
    """Prepare two copies one after the other, of which the second rank applies the first one late.

    Return the checksum of the last one, and on the first rank those of both.
    """
    world = join(1, 2)
    model = sharded(world)
    fragments = build_fragments(model, chosen.fragments)
    cpu = torch.device("cpu")
    optimizer = chosen.outer_optimizer
    states = [OuterState(one, optimizer, cpu, has_optimizer=False) for one in fragments]
    layouts = [Layout(shapes_of(one), 2, world.rank) for one in fragments]
    copies = followers.SharedCopies(states, layouts, Ranks(world.shards))
    following = BackgroundThread("follow")
    (state,) = states
    if world.rank:
        followed = following.submit(copies.follow)
    expected = list[str]()
    for seed in (1, 2):
        if world.rank == 0:
            whole = torch.randn(layouts[0].values, generator=torch.Generator().manual_seed(seed))
            content = bytearray(memory_of(encode(whole, PartHeader())))
            expected.append(hexadecimal(Layout(layouts[0].shapes).checksum(whole)))
            assert copies.prepare(0, content, lambda: False) == expected[-1]
        dist.barrier(world.control)
        if world.rank and seed == 1:
            prepared = state.delta.clone()
            time.sleep(1.0)  # the first rank has the next one meanwhile
            assert torch.equal(state.delta, prepared)
        state.apply(state.delta, Mode.TAKE)
        copies.on_taken(0)
    found = copies.checksums()
    if world.rank == 0:
        assert torch.equal(copies.gather(0), whole)
        copies.stop()
    else:
        followed.result(60)
    return found, expected


def with_random_delays(store: Path, chosen: DiLoCoConfig, steps: int) -> Shared:
    island = RankedIsland(store, chosen, total_tokens=steps * 2 * TOKENS, grace=1.0)
    peers = island.peers
    seconds = random.Random(island.world.rank)
    encode = peers._encode
    prepare = peers._copies._prepare

    def encode_late(*arguments: Any) -> None:
        time.sleep(seconds.choice((0.0, 0.0, 0.05)))
        encode(*arguments)

    def prepare_late(*arguments: Any) -> str | None:
        time.sleep(seconds.choice((0.0, 0.0, 0.05)))
        return prepare(*arguments)

    peers._encode = encode_late  # type: ignore[assignment]
    peers._copies._prepare = prepare_late  # type: ignore[assignment]
    peers.join()
    island.train(on_step=lambda _: time.sleep(seconds.choice((0.0, 0.01))))
    return finish(island)


def test_a_download_waits_until_all_ranks_have_applied_the_one_before(
    processes: ProcessPool,
) -> None:
    (found, expected), (other, _) = processes.run(two_downloads, 2, config(0))
    assert found == other == expected[-1:]


@pytest.mark.long
def test_random_delays_of_ranks_end_in_no_deadlock(processes: ProcessPool, tmp_path: Path) -> None:
    """The collectives of sends, downloads and decisions have the same order on all ranks."""
    store = tmp_path / "store"
    chosen = replace(config(2, delay=1), sync_every=5, quantization=FP4)
    with syncer(store, tmp_path / "scratch"):
        found = processes.run(with_random_delays, 4, store, chosen, 120)
    assert is_same(found)
    decision = newest(store)
    assert sum(one.version for one in decision.fragments) >= 90
    assert lost_samples(decision) == [0, 0]


# --- what goes wrong on one rank ------------------------------------------------------------------


def poisoned(store: Path, chosen: DiLoCoConfig, heals: bool) -> tuple[Shared, bool, list[int]]:
    """Return the shared parameters, whether those of this rank are finite, and what was healed."""
    island = RankedIsland(store, chosen, total_tokens=60 * 2 * TOKENS, grace=5.0, adam=False)
    island.peers.join()
    healed = list[int]()

    def poison(step: int) -> None:
        if step != 20:
            return
        if island.name == "a":  # leaves the other one steps in which it notices
            wait_until(lambda: any(lost_samples(newest(store))), "the loss of the other one")
            return
        if island.rank == 1:
            with torch.no_grad():
                island.outer.loop.states[0].fragment.parts[0].local()[0] = torch.nan
        if heals:
            healed.extend(island.outer.heal(island.world.shards))

    island.train(on_step=poison)
    locals_ = [part.local() for state in island.outer.loop.states for part in state.fragment.parts]
    is_finite = all(bool(value.isfinite().all()) for value in locals_)
    return finish(island), is_finite, healed


@pytest.mark.parametrize("heals", [True, False])
def test_values_of_one_rank_that_are_not_finite_are_dropped_on_all(
    processes: ProcessPool, tmp_path: Path, heals: bool
) -> None:
    """At once if the loop calls `heal`, and otherwise when they would be sent, fragment by
    fragment, so that the others spread them again."""
    store = tmp_path / "store"
    with syncer(store, tmp_path / "scratch"):
        found = processes.run(poisoned, 4, store, config(8, delay=1), heals)
    assert is_same([shared for shared, _, _ in found])
    assert not heals or all(is_finite for _, is_finite, _ in found)
    assert all(bool(value.isfinite().all()) for value in found[0][0].values())
    decision = newest(store)
    assert sorted(map(bool, lost_samples(decision))) == [False, True]
    total = decision.settings.total_tokens
    for number, shared in enumerate(decision.fragments):
        ledgers = [slot.ledgers[number] for slot in decision.slots]
        merged = sum(ledger.taken - ledger.lost for ledger in ledgers)
        assert shared.clock == merged * decision.settings.tokens_per_sample >= total
    if heals:
        assert [healed for *_, healed in found] == [[], [], [0], [0]]


def dying(store: Path, chosen: DiLoCoConfig) -> str:
    """Train an island whose second rank dies in an upload. Return what the first one says."""
    island = RankedIsland(store, chosen, islands=1)
    encode = island.peers._encode

    def encode_or_die(part: Part, round_: Round) -> None:
        if part.number == 3 and island.rank == 1:
            os._exit(1)
        encode(part, round_)

    island.peers._encode = encode_or_die  # type: ignore[method-assign]
    island.peers.join()
    try:
        island.train()
    except WorkerLostError as error:
        return str(error)
    except RuntimeError as error:  # FSDP2 may be the first to notice
        return f"FSDP2: {error}"
    return ""


def test_a_dead_rank_leaves_no_part(processes: ProcessPool, tmp_path: Path) -> None:
    """A part is listed once all ranks have encoded it, and the error names the lost rank."""
    store = tmp_path / "store"
    with syncer(store, tmp_path / "scratch"), open_run(store) as run:
        first, second = processes.run(dying, 2, store, config(0, delay=1), dying={1})
        parts = [entry.name for entry in run.store.list(PART)]
    assert second == DIED
    assert first
    numbers = [int(name.rpartition("-")[2].partition(".")[0]) for name in parts]
    assert max(numbers, default=0) < 3
    assert [ledger.number for slot in newest(store).slots for ledger in slot.ledgers] == [2]
