"""Islands around a real model and a real server, in threads of one process."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import Net, config, full, inner_step, join, sgd, sharded
from tests.islands.running import FP4, TOKENS, Island, same, started, wait_until
from tests.islands.servers import need_server, running_server
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import DiLoCoConfig, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.distributed.world import WORKER
from torchtitan_diloco.islands import IslandDiLoCo, IslandFencedError, Islands, leader
from torchtitan_diloco.islands.join import Join
from torchtitan_diloco.islands.server import local_server

need_server()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Join]:
    with local_server(tmp_path / "server") as found:
        yield found


@pytest.fixture(autouse=True)
def _soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an island count as gone after a second."""
    monkeypatch.setattr(leader, "EXPIRY", 1.0)


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


STOCHASTIC = Quantization(codec="fp4_e3m0", rounding="stochastic")


@pytest.mark.parametrize(
    "chosen",
    [
        FP4,
        replace(config(0, delay=0, mixing=0.0), quantization=Quantization(codec="fp32")),
        replace(config(2, delay=5, mixing=0.5), quantization=STOCHASTIC),
    ],
    ids=["tau 1", "tau 0, one fragment, fp32", "tau 5, stochastic"],
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


# --- islands that come and go ---------------------------------------------------------------------


def test_a_death_does_not_hold_up_the_other(server: Join) -> None:
    first, second = (Island(server, name, steps=60, grace=0.2) for name in ("a", "b"))
    first.step_seconds = second.step_seconds = 0.01
    with started(first, second):
        second.wait_for_step(20)
        second.died.set()
        result = first.finish()
    assert result.rounds[-1].participants == 1
    assert result.outer.clock >= 60 * 2 * TOKENS


def test_an_island_joins_later_and_ends_with_the_same_bits(server: Join) -> None:
    first, second = (Island(server, name, steps=200, slots=3, grace=0.5) for name in ("a", "b"))
    third = Island(server, "c", steps=200, slots=3, grace=0.5)
    for island in (first, second, third):
        island.step_seconds = 0.02
    with started(first, second):
        wait_until(lambda: first.outer._leader is not None and first.step > 20, "the first rounds")
        third.start()
        results = [island.finish() for island in (first, second, third)]
    assert same(results[0].shared, results[1].shared)
    assert same(results[0].shared, results[2].shared)
    assert results[2].outer.seat.slot == 2
    assert results[2].steps < results[0].steps
    assert 3 in {round_.participants for round_ in results[0].rounds}


def test_an_island_that_died_returns_under_its_name(server: Join) -> None:
    first = Island(server, "a", steps=150, grace=0.2, step_seconds=0.02)
    second = Island(server, "b", steps=150, grace=0.2, step_seconds=0.02)
    again = Island(server, "b", steps=150, grace=0.2, step_seconds=0.02)
    with started(first, second):
        second.wait_for_step(30)
        taken = second.outer.seat.slot
        second.died.set()
        second.join(20)
        again.start()
        results = [first.finish(), again.finish()]
    assert same(results[0].shared, results[1].shared)
    assert again.outer.seat.slot == taken
    assert again.outer.seat.position > 0  # it does not read merged samples again


def test_an_island_that_leaves_gives_its_slot_back(server: Join) -> None:
    first = Island(server, "a", steps=80, grace=0.2, step_seconds=0.02)
    second = Island(server, "b", steps=80, grace=0.2, step_seconds=0.02)
    with started(first, second):
        second.wait_for_step(20)
        second.stop.set()
        left = second.finish(20)
        assert first.outer._leader is not None
        state = first.outer._leader.state
        wait_until(lambda: state.slots[second.outer.seat.slot].owner is None, "the slot")
        ledger = state.slots[second.outer.seat.slot].ledgers[0]
        assert ledger.taken_to <= 2 * left.steps
        first.finish()


def test_the_same_name_twice_is_refused_while_the_first_is_running(server: Join) -> None:
    first = Island(server, "a", begin=1, slots=2, steps=400, step_seconds=0.02)
    twin = Island(server, "a", begin=1, slots=2, steps=400)
    with started(first):
        first.wait_for_step(3)
        with started(twin), pytest.raises(ValueError, match="a is running already"):
            twin.finish()
        assert first.failure is None


def test_an_old_start_that_wakes_up_ends_without_harm(server: Join) -> None:
    """It does not answer for longer than islands wait, as after SIGSTOP."""
    first = Island(server, "a", steps=150, grace=0.2, step_seconds=0.02)
    stopped = Island(server, "b", steps=150, grace=0.2, step_seconds=0.02)
    again = Island(server, "b", steps=150, grace=0.2, step_seconds=0.02)
    with started(first, stopped):
        stopped.wait_for_step(20)
        frozen = stopped.outer._leader
        assert frozen is not None
        frozen._work = lambda: time.sleep(0.1)  # type: ignore[method-assign]
        with started(again):
            again.wait_for_step(10)
            del frozen._work
            with pytest.raises(IslandFencedError, match="was taken by b/"):
                stopped.finish()
            assert same(first.finish().shared, again.finish().shared)


@torch.no_grad()
def _move(island: Island) -> None:
    """Let a delta be as large as the number of its steps."""
    island.optimizer.param_groups[0]["lr"] = 0.0
    island.model.embedding.weight[0] += 0.01


def test_a_server_that_is_away_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was trained in the meantime counts, although its delta is larger than usual."""
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
    assert "has sent no delta" not in caplog.text


# --- the log is the run ---------------------------------------------------------------------------


def replayed(server: Join, saved: SavedState | None = None) -> dict[str, Tensor]:
    """Return the shared parameters that follow from the log, in a process that only reads it."""
    outer = Island(server, "reader", steps=STEPS, saved=saved).outer
    if saved is not None:
        outer.load_state_dict(saved)
    reader = outer._leader = outer.build_leader()
    reader.replay(outer._saved)
    outer._take_versions([copy.newest for copy in outer._copies.fragments])
    outer.close()
    return outer.global_state_dict()


STEPS = 90


def test_the_log_gives_the_final_copy_and_begins_the_run_again(server: Join) -> None:
    """All islands die. One has a checkpoint, from which both go on; the log gives every version."""
    saved: list[SavedState] = []

    def save(island: Island) -> None:
        if island.step == 30:
            saved.append(island.outer.start_state_dict().result(20))

    first = Island(server, "a", steps=STEPS, grace=0.2, step_seconds=0.01, each_step=save)
    second = Island(server, "b", steps=STEPS, grace=0.2, step_seconds=0.01)
    with started(first, second):
        first.wait_for_step(45)
    versions = [copy.newest for copy in first.outer._copies.fragments]
    again = Island(server, "a", steps=STEPS, grace=0.2, saved=saved[0])
    other = Island(server, "b", steps=STEPS, grace=0.2)
    with started(again):
        wait_until(lambda: again.step > 3 or not again.is_alive(), "steps after the restart")
        with started(other):
            results = [again.finish(), other.finish()]
    assert min(versions) > 0
    assert same(results[0].shared, results[1].shared)
    assert same(results[0].shared, replayed(server))
    assert same(results[0].shared, replayed(server, saved[0]))


def test_a_log_that_was_made_anew_is_refused(tmp_path: Path) -> None:
    saved: list[SavedState] = []

    def save(island: Island) -> None:
        if island.step == 20:
            saved.append(island.outer.start_state_dict().result(20))

    for folder in ("one", "two"):
        with running_server(tmp_path / folder, run="same") as found:
            island = Island(found.join, "a", begin=1, slots=1, each_step=save)
            island.saved = saved[0] if saved else None
            with started(island):
                if folder == "one":
                    island.finish()
                else:
                    with pytest.raises(ValueError, match="truncated or made anew"):
                        island.finish()


# --- several ranks --------------------------------------------------------------------------------


def _ranks(server: Join, name: str, chosen: DiLoCoConfig, steps: int) -> dict[str, Tensor]:
    """Train an island whose ranks share the model; one of them is slow."""
    world = join(1, int(os.environ["WORLD_SIZE"]))
    model = sharded(world)
    optimizer = sgd(model)
    outer = IslandDiLoCo(
        model,
        Islands(str(server), name, slots=2, begin=2, grace_seconds=60.0),
        chosen,
        total_tokens=steps * 2 * TOKENS,
        optimizer=optimizer,
        ranks=world.control,
        samples_per_step=2,
    )
    outer.join()
    step = 0
    while not outer.finished:
        step += 1
        inner_step(model, optimizer, outer.seat.slot, step)
        time.sleep(0.02 * world.rank)
        outer.step(weight=TOKENS)
    outer.drain()
    shared = {name: full(value) for name, value in outer.global_state_dict().items()}
    outer.close()
    return shared


@pytest.mark.parametrize("ranks", [2, 3])
def test_islands_of_several_ranks_have_equal_copies(
    processes: ProcessPool, server: Join, ranks: int
) -> None:
    alone = Island(server, "alone")
    with started(alone):
        results = processes.run(_ranks, ranks, server, "ranks", FP4, alone.steps)
        alone_result = alone.finish()
    assert all(same(result, results[0]) for result in results)
    assert same(results[0], alone_result.shared)


# --- bad input ------------------------------------------------------------------------------------


def test_an_island_with_other_settings_is_refused(server: Join) -> None:
    first = Island(server, "a", facts={"data": "one"})
    other = replace(FP4, sync_every=9)
    second = Island(server, "b", other, facts={"data": "two"})
    with started(first):
        wait_until(lambda: first.outer._leader and first.outer._leader.state.owners(), "a slot")
        with started(second), pytest.raises(ValueError, match="does not fit") as error:
            second.finish()
    assert "diloco.sync_every: 8 on side 0, 9 on side 1" in str(error.value)
    assert "data: one on side 0, two on side 1" in str(error.value)


def test_a_delta_that_is_not_finite_is_left_out_and_its_island_takes_the_shared_copy(
    server: Join,
) -> None:
    def poison(island: Island) -> None:
        if island.step == 20:  # just before the embedding is sent
            with torch.no_grad():
                island.model.embedding.weight[0] = torch.nan
        elif island.step == 21:  # the step has made all fragments NaN
            assert len(island.outer.heal()) == 5

    first = Island(server, "a", steps=48, grace=2.0, step_seconds=0.01)
    second = Island(server, "b", steps=48, grace=2.0, step_seconds=0.01, each_step=poison)
    with started(first, second):
        results = [first.finish(), second.finish()]
    assert same(results[0].shared, results[1].shared)
    for result in results:
        assert all(value.isfinite().all() for value in result.shared.values())
    assert all(parameter.isfinite().all() for parameter in results[1].model.parameters())


def test_a_corrupt_chunk_is_refused_with_the_reason(
    server: Join, caplog: pytest.LogCaptureFixture
) -> None:
    first = Island(server, "a", grace=0.5, step_seconds=0.01, steps=40)
    second = Island(server, "b", grace=0.5, step_seconds=0.01, steps=40)
    encode = second.outer._encoder.encode
    sent = []

    def damaged(delta: Tensor, *where: int) -> Tensor:
        payload = encode(delta, *where)
        sent.append(where)  # scale bytes of 255 are decoded as NaN
        return payload.fill_(255) if len(sent) == 2 else payload

    second.outer._encoder.encode = damaged  # type: ignore[method-assign, assignment]
    with started(first, second):
        results = [first.finish(), second.finish()]
    assert same(results[0].shared, results[1].shared)
    assert all(value.isfinite().all() for value in results[0].shared.values())
    assert "was left out: its values are not finite" in caplog.text


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"islands.name: may have letters"):
        IslandDiLoCo(Net(), Islands("nats://a", "a b"), FP4, total_tokens=1)
    chosen = replace(FP4, quantization=Quantization(codec="fp4_e3m0", error_feedback=True))
    with pytest.raises(ValueError, match=r"error_feedback: does not work with islands"):
        IslandDiLoCo(Net(), Islands("nats://a", "a"), chosen, total_tokens=1)
