"""Islands around a real model and a real server, in threads of one process."""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import Net, config, full, inner_step, join, sgd, sharded
from tests.islands.running import FP4, TOKENS, Island, same, started
from tests.islands.servers import PATIENCE, need_server, wait_until
from tests.processes import ProcessPool, with_instructions
from torchtitan_diloco.diloco import Beginning, DiLoCoConfig, Overlap, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.distributed.world import WORKER
from torchtitan_diloco.islands import IslandPeers, Islands, connection
from torchtitan_diloco.islands import peers as island_peers
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.islands.records import Part, decode, encode

need_server()


pytestmark = pytest.mark.usefixtures("soon_gone")


# --- lockstep -------------------------------------------------------------------------------------


def _one_world(chosen: DiLoCoConfig, steps: int) -> dict[str, Tensor]:
    """Return the shared parameters of two workers of one job."""
    world, model = join(2), Net()
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    optimizer = sgd(model)
    for step in range(1, steps + 1):
        inner_step(model, optimizer, world.worker, step)
        outer.step(weight=TOKENS)
    outer.drain()
    return outer.global_state_dict()


@pytest.mark.parametrize(
    "chosen",
    [
        FP4,
        replace(config(0, delay=0, mixing=0.0), quantization=Quantization(codec="fp32")),
        replace(config(2, delay=5, mixing=0.5), quantization=Quantization(codec="int8")),
        replace(
            config(2, delay=1, name="sgd", lr=1.0),
            quantization=Quantization("topk", top_values=8),
        ),
    ],
    ids=["tau 1", "tau 0, one fragment, fp32", "tau 5, int8", "topk"],
)
def test_two_islands_have_the_bits_of_one_world(
    processes: ProcessPool, server: Join, chosen: DiLoCoConfig
) -> None:
    one_world, _ = processes.run(_one_world, 2, chosen, 24)
    islands = [Island(server, name, chosen) for name in ("a", "b")]
    with started(*islands):
        first, second = (island.finish() for island in islands)
    assert (first.steps, second.steps) == (24, 24)
    assert same(first.shared, second.shared)
    assert same(first.shared, one_world)
    assert all(round_.participants == 2 for round_ in first.rounds)


# --- several ranks --------------------------------------------------------------------------------


def _ranks(
    server: Join, name: str, chosen: DiLoCoConfig, steps: int, dies_in: int = 0
) -> dict[str, Tensor]:
    """Train an island with several ranks. One is slow, and may die in an upload."""
    connection.FIRST_CONNECTION_SECONDS = PATIENCE
    world = join(1, int(os.environ["WORLD_SIZE"]))
    model = sharded(world)
    optimizer = sgd(model)
    peers = IslandPeers(
        Islands(str(server), name, slots=2, begin=1 if dies_in else 2, grace_seconds=60.0),
        total_tokens=steps * 2 * TOKENS,
        ranks=world.control,
        tokens_per_step=TOKENS,
        samples_per_step=2,
    )
    outer = StreamingDiLoCo(model, peers, chosen, optimizer=optimizer)
    encode, uploads = peers._encode, count(1)

    def encode_or_die(*arguments: Any) -> Tensor:
        if next(uploads) == dies_in and world.rank:
            os._exit(1)
        return encode(*arguments)

    peers._encode = encode_or_die  # type: ignore[assignment]
    seat = peers.join()
    step = 0
    try:
        while not peers.finished:
            step += 1
            inner_step(model, optimizer, seat.slot, step)
            time.sleep(0.02 * world.rank)
            outer.step(weight=TOKENS)
    except RuntimeError:
        assert dies_in
        return {}
    outer.drain()
    shared = {name: full(value) for name, value in outer.global_state_dict().items()}
    outer.close()
    return shared


def test_a_dead_rank_leaves_no_part(processes: ProcessPool, server: Join) -> None:
    """A part is appended only after all ranks have encoded it and all chunks are stored."""
    processes.run(_ranks, 2, server, "a", FP4, 1000, 5, dying={1})
    parts: list[Part] = []

    def note(outcome: Outcome) -> None:
        if isinstance(outcome.record, Part):
            parts.append(outcome.record)

    with open_reader(server, note) as reader:
        for part in parts:
            assert part.chunks
            assert reader.connection.fetch(part.chunks, "parts")
    assert 1 <= len(parts) <= 4


def copies_of_island(server: str) -> dict[str, str]:
    """Train in an island of one process, with larger batches. Return hashes of the shared copy."""
    connection.FIRST_CONNECTION_SECONDS = PATIENCE
    island = Island(Join.parse(server), "alone", tokens=3 * TOKENS)
    with started(island):
        return hashes(island.finish().shared)


