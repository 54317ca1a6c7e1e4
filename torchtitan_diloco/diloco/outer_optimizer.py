"""Outer step of one fragment on flat fp32 buffers: shared parameters, mean delta -> next shared.

The delta is theta_outer - theta_local, so it takes the place of a gradient. The result is written
over the delta: the present shared parameters stay whole until the fragment is applied, and no
further buffer is needed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import OuterOptimizer

BLOCK = 65_536
"""Values processed at once on a CPU, so that the operations of a step find them in cache."""

STATE_BUFFERS = {"nesterov": 1, "momentum": 1, "sgd": 0, "adam": 2}
"""fp32 values of optimizer state per parameter."""


def outer_lr(config: OuterOptimizer, outer_round: int) -> float:
    """Return the learning rate of an outer round, counted from 1."""
    if outer_round < config.warmup_rounds:
        return config.lr * outer_round / config.warmup_rounds
    if config.decay == "constant":
        return config.lr
    span = max(1, config.decay_rounds - config.warmup_rounds)
    progress = min(1.0, (outer_round - config.warmup_rounds) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.lr * (config.floor + (1 - config.floor) * shape)


class OuterStep(NamedTuple):
    config: OuterOptimizer
    outer_round: int  # updates of this fragment, this one included
    lr: float


Update = Callable[[Tensor, Tensor, list[Tensor], OuterStep], None]
"""(shared parameters, delta to be replaced by the next ones, optimizer state, step)."""


def _sgd(theta: Tensor, delta: Tensor, _: list[Tensor], step: OuterStep) -> None:
    torch.add(theta, delta, alpha=-step.lr, out=delta)


def _momentum(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    buffer = torch.add(delta, state[0], alpha=step.config.momentum, out=state[0])
    torch.add(theta, buffer, alpha=-step.lr, out=delta)


def _nesterov(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    buffer = torch.add(delta, state[0], alpha=step.config.momentum, out=state[0])
    delta.add_(buffer, alpha=step.config.momentum)
    torch.add(theta, delta, alpha=-step.lr, out=delta)


def _adam(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    first, second = state
    first.mul_(step.config.momentum).add_(delta, alpha=1 - step.config.momentum)
    second.mul_(step.config.beta2).addcmul_(delta, delta, value=1 - step.config.beta2)
    torch.sqrt(second, out=delta)
    delta.mul_(1 / math.sqrt(1 - step.config.beta2**step.outer_round)).add_(step.config.epsilon)
    torch.div(first, delta, out=delta)
    correction = 1 - step.config.momentum**step.outer_round
    torch.add(theta, delta, alpha=-step.lr / correction, out=delta)


UPDATES: dict[str, Update] = {
    "nesterov": _nesterov,
    "momentum": _momentum,
    "sgd": _sgd,
    "adam": _adam,
}
