"""The flat outer step is torch's optimizer, reads the shared parameters only, and works in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtitan_diloco.diloco.checksum import checksum

from torchtitan_diloco.diloco.config import OuterOptimizer
from torchtitan_diloco.diloco.outer_optimizer import BLOCK, STATE_BUFFERS, outer_lr, outer_update
from torchtitan_diloco.diloco.reference import SignMomentum


def torch_optimizer(config: OuterOptimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    if config.name == "adam":
        betas = (config.momentum, config.beta2)
        return torch.optim.Adam([parameter], lr=config.lr, betas=betas, eps=config.epsilon)
    if config.name == "sign_momentum":
        return SignMomentum([parameter], config.lr, config.momentum)
    momentum = 0.0 if config.name == "sgd" else config.momentum
    return torch.optim.SGD(
        [parameter], lr=config.lr, momentum=momentum, nesterov=config.name == "nesterov"
    )


@pytest.mark.parametrize("name", list(STATE_BUFFERS))
@pytest.mark.parametrize("size", [0, 1, BLOCK + 17])
def test_steps_are_torchs(name: str, size: int) -> None:
    config = OuterOptimizer(name=name, lr=0.3)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(size, generator=generator)
    expected = theta.clone()
    optimizer = torch_optimizer(config, expected)
    slots = [torch.zeros(size) for _ in range(STATE_BUFFERS[name])]
    for outer_round in range(1, 6):
        delta = torch.randn(size, generator=generator)
        expected.grad = delta.clone()
        optimizer.step()
        before = theta.clone()
        change = outer_update(config, theta, delta, slots, outer_round)
        assert change == pytest.approx(
            (delta.double() - theta.double()).square().sum().item(), rel=1e-4
        )
        assert torch.equal(theta, before), (
            "the present shared parameters stay whole until the fragment is applied"
        )
        theta, delta = delta, theta
        torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-6)


@given(
    warmup=st.integers(0, 20),
    span=st.integers(1, 50),
    decay=st.sampled_from(["constant", "cosine", "linear"]),
    floor=st.floats(0, 1),
)
def test_outer_lr_rises_then_falls(warmup: int, span: int, decay: str, floor: float) -> None:
    config = OuterOptimizer(
        lr=0.5, warmup_rounds=warmup, decay=decay, decay_rounds=warmup + span, floor=floor
    )  # type: ignore[arg-type]
    rates = [outer_lr(config, outer_round) for outer_round in range(1, warmup + span + 5)]
    assert rates[: max(0, warmup - 1)] == sorted(rates[: max(0, warmup - 1)])
    falling = rates[max(0, warmup - 1) :]
    assert falling == sorted(falling, reverse=True)
    assert rates[-1] == pytest.approx(0.5 if decay == "constant" else 0.5 * floor)


@given(st.integers(1, 3000), st.integers(0, 10**6))
def test_checksum_sees_a_flipped_bit_and_a_swap(size: int, place: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    flipped = values.clone()
    flipped.view(torch.int32)[place % size] ^= 1
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(flipped)
    if size > 1024:
        swapped = values.clone()
        swapped[:1024], swapped[size - 1024 :] = (
            values[size - 1024 :].clone(),
            values[:1024].clone(),
        )
        if size >= 2048:
            assert checksum(values) != checksum(swapped)
