"""Buffers of a fragment on another device than the model."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import Net, config
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState

CPU = torch.device("cpu")


def build(*, on_host: bool) -> tuple[Net, OuterState]:
    """`on_host`: transfers are those of a model on a GPU with its buffers in host memory."""
    model = Net()
    (fragment,) = build_fragments(model, config(0).fragments)
    state = OuterState(fragment, config().outer_optimizer, CPU, has_optimizer=False)
    state._on_host = on_host
    return model, state


def train(model: Net) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.1)


def change(state: OuterState, seed: int) -> Iterator[Tensor]:
    numbers = torch.randn(state.values, generator=torch.Generator().manual_seed(seed))
    return iter(numbers.split(100))


def rounds_of(model: Net, state: OuterState) -> list[Tensor]:
    """Apply versions in every way, and return deltas, copies and parameters."""
    found = list[Tensor]()

    def look() -> None:
        found.extend([state.outer.clone(), *(one.detach().clone() for one in model.parameters())])

    train(model)
    state.take_delta()
    train(model)
    state.finish_delta()
    found.append(state.delta.clone())
    state.prepare(change(state, 1), replaces=False)
    found.append(state.apply(state.delta, Mode.MIX, 0.5, measured=True))
    look()
    state.prepare(change(state, 2), replaces=False)
    train(model)
    state.apply(state.delta, Mode.ADD)
    look()
    train(model)
    state.take_delta()  # it is not finite, say: the parameters take the copy that is there
    state.finish_delta()
    found.append(state.apply(state.outer, Mode.TAKE, measured=True))
    look()
    state.prepare(change(state, 3), replaces=True)  # and while the next one waits
    train(model)
    found.append(state.apply(state.outer, Mode.TAKE, measured=True))
    look()
    found.append(state.apply(state.delta, Mode.MIX, 0.5))
    look()
    return found


def test_buffers_in_host_memory_have_the_bits_of_those_beside_the_model() -> None:
    beside = rounds_of(*build(on_host=False))
    on_host = rounds_of(*build(on_host=True))
    for one, other in zip(beside, on_host, strict=True):
        assert torch.equal(one, other) or (one.isnan().all() and other.isnan().all())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_copy_that_is_applied_again_stays_as_it_is(on_host: bool) -> None:
    """Also if its distance to the parameters is measured."""
    model, state = build(on_host=on_host)
    copy = state.outer.clone()
    train(model)
    trained = torch.cat([part.local() for part in state.fragment.parts])
    distance = torch.linalg.vector_norm(trained - copy)
    assert torch.allclose(state.apply(state.outer, Mode.TAKE, measured=True), distance)
    assert torch.equal(state.outer, copy)
    assert torch.equal(torch.cat([part.local() for part in state.fragment.parts]), copy)
