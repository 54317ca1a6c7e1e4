"""The flat outer step is torch's optimizer and reads the shared parameters only."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchtitan_diloco.diloco.config import Fragments, OuterOptimizer
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_optimizer import BLOCK
from torchtitan_diloco.diloco.outer_state import OuterState, checksum
from torchtitan_diloco.diloco.reference import build_optimizer


@pytest.mark.parametrize("name", ["nesterov", "momentum", "sgd"])
@pytest.mark.parametrize("size", [0, 1, BLOCK + 17])
@pytest.mark.parametrize("measured", [False, True])
def test_steps_are_torchs(name: str, size: int, measured: bool) -> None:
    torch.manual_seed(0)
    config = OuterOptimizer(name=name, lr=0.3)  # type: ignore[arg-type]
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(size))})
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state, expected = (
        OuterState(fragment, config, torch.device("cpu")),
        model["weight"].detach().clone(),
    )
    optimizer = build_optimizer(config, [expected])
    for _ in range(5):
        expected.grad = torch.randn(size)
        state.delta.copy_(expected.grad)
        optimizer.step()
        before = state.outer.clone()
        mean_square, change = state.advance(measured=measured)
        assert torch.equal(state.outer, before), "whole until the fragment is applied"
        assert state.checksum == checksum(state.delta)
        if measured:
            assert mean_square == pytest.approx(float(expected.grad.square().sum()), rel=1e-4)
            assert change == pytest.approx(float((state.delta - before).square().sum()), rel=1e-4)
        else:
            assert math.isnan(mean_square)
            assert math.isnan(change)
        state.apply(mixing=0.0)
        torch.testing.assert_close(state.outer, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(model["weight"], state.outer)


@given(st.integers(1, 3000), st.integers(0, 10**6))
def test_checksum_sees_a_flipped_bit_and_a_swap(size: int, place: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    flipped = values.clone()
    flipped.view(torch.int32)[place % size] ^= 1
    assert checksum(values) == checksum(values.clone()) != checksum(flipped)
    if size >= 2048:
        swapped = torch.cat([values[size - 1024 :], values[1024 : size - 1024], values[:1024]])
        assert checksum(values) != checksum(swapped)