def hashes(copy: dict[str, Tensor]) -> dict[str, str]:
    return {name: sha256(value.numpy().tobytes()).hexdigest() for name, value in copy.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_islands_of_other_sizes_and_processors_have_equal_copies(
    processes: ProcessPool, server: Join, ranks: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = "default", f"{__name__}.copies_of_island", str(server)
        alone = pool.submit(with_instructions, *call)
        results = processes.run(_ranks, ranks, server, "ranks", FP4, 24)
        assert all(hashes(result) == alone.result() for result in results)


# --- bad input ------------------------------------------------------------------------------------


def test_an_island_with_other_settings_is_refused(server: Join) -> None:
    first = Island(server, "a", facts={"data": "one"})
    other = replace(FP4, delta_norm_limit=9.0)
    second = Island(server, "b", other, facts={"data": 2})
    with started(first):
        wait_until(lambda: first.peers._leader and first.peers._leader.state.owners(), "a slot")
        with started(second), pytest.raises(ValueError, match="differs from the run") as error:
            second.finish()
    assert "diloco.delta_norm_limit: 20.0 in the run, 9.0 in this island" in str(error.value)
    assert "data: one in the run, 2 in this island" in str(error.value)


def test_other_code_and_what_the_first_island_sets_are_only_named(
    server: Join, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug fix has to enter a run that goes on."""
    codes = count()
    monkeypatch.setattr(island_peers, "code_fingerprint", lambda *_: f"code-{next(codes)}")
    first, second = Island(server, "a"), Island(server, "b", replace(FP4, sync_every=12))
    second.peers.islands = replace(second.peers.islands, quorum=2, slots=4)
    with started(first):
        wait_until(lambda: first.peers._leader and first.peers._leader.state.owners(), "a slot")
        with started(second):
            assert same(first.finish().shared, second.finish().shared)
    assert second.peers.seat.slots == 2
    for line in (
        "this island uses slots = 2, as the run does, instead of 4",
        "this island uses quorum = 1, as the run does, instead of 2",
        "this island uses diloco.sync_every = 8, as the run does, instead of 12",
        "this island runs different code than the first one",
    ):
        assert line in caplog.text


def test_deltas_and_chunks_that_are_not_finite_are_left_out(
    server: Join, caplog: pytest.LogCaptureFixture
) -> None:
    """An island whose delta is not finite takes the shared copy."""

    def poison(island: Island) -> None:
        if island.step == 20:  # just before the embedding is sent
            with torch.no_grad():
                island.model.embedding.weight[0] = torch.nan
        elif island.step == 21:  # the step has made all fragments NaN
            assert len(island.outer.heal()) == 5

    first = Island(server, "a", steps=48, grace=2.0, step_seconds=0.01)
    second = Island(server, "b", steps=48, grace=2.0, step_seconds=0.01, each_step=poison)
    encode, uploads = second.peers._encode, count(1)

    def damaged(*arguments: Any) -> Tensor:
        payload = encode(*arguments)  # scale bytes of 255 are decoded as NaN
        return payload.fill_(255) if next(uploads) == 2 else payload

    second.peers._encode = damaged  # type: ignore[assignment]
    with started(first, second):
        results = [first.finish(), second.finish()]
    assert same(results[0].shared, results[1].shared)
    for result in results:
        assert all(value.isfinite().all() for value in result.shared.values())
    assert all(parameter.isfinite().all() for parameter in results[1].model.parameters())
    assert "was left out: its values are not finite" in caplog.text
    assert "the delta of island b is not finite" in caplog.text


def test_a_save_does_not_wait_for_an_upload(server: Join) -> None:
    """The server may be away for long, and an island that is told to stop saves and ends."""
    saved, released = list[dict[str, Any]](), threading.Event()

    def save(island: Island) -> None:
        leader = island.peers._leader
        assert leader is not None
        if island.step == 8:  # before the first send
            store = leader.store
            leader.store = lambda *part: (released.wait(PATIENCE), store(*part))[1]  # type: ignore[method-assign]
        elif island.step == 12:
            saved.append(island.outer.state_dict())
            released.set()

    island = Island(server, "a", begin=1, slots=1, grace=0.2, each_step=save)
    with started(island):
        island.wait_for_step(13)
        assert saved, "it was saved while the upload was waiting"
        island.finish()


def test_a_save_that_waits_for_parts_counts_this_as_waiting_and_says_so(
    server: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time of a save is compared with that of others, and a lost link is no slow disk."""
    for limit in ("STILL_SECONDS", "LATE_SECONDS"):
        monkeypatch.setattr(island_peers, limit, 0.2)
    fetches, released, waited = threading.Event(), threading.Event(), list[float]()

    def save(island: Island) -> None:
        leader = island.peers._leader
        assert leader is not None
        if island.step == 8:  # before the first send
            payload = leader._parts.payload

            def late_payload(sequence: int) -> Tensor:
                fetches.set()
                released.wait(PATIENCE)
                return payload(sequence)

            monkeypatch.setattr(leader._parts, "payload", late_payload)
        elif island.step == 12:
            assert fetches.wait(PATIENCE)
            # Told who is missing only in this wait.
            island.peers.watcher = Mock(missing=lambda _: released.set())
            before = island.outer.exposed_seconds
            island.outer.state_dict()
            waited.append(island.outer.exposed_seconds - before)

    island = Island(server, "a", begin=1, slots=1, grace=0.2, each_step=save)
    with started(island):
        island.finish()
    assert waited[0] >= 0.2
    assert re.search(r"waiting since 0 s for \d+ records of the log", caplog.text)


def test_alpha_follows_the_tokens_of_the_run(server: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    apply = OuterState.apply

    def recorded(state: OuterState, copy: Tensor, share: float, **more: bool) -> Tensor:
        shares.append(share)
        return apply(state, copy, share, **more)

    monkeypatch.setattr(OuterState, "apply", recorded)
    chosen = replace(FP4, overlap=Overlap(mixing=0.5, mixing_end=0.1))
    island = Island(server, "a", chosen, begin=1, slots=1)
    with started(island):
        island.finish()
    assert shares == sorted(shares, reverse=True)
    assert 0.3 < shares[0] < 0.4, "the first apply is after a third of the run"
    assert shares[-1] == pytest.approx(0.1, abs=0.1)


def test_what_one_world_had_in_flight_is_applied_with_its_alpha(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, model = replace(FP4, overlap=Overlap(mixing=0.5, mixing_end=0.1)), Net()
    one_world = StreamingDiLoCo(model, None, chosen, total_steps=40)
    while one_world.step_count < 20 or not one_world.peers.in_flight:
        one_world.step(weight=TOKENS)
    saved = one_world.state_dict()
    expected, found = chosen.overlap.mixing_at(one_world.progress), list[float]()
    apply_early = saving.apply_early

    def recorded(states: Any, saved: Any, mixing: Callable[[int, int], float]) -> None:
        found.append(mixing(0, 1))
        apply_early(states, saved, mixing)

    monkeypatch.setattr(saving, "apply_early", recorded)
    peers = IslandPeers(Islands("nats://127.0.0.1:1#r", "a", begin=1), total_tokens=10**6)
    island = StreamingDiLoCo(Net(), peers, chosen)
    island.load_state_dict(saved)
    assert found == [pytest.approx(expected)]
    assert expected < 0.4


def test_settings_are_checked() -> None:
    here = Islands("nats://127.0.0.1:1#r", "a")

    def build(islands: Any, chosen: Any = FP4, tokens: Any = 1) -> StreamingDiLoCo:
        return StreamingDiLoCo(Net(), IslandPeers(islands, total_tokens=tokens), chosen)

    with pytest.raises(ValueError, match=r"join: .*not of the form") as error:
        build(Islands("nats://a", "a b"), replace(FP4, beginning=Beginning(length=8)))
    assert "islands.name = 'a b': must have at most 60 characters, from A-Z" in str(error.value)
    assert "beginning.length = 8: does not work with islands" in str(error.value)
    with pytest.raises(
        ValueError, match=r"islands.name = 'münchen': .* at most 60 characters, from A-Z"
    ):
        build(replace(here, name="münchen"))
    with pytest.raises(ValueError, match=r"Islands.quorum = 0: expected a whole number >= 1"):
        replace(here, quorum=0)
    with pytest.raises(ValueError, match=r"quorum = 9: must be at most 2"):
        build(replace(here, quorum=9, begin=2))
    with pytest.raises(ValueError, match=r"join: is empty: give .*\n.*local = 2: starts"):
        build(Islands(name="a", local=2))
    with pytest.raises(ValueError, match=r"group: .* pass islands.IslandPeers"):
        StreamingDiLoCo(Net(), here, FP4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"diloco: must be DiLoCoConfig\(...\), not the class"):
        build(here, DiLoCoConfig)
    with pytest.raises(TypeError, match=r"islands: must be Islands\(...\), not <class 'str'>"):
        build("nats+tls://u:p@h:1#r")
    with pytest.raises(ValueError, match=r"total_tokens = 1.5: expected a whole number"):
        build(here, tokens=1.5)
    with pytest.raises(ValueError, match=r"total_tokens = 1e\+18: give at most 9.01e\+15"):
        build(here, tokens=1e18)
    given = build(replace(here, grace_seconds=2), tokens=1e9)
    with pytest.raises(RuntimeError, match=r"call join\(\) before the first step"):
        given.step()
    with pytest.raises(RuntimeError, match=r"call state_dict\(\) after join\(\)"):
        given.state_dict()
    assert isinstance(given.peers, IslandPeers)
    facts = given.peers.build_leader()._joiner._mine
    assert decode(encode(facts)) == facts, "numbers of another type would be void"
