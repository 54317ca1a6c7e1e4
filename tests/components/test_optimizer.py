"""Learning rate, weight decay and clipping on one process."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from torchtitan_diloco.components.optimizer import (
    build_optimizer,
    clipped_step,
    gradient_norm,
    lr_factor,
)
from torchtitan_diloco.config.schema import LrSchedule, Optimizer

schedules = st.builds(
    LrSchedule,
    warmup_steps=st.integers(0, 50),
    decay=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    decay_fraction=st.floats(0, 1),
    floor=st.floats(0, 1),
)


@given(schedule=schedules, total=st.integers(1, 200))
def test_lr_rises_then_falls_to_the_floor(schedule: LrSchedule, total: int) -> None:
    factors = [lr_factor(step, total, schedule) for step in range(1, total + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    warm = factors[: schedule.warmup_steps]
    assert warm == sorted(warm)
    decayed = factors[max(0, schedule.warmup_steps - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(decayed))
    assert all(factor >= schedule.floor - 1e-12 for factor in decayed)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_lr_at_the_marks(decay: str) -> None:
    schedule = LrSchedule(warmup_steps=10, decay=decay, decay_fraction=0.5, floor=0.1)  # type: ignore[arg-type]
    assert lr_factor(1, 110, schedule) == pytest.approx(0.1)
    assert lr_factor(10, 110, schedule) == pytest.approx(1.0)
    assert lr_factor(110, 110, schedule) == pytest.approx(0.1)
    middle = {"cosine": 0.55, "linear": 0.55, "wsd": 1 - 0.9 * 5 / 55}[decay]
    assert lr_factor(60, 110, schedule) == pytest.approx(middle)


def test_only_matrices_decay() -> None:
    linear, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    model = nn.Sequential(linear, norm)
    optimizer = build_optimizer(model, Optimizer(lr=0.1, weight_decay=0.5), total_steps=10)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(linear.weight, torch.full((4, 4), 1 - 0.1 * 0.5))
    for parameter in (linear.bias, norm.weight, norm.bias):
        assert torch.equal(parameter, torch.ones(4))


def test_weight_decay_of_one_over_the_steps() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), Optimizer(weight_decay="1/steps"), total_steps=400)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1 / 400, 0.0]


def train(name: str, max_norm: float, *, together: bool, broken: bool = False) -> list[Tensor]:
    """Return parameters and moments after three steps, of which the second may have a NaN."""
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks, model.head = nn.Linear(5, 3), nn.Linear(3, 2)
    optimizer = build_optimizer(model, Optimizer(name=name), total_steps=10)  # type: ignore[arg-type]
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        norm = gradient_norm(model.parameters())
        if broken and step == 1:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
            norm = gradient_norm(model.parameters())
            assert math.isnan(norm)
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
