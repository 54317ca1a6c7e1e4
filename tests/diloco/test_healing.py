"""Workers that went wrong: outliers and what is not finite harm neither the others nor the run, and
a run whose exchanges are in vain ends."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.diloco.toy import (
    Net,
    alone,
    config,
    full,
    inner_step,
    join,
    loss,
    parameters,
    sharded,
    start,
    train,
)
from tests.processes import ProcessPool
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.diloco import DiLoCoConfig, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.delta_norms import (
    FEWEST,
    LATEST,
    DeltaNorms,
    LeftOut,
    settle_weights,
)
from torchtitan_diloco.diloco.flags import DROPPED, NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.transport import Header
from torchtitan_diloco.distributed.world import FSDP, WORKER

LIMIT = 10.0
WEIGHT = "blocks.3.weight"
"""In fragment 3 of toy.config(2), whose first block is blocks.3."""


def judged(norms: list[float], limit: float = LIMIT) -> list[int]:
    history = DeltaNorms()
    return [history.judge(norm**2, limit) for norm in norms]


def test_a_norm_is_compared_with_the_median_of_those_before() -> None:
    usual = [1.0, 3.0, 1.0, 1.0, 9.0]
    assert judged([*usual, 9.9, 1.0, 10.1, 1e9, 1.0]) == [0] * 7 + [OUTLIER, OUTLIER, 0]
    assert judged([*usual, 1e9], limit=0.0) == [0] * 6
    assert judged([*usual, math.nan, math.inf]) == [0] * 5 + [NOT_FINITE] * 2
    assert judged([10.0**number for number in range(FEWEST)]) == [0] * FEWEST, "a short history"
    assert judged([0.0] * 2 * LATEST + [1.0] * FEWEST) == [0] * (2 * LATEST + FEWEST)
    assert judged([float(number) for number in range(1000)]) == [0] * 1000, "a warm-up"
    lasting = judged([1.0] * 100 + [1000.0] * 2 * LATEST)
    assert 0 < lasting.count(OUTLIER) <= LATEST
    assert lasting[-1] == 0


def header(flags: int = 0, weight: float = 2.0, fragment: int = 0) -> Header:
    return Header(flags, 1, fragment, 1, 1, weight, 0)


def test_flags_take_the_weight_unless_all_have_an_outlier() -> None:
    sent = [header(), header(NOT_FINITE), header(OUTLIER), header(DROPPED)]
    assert [one.weight for one in settle_weights(sent)] == [2.0, 0.0, 0.0, 0.0]
    assert settle_weights([header(OUTLIER)] * 3) == [header()] * 3
    mixed = settle_weights([header(OUTLIER), header(OUTLIER | DROPPED)])
    assert mixed == [header(), header(DROPPED, 0.0)]


def test_rounds_that_are_not_finite_are_counted_by_fragment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = LeftOut(workers=3, fragments=2)
    good = header()
    bad = header(NOT_FINITE)
    elsewhere = [header(fragment=1)] * 3
    for sent in [[good, bad, bad]] * 3 + [[good] * 3] + [[good, good, bad]] * 3 + [elsewhere] * 3:
        watch.note(sent, norm_limit=20.0)
    assert len(caplog.messages) == 2, "one line for rounds in a row"
    assert "the delta of worker 1 and of 2 after step 1 is not finite" in caplog.messages[0]
    with pytest.raises(ValueError, match="worker 2 has not sent a finite delta of fragment 0 in 4"):
        watch.note([good, good, bad], norm_limit=20.0)


def _stays_nan() -> tuple[int, str]:
    """Return the steps that were made, and the error."""
    outer, model, optimizer = start(config(2))
    step = 0
    try:
        for step in range(1, 41):
            if outer.worker == step == 1:
                model.gain.data.fill_(math.nan)
            inner_step(model, optimizer, outer.worker, step)
            outer.step()
        outer.drain()
    except ValueError as error:
        return step, str(error)
    return step, ""


def test_a_run_ends_if_a_worker_stays_without_finite_deltas(processes: ProcessPool) -> None:
    message = "worker 1 has not sent a finite delta of fragment 0 in 4 rounds"
    for steps, error in processes.run(_stays_nan, 2):
        assert message in error
        assert steps < 40


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> bool:
    """Train as the trainer does: return whether the gradient is finite, and skip it if not."""
    loss(model, worker, step).backward()
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return bool(norm.isfinite())


def _spoiled(
    chosen: DiLoCoConfig, factor: float, ranks: int, at_step: int, end: int
) -> dict[str, Any]:
    """Multiply one shard of worker 1 after a step, and heal after gradients that are not finite."""
    world = join(2, ranks)
    model = sharded(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = StreamingDiLoCo(
        model, world.group(WORKER), chosen, optimizer=optimizer, shard_group=world.shards
    )
    healed = {}
    for step in range(1, end + 1):
        finite = learn(model, optimizer, world.worker, step)
        if not finite:
            healed[step] = outer.heal(world.group(FSDP))
        if step == at_step and world.rank == ranks:
            local_of(model.get_parameter(WEIGHT)).mul_(factor)
        outer.step(float(finite))
    outer.drain()
    rounds = outer.rounds()
    counted = outer.metrics()["worker/healed_fragments"]
    return {
        "healed": healed,
        "steps": int(optimizer.state[model.get_parameter(WEIGHT)]["step"]),
        "rounds": rounds,
        "weights": {one.fragment: one.weight for one in rounds},
        "counted": (outer.state_dict()["facts"]["healed"], counted),
        "finite": all(bool(value.isfinite().all()) for value in parameters(model).values()),
        "shared": {name: full(value) for name, value in outer.global_state_dict().items()},
    }


@pytest.mark.parametrize(("factor", "ranks"), [(1e2, 1), (1e6, 2)])
def test_a_matrix_that_jumps_is_left_out_and_heals(
    processes: ProcessPool, factor: float, ranks: int
) -> None:
    """Fragment 3 is sent after the step in which it jumps."""
    wire = Quantization("fp4_e3m0")
    end = 45
    chosen = replace(config(2, delay=1), quantization=wire, sync_every=4)
    results = processes.run(_spoiled, 2 * ranks, chosen, factor, ranks, 25, end)
    for rank, found in enumerate(results):
        (jumped,) = [one for one in found["rounds"] if one.participants == 1]
        spoiled = rank >= ranks
        assert (jumped.fragment, jumped.flags) == (3, OUTLIER if spoiled else 0)
        assert found["steps"] == end - spoiled * jumped.applied_step, "fresh moments"
        torch.testing.assert_close(found["shared"], results[0]["shared"], rtol=0, atol=0)


POISONED = replace(config(2, delay=5), sync_every=20)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_is_not_finite_heals_at_once(processes: ProcessPool, ranks: int) -> None:
    """Fragment 3 is spoiled after step 5, long before its turn after step 32."""
    results = processes.run(_spoiled, 2 * ranks, POISONED, math.nan, ranks, 5, 40)
    for rank, found in enumerate(results):
        spoiled = rank >= ranks
        assert found["finite"]
        assert found["healed"] == ({6: [3]} if spoiled else {})
        assert found["counted"] == ((1, 1) if spoiled else (0, 0))
        assert found["steps"] == (34 if spoiled else 40), "fresh moments"
        assert {one.participants for one in found["rounds"]} == {2}
        assert found["weights"][3] == (26 if spoiled else 32), "of the steps since it was healed"
        assert found["weights"][2] == (27 if spoiled else 28), "without the skipped step"
        torch.testing.assert_close(found["shared"], results[0]["shared"], rtol=0, atol=0)


def test_moments_that_are_not_finite_heal_their_fragment() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = StreamingDiLoCo(model, None, config(1), optimizer=optimizer)
    shared = parameters(model)
    sum(one.sum() for one in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    moved = parameters(model)
    assert outer.heal() == []
    weight = model.get_parameter("blocks.1.weight")
    optimizer.state[weight]["exp_avg"][-1, -1] = math.inf
    assert outer.heal() == [1]
    for name, value in parameters(model).items():
        assert torch.equal(value, (shared if "blocks.1" in name else moved)[name])
    assert weight not in optimizer.state
    assert outer.heal() == []


def test_a_state_of_any_layout_and_precision_is_judged() -> None:
    """Optimizers may keep views, such as eigenvectors, and sums in fp64."""
    outer, model, optimizer = alone(config(0))
    outer.loop.optimizer = optimizer
    state = optimizer.state[model.get_parameter(WEIGHT)]
    state["vectors"] = torch.ones(3, 4).t()
    state["sum"] = torch.tensor(1e300, dtype=torch.float64)
    assert outer.heal() == []
    state["sum"].fill_(math.inf)
    assert outer.heal() == [0]
    outer.close()


def test_steps_before_a_reset_are_not_counted_even_after_a_save() -> None:
    outer, model, optimizer = alone(config(2))
    train(outer, model, optimizer, range(1, 4))
    model.gain.data.fill_(math.nan)
    assert outer.heal() == [4]

    def weights() -> list[float]:
        return [fragment["weight"] for fragment in outer.state_dict()["facts"]["fragments"]]

    assert weights() == [3, 3, 3, 3, 0]
    outer.step()
    assert weights() == [4, 4, 4, 4, 1]


# --- healed while in flight -----------------------------------------------------------------------


def in_flight_for(delay: int, codec: str = "fp32", mixing: float = 0.5) -> DiLoCoConfig:
    """One fragment, which is sent after steps 4 and 8, and applied with plain averages."""
    chosen = config(0, delay, mixing, name="sgd", lr=1.0)
    return replace(chosen, sync_every=4, quantization=Quantization(codec))


def advance(outer: StreamingDiLoCo, model: nn.Module, steps: range, *, heals_at: int = 0) -> None:
    """Learn in each step as much as the number of this worker, from 1 on, in every value."""
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                local_of(parameter).add_(outer.worker + 1.0)
        if step == heals_at:
            weight = model.get_parameter(WEIGHT)
            if not isinstance(weight, DTensor) or weight.device_mesh.get_local_rank() == 0:
                local_of(weight).fill_(math.nan)  # one rank of a worker is enough
            assert outer.heal() == [0]
        outer.step(weight=float(step != heals_at))


def assert_ahead(outer: StreamingDiLoCo, model: nn.Module, learned: float) -> None:
    """Assert that the model is ahead of the shared parameters by this in every value."""
    ahead = {name: value + learned for name, value in outer.global_state_dict().items()}
    held = {name: full(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(held, {name: full(value) for name, value in ahead.items()})


IN_FLIGHT = [
    (delay, healed, codec, mixing)
    for codec, mixing in [("fp32", 0.0), ("fp32", 0.5), ("fp32", 1.0), ("topk", 0.5)]
    for delay, healed in [(1, 5), (2, 5), (3, 6), (3, 7)]
]


@pytest.mark.parametrize(("delay", "healed", "codec", "mixing"), IN_FLIGHT)
def test_a_fragment_that_is_healed_in_flight_loses_no_round(
    delay: int, healed: int, codec: str, mixing: float
) -> None:
    """The shared parameters lack only the steps between the send and the heal."""
    outer, model, _ = alone(in_flight_for(delay, codec, mixing))
    before = parameters(model)
    applied = 4 + delay
    advance(outer, model, range(1, applied + 1), heals_at=healed)
    assert_ahead(outer, model, applied - healed)
    advance(outer, model, range(applied + 1, 9))
    outer.drain()
    wanted = {name: value + 8 - (healed - 4) for name, value in before.items()}
    torch.testing.assert_close(dict(outer.global_state_dict()), wanted)
    outer.close()


@pytest.mark.parametrize("sync_every", [4, 16])
@pytest.mark.parametrize("healed_by", ["step", "save"])
@pytest.mark.parametrize("codec", ["fp32", "topk"])
def test_a_heal_in_flight_is_known_after_a_restart(
    codec: str, healed_by: str, sync_every: int
) -> None:
    """Also if another schedule applies at once what is in flight."""
    chosen = in_flight_for(3, codec)
    outer, model, _ = alone(chosen)
    if healed_by == "step":
        advance(outer, model, range(1, 7), heals_at=5)
    else:
        advance(outer, model, range(1, 6))
        local_of(model.get_parameter(WEIGHT)).fill_(math.nan)
        assert outer.heal() == [0]
    saved = copy.deepcopy((outer.step_count, model.state_dict(), outer.state_dict()))
    outer.drain()
    outer.close()

    again = Net()
    again.load_state_dict(saved[1])
    resumed = StreamingDiLoCo(again, None, replace(chosen, sync_every=sync_every))
    notes = resumed.load_state_dict(saved[2])
    assert len(notes) == (sync_every != chosen.sync_every)
    if notes:
        assert_ahead(resumed, again, saved[0] - 5)
    advance(resumed, again, range(saved[0] + 1, 8))
    assert_ahead(resumed, again, 7 - 5)
    assert_ahead(outer, model, saved[0] - 5)
    resumed.close()


def _healed_in_flight(codec: str, ranks: int, is_sent_broken: bool) -> dict[str, Any]:
    """Heal worker 1 after step 5, before a round with the work of steps 1 to 4 is applied."""
    world = join(2, ranks)
    outer, model, _ = start(in_flight_for(2, codec), world=world)
    spoils = outer.worker == 1
    advance(outer, model, range(1, 4))
    if spoils and is_sent_broken:
        local_of(model.get_parameter(WEIGHT)).fill_(math.nan)
    advance(outer, model, range(4, 7), heals_at=5 * spoils)
    if spoils:
        assert_ahead(outer, model, 2.0)
    advance(outer, model, range(7, 9))
    outer.drain()
    first, second = outer.rounds()
    healed = outer.state_dict()["facts"]["healed"]
    shared = {name: full(value) for name, value in outer.global_state_dict().items()}
    outer.close()
    return {
        "shared": shared,
        "participants": (first.participants, second.participants),
        "weight": second.weight,
        "healed": healed,
    }


@pytest.mark.parametrize(
    ("codec", "ranks", "is_sent_broken"),
    [("fp32", 1, True), ("fp32", 2, False), ("fp4_e3m0", 1, False), ("topk", 2, False)],
)
def test_a_worker_follows_a_round_before_which_it_was_healed(
    processes: ProcessPool, codec: str, ranks: int, is_sent_broken: bool
) -> None:
    results = processes.run(_healed_in_flight, 2 * ranks, codec, ranks, is_sent_broken)
    for rank, result in enumerate(results):
        spoiled = rank >= ranks
        assert result["healed"] == spoiled
        assert result["participants"] == (2 - is_sent_broken, 2)
        assert result["weight"] == (3 if spoiled else 4), "of the steps since it was healed"
        torch.testing.assert_close(result["shared"], results[0]["shared"], rtol=0, atol=0)
