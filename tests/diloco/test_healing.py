"""Workers that went wrong: outliers and what is not finite harm neither the others nor the run."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diloco.toy import batch, config, full, join, parameters, sharded
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import DiLoCoConfig, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.healing import FEWEST, LATEST, DeltaNorms, settle_weights
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.transport import DROPPED, NOT_FINITE, OUTLIER, Header
from torchtitan_diloco.distributed.world import FSDP, WORKER

LIMIT = 10.0
WEIGHT = "blocks.3.weight"
"""In fragment 3 of toy.config(2), whose first block is blocks.3."""


# --- decisions ------------------------------------------------------------------------------------


def judged(norms: list[float], limit: float = LIMIT) -> list[int]:
    history = DeltaNorms()
    return [history.judge(norm**2, limit) for norm in norms]


def test_a_norm_is_compared_with_the_median_of_those_before() -> None:
    usual = [1.0, 3.0, 1.0, 1.0, 9.0]
    assert judged([*usual, 9.9, 1.0, 10.1, 1e9, 1.0]) == [0] * 7 + [OUTLIER, OUTLIER, 0]
    assert judged([*usual, 1e9], limit=0.0) == [0] * 6
    assert judged([*usual, math.nan, math.inf]) == [0] * 5 + [NOT_FINITE] * 2


def test_a_short_history_and_rounds_without_a_change_give_no_alarm() -> None:
    assert judged([10.0**number for number in range(FEWEST)]) == [0] * FEWEST
    assert judged([0.0] * 2 * LATEST + [1.0] * FEWEST) == [0] * (2 * LATEST + FEWEST)
    assert judged([float(number) for number in range(1000)]) == [0] * 1000, "a warm-up"


def test_a_lasting_change_is_an_outlier_for_a_while_only() -> None:
    found = judged([1.0] * 100 + [1000.0] * 2 * LATEST)
    assert 0 < found.count(OUTLIER) <= LATEST
    assert found[-1] == 0


def test_a_delta_of_more_steps_may_be_larger() -> None:
    history, early = DeltaNorms(), DeltaNorms()
    assert {history.judge(1.0, LIMIT) for _ in range(FEWEST)} == {0}
    assert history.judge(50.0**2, LIMIT, turns=30.0) == 0
    assert history.judge(50.0**2, LIMIT, turns=3.0) == OUTLIER
    assert {early.judge(0.05**2, LIMIT, turns=0.1) for _ in range(FEWEST)} == {0}
    assert early.judge(1.0, LIMIT) == 0


def header(flags: int = 0, weight: float = 2.0) -> Header:
    return Header(flags, 1, 0, 1, 1, weight, 0)


def test_flags_take_the_weight_unless_all_have_an_outlier() -> None:
    sent = [header(), header(NOT_FINITE), header(OUTLIER), header(DROPPED)]
    assert [one.weight for one in settle_weights(sent)] == [2.0, 0.0, 0.0, 0.0]
    assert settle_weights([header(OUTLIER)] * 3) == [header()] * 3
    mixed = settle_weights([header(OUTLIER), header(OUTLIER | DROPPED)])
    assert mixed == [header(), header(DROPPED, 0.0)]


# --- outliers -------------------------------------------------------------------------------------


@torch.no_grad()
def multiply(model: nn.Module, factor: float) -> None:
    model.get_parameter(WEIGHT).mul_(factor)


def copying_loss(model: nn.Module, worker: int, step: int) -> Tensor:
    """Return the loss where a token follows itself, which Net can learn."""
    tokens, _ = batch(worker, step)
    return nn.functional.cross_entropy(model(tokens), tokens)


@torch.no_grad()
def shared_loss(model: nn.Module, outer: StreamingDiLoCo) -> float:
    """Return the mean loss of the shared parameters on batches that nobody trains on."""
    with outer.global_parameters():
        return sum(copying_loss(model, 7, step).item() for step in range(20)) / 20


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> bool:
    """Train as the trainer does: return whether the gradient is finite, and skip it if not."""
    copying_loss(model, worker, step).backward()
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return bool(norm.isfinite())


JUMP, END = 50, 90
"""Steps: fragment 3 is sent after this one, and the run ends."""


def _jump(
    chosen: DiLoCoConfig, factor: float, ranks: int, shorter: int
) -> tuple[list[float], list[Round], int]:
    """Return shared losses before the jump and at the end, the rounds, and Adam's steps."""
    world = join(2, ranks)
    model = sharded(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = StreamingDiLoCo(
        model, world.group(WORKER), chosen, optimizer=optimizer, shard_group=world.shards
    )
    losses = []
    for step in range(1, END // shorter + 1):
        learn(model, optimizer, world.worker, step)
        if step == JUMP // shorter:
            losses.append(shared_loss(model, outer))
            multiply(model, factor if world.worker == 1 else 1.0)
        outer.step()
    outer.drain()
    steps = optimizer.state[model.get_parameter(WEIGHT)]["step"]
    return [*losses, shared_loss(model, outer)], outer.rounds(), int(steps)


@pytest.mark.parametrize(("factor", "ranks", "shorter"), [(1e2, 1, 1), (1e6, 2, 2)])
def test_a_matrix_that_jumps_is_left_out_and_heals(
    processes: ProcessPool, factor: float, ranks: int, shorter: int
) -> None:
    wire = Quantization("fp4_e3m0")
    chosen = replace(config(2, delay=1), quantization=wire, sync_every=8 // shorter)
    results = processes.run(_jump, 2 * ranks, chosen, factor, ranks, shorter)
    for rank, (losses, rounds, steps) in enumerate(results):
        assert losses == pytest.approx(results[0][0])
        if shorter == 1:
            assert losses[1] < losses[0] / 50, "0.003, as without the jump, and 0.016 with it"
        (jumped,) = [one for one in rounds if one.participants == 1]
        worker = rank // ranks
        assert (jumped.fragment, jumped.flags) == (3, OUTLIER if worker == 1 else 0)
        healed_after = jumped.applied_step if worker == 1 else 0
        assert steps == END // shorter - healed_after, "fresh moments"


# --- not finite -----------------------------------------------------------------------------------


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    value: Any = model.get_parameter(WEIGHT).detach()
    (value.to_local() if hasattr(value, "to_local") else value)[0, 0] = math.nan


def _poisoned(ranks: int, spoiled_step: int) -> dict[str, Any]:
    """Spoil one shard of worker 1, and heal after steps whose gradient is not finite."""
    world = join(2, ranks)
    model = sharded(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen = replace(config(2, delay=5), sync_every=20)
    outer = StreamingDiLoCo(
        model, world.group(WORKER), chosen, optimizer=optimizer, shard_group=world.shards
    )
    healed, skipped = [], []
    for step in range(1, 41):
        finite = learn(model, optimizer, world.worker, step)
        if not finite:
            skipped.append(step)
            healed.append(outer.heal(world.group(FSDP)))
        if step == spoiled_step and world.rank == ranks:
            spoil(model)
        outer.step(float(finite))
    outer.drain()
    steps = optimizer.state[model.get_parameter(WEIGHT)]["step"]
    shared = {name: full(value) for name, value in outer.global_state_dict().items()}
    facts = outer.state_dict()["facts"]
    rounds = outer.rounds()
    return {
        "healed": healed,
        "skipped": skipped,
        "steps": int(steps),
        "rounds": [(one.fragment, one.flags, one.participants) for one in rounds],
        "weights": {one.fragment: one.weight for one in rounds},
        "counted": (facts["healed"], outer.metrics()["diloco/healed_fragments"]),
        "finite": all(bool(value.isfinite().all()) for value in parameters(model).values()),
        "shared": shared,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_is_not_finite_heals_at_once(processes: ProcessPool, ranks: int) -> None:
    """Fragment 3 is spoiled after step 5, long before its turn after step 32."""
    results = processes.run(_poisoned, 2 * ranks, ranks, 5)
    for rank, found in enumerate(results):
        spoiled = rank >= ranks
        assert found["finite"]
        assert found["skipped"] == ([6] if spoiled else [])
        assert found["healed"] == ([[3]] if spoiled else [])
        assert found["counted"] == ((1, 1) if spoiled else (0, 0))
        assert found["steps"] == (34 if spoiled else 40), "fresh moments"
        assert {participants for _, _, participants in found["rounds"]} == {2}
        assert found["weights"][3] == (26 if spoiled else 32), "of the steps since it was healed"
        assert found["weights"][2] == (27 if spoiled else 28), "without the skipped step"
        torch.testing.assert_close(found["shared"], results[0]["shared"], rtol=0, atol=0)


def test_a_delta_taken_before_the_nan_counts(processes: ProcessPool) -> None:
    """Fragment 3 is sent after step 32 and applied after step 37."""
    spoiled, clean = (processes.run(_poisoned, 2, 1, step) for step in (33, 0))
    for worker in range(2):
        assert spoiled[worker]["finite"]
        assert spoiled[worker]["rounds"][:5] == clean[worker]["rounds"][:5]
        shared = (found[worker]["shared"][WEIGHT] for found in (spoiled, clean))
        torch.testing.assert_close(*shared, rtol=0, atol=0)
    assert spoiled[1]["healed"] == [[3]]


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
