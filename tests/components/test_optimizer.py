"""Learning rate, weight decay and clipping; Muon is torch's own, on any number of ranks."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grad_norm_

from tests.diloco.toy import join, parameters
from tests.processes import ProcessPool
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import drop_state, inner_tensors
from torchtitan_diloco.components.lr_schedule import lr_factor
from torchtitan_diloco.components.optimizer import (
    build_optimizer,
    clipped_step,
    describe_inner,
    gradient_norm,
    set_lr,
)
from torchtitan_diloco.config.parts import OPTIMIZERS, OptimizerEntry
from torchtitan_diloco.config.schema import LrSchedule, Optimizer
from torchtitan_diloco.distributed.world import FSDP

schedules = st.builds(
    LrSchedule,
    warmup=st.integers(0, 50),
    decay=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    decay_fraction=st.floats(0, 1),
    floor=st.floats(0, 1),
)


@pytest.mark.parametrize(
    ("config", "schedule", "expected"),
    [
        (
            Optimizer(),
            LrSchedule(warmup=0.1),
            "adamw lr 0.0004 beta1 0.9 beta2 0.99 epsilon 1e-08 weight decay 0.1; warm-up of 20 "
            "steps, then cosine to 5 % of the peak",
        ),
        (
            Optimizer("muon", lr=4e-3, matrix_lr=6e-3, weight_decay="1/steps"),
            LrSchedule(warmup=1, decay="wsd", floor=0),
            "muon lr 0.004 matrix_lr 0.006 momentum 0.95 beta1 0.9 beta2 0.99 epsilon 1e-08 weight "
            "decay 0.005; warm-up of 1 step, then wsd to 0 % of the peak",
        ),
        (
            Optimizer("mine", lr=3e-3, options={"rank": 8}),
            LrSchedule(warmup=0, decay="constant"),
            "mine lr 0.003 beta2 0.99 weight decay 0.1 rank 8 rescale True; warm-up of 0 steps, "
            "then constant",
        ),
    ],
    ids=["adamw", "muon", "added"],
)
def test_the_header_describes_the_inner_optimizer(
    config: Optimizer, schedule: LrSchedule, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"rank": 4, "rescale": True}
    added = OptimizerEntry(build=str, reads=("beta2",), options=options)
    monkeypatch.setitem(OPTIMIZERS, "mine", added)
    assert describe_inner(config, schedule, total_steps=200, schedule_steps=200) == expected


@given(schedule=schedules, total=st.integers(1, 200))
def test_lr_rises_then_falls_to_the_floor(schedule: LrSchedule, total: int) -> None:
    factors = [lr_factor(step, total, schedule) for step in range(1, total + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    warm = factors[: int(schedule.warmup)]
    assert warm == sorted(warm)
    decayed = factors[max(0, int(schedule.warmup) - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(decayed))
    assert all(factor >= schedule.floor - 1e-12 for factor in decayed)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_lr_at_the_marks(decay: str) -> None:
    schedule = LrSchedule(warmup=10, decay=decay, decay_fraction=0.5, floor=0.1)
    assert lr_factor(1, 110, schedule) == pytest.approx(0.1)
    assert lr_factor(10, 110, schedule) == pytest.approx(1.0)
    assert lr_factor(110, 110, schedule) == pytest.approx(0.1)
    middle = {"cosine": 0.55, "linear": 0.55, "wsd": 1 - 0.9 * 5 / 55}[decay]
    assert lr_factor(60, 110, schedule) == pytest.approx(middle)


def test_only_matrices_decay() -> None:
    linear = nn.Linear(4, 4)
    norm = nn.LayerNorm(4)
    model = nn.Sequential(linear, norm)
    optimizer = build_optimizer(model, Optimizer(lr=0.1, weight_decay=0.5), total_steps=10)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(linear.weight, torch.full((4, 4), 1 - 0.1 * 0.5))
    for parameter in (linear.bias, norm.weight, norm.bias):
        assert torch.equal(parameter, torch.ones(4))
    optimizer = build_optimizer(model, Optimizer(weight_decay="1/steps"), total_steps=400)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1 / 400, 0.0]


class Net(nn.Module):
    """Tall, wide and narrow matrices, whose rows divide nothing evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, rows) for rows in (7, 21, 3, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = parameter.placements
            parameter.grad = distribute_tensor(parameter.grad, mesh, placements)


def train(name: str, max_norm: float, *, together: bool, broken: bool = False) -> list[Tensor]:
    """Return parameters and moments after three steps, of which the second may have a NaN."""
    model = Net()
    optimizer = build_optimizer(model, Optimizer(name=name), total_steps=10)
    for step in range(3):
        set_gradients(model, step)
        if broken and step == 1:
            model.embedding.weight.grad.fill_(math.nan)  # type: ignore[union-attr]
        norm = gradient_norm(model.parameters())
        assert norm.isnan() == (broken and step == 1)
        if together:
            clipped_step(optimizer, norm, max_norm)
        elif norm.isfinite():
            clip_grad_norm_(model.parameters(), max_norm or math.inf)
            optimizer.step()
    moments = [optimizer.state[one] for one in model.parameters()]
    return [*model.parameters(), *(value for one in moments for value in one.values())]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_clipped_step(name: str, max_norm: float, broken: bool) -> None:
    found, expected = (
        train(name, max_norm, together=together, broken=broken) for together in (True, False)
    )
    torch.testing.assert_close(found, expected)


# --- Muon -----------------------------------------------------------------------------------------

SETTINGS = Optimizer(name="muon", lr=0.03, matrix_lr=0.02, momentum=0.9, weight_decay=0.1)


def train_muon(workers: int, ranks: int) -> dict[str, Tensor]:
    world = join(workers, ranks)
    model = Net()
    if world.mesh is not None:
        fully_shard(model, mesh=world.mesh if workers > 1 else world.mesh[FSDP])
    optimizer = build_optimizer(model, SETTINGS, total_steps=10)
    for step in range(3):
        set_lr(optimizer, 1 / (1 + step))
        set_gradients(model, step)
        optimizer.step()
    return parameters(model)


def test_muon_is_torchs_muon_beside_adamw() -> None:
    """torch's works in bf16, of which the matrices show the rounding."""
    model = Net()
    matrices = [block.weight for block in model.blocks]
    vectors = [block.bias for block in model.blocks]
    decay = SETTINGS.weight_decay
    muon = torch.optim.Muon(
        matrices,  # type: ignore[arg-type]
        lr=0.02,
        momentum=0.9,
        weight_decay=decay,  # type: ignore[arg-type]
        adjust_lr_fn="match_rms_adamw",
    )
    groups = [{"params": [model.embedding.weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.99), weight_decay=decay, fused=True)  # type: ignore[arg-type]
    for step in range(3):
        for optimizer, lr in ((muon, 0.02), (adamw, 0.03)):
            for group in optimizer.param_groups:
                group["lr"] = lr / (1 + step)
        set_gradients(model, step)
        muon.step()
        adamw.step()
    found = train_muon(1, 1)
    expected = parameters(model)
    before = parameters(Net())
    for name, value in expected.items():
        error = found[name] - value
        change = value - before[name]
        in_bf16 = name.startswith("blocks.") and name.endswith("weight")
        assert error.norm() < (0.02 if in_bf16 else 1e-6) * change.norm(), name


@pytest.mark.parametrize(("workers", "ranks"), [(1, 2), (1, 4), (2, 2)])
def test_muon_on_any_number_of_ranks_is_the_same(
    processes: ProcessPool, workers: int, ranks: int
) -> None:
    """Two workers are in data parallelism. The rows of one rank alone would give another result."""
    expected = train_muon(1, 1)
    for found in processes.run(train_muon, workers * ranks, workers, ranks):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# --- optimizers of others -------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Adds a state to each parameter after a step."""

    value: object = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.value


def add(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any]) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mine", OptimizerEntry(build=build))


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 100.0])
def test_one_without_kernels_that_clip_takes_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, max_norm: float, broken: bool
) -> None:
    add(monkeypatch, lambda model, *_: torch.optim.RMSprop(model.parameters(), lr=0.01))
    found, expected = (
        train("mine", max_norm, together=together, broken=broken) for together in (True, False)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("value", [0, [1.0]])
def test_a_state_that_is_no_tensor_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(Counting, "value", value)
    add(monkeypatch, lambda model, *_: Counting(model.parameters(), lr=0.01))
    kind = type(value).__name__
    reason = f"^optimizer.name: the state count of Counting is of {kind}, and not a tensor, so it c"
    with pytest.raises(UserError, match=reason):
        train("mine", 1.0, together=True)


def test_one_that_does_not_train_all_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add(monkeypatch, lambda model, *_: torch.optim.SGD(model.blocks.parameters(), lr=0.01))
    reason = '"mine": it would not train embedding.weight: give it all parameters'
    with pytest.raises(UserError, match=reason):
        train("mine", 1.0, together=True)


@pytest.mark.parametrize("name", ["adamw", "muon", "mine"])
def test_a_state_is_created_to_be_filled_and_what_was_not_saved_begins_anew(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A parameter that was never trained has no state in a checkpoint, and none after it."""
    add(monkeypatch, lambda model, *_: torch.optim.RMSprop(model.parameters(), lr=0.01))
    trained = Net()
    optimizer = build_optimizer(trained, Optimizer(name=name), total_steps=10)
    for step in range(2):
        set_gradients(trained, step)
        trained.embedding.weight.grad = None
        clipped_step(optimizer, gradient_norm(trained.parameters()), 1.0)
    saved = inner_tensors(trained, optimizer)
    assert not [key for key in saved if key.startswith("optimizer/") and "embedding" in key]

    model = Net()
    other = build_optimizer(model, Optimizer(name=name), total_steps=10)
    rates = [group["lr"] for group in other.param_groups]
    created = inner_tensors(model, other, create=True)
    assert rates == [group["lr"] for group in other.param_groups]
    assert not [parameter for parameter in model.parameters() if parameter.grad is not None]
    for key in saved:
        created[key].copy_(saved[key])
    states = len(other.state[model.embedding.weight])
    assert drop_state(model, other, saved) == states > 0
    for one, its in ((trained, optimizer), (model, other)):
        set_gradients(one, 2)
        clipped_step(its, gradient_norm(one.parameters()), 1.0)
    found = inner_tensors(model, other)
    for key, value in inner_tensors(trained, optimizer).items():
        assert torch.equal(found[key], value), key
