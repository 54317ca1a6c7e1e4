"""The outer step of one fragment, on flat fp32 buffers: shared parameters and mean delta -> next shared parameters.

The delta is theta_outer - theta_local, so it plays the part of a gradient. The result is written where the delta was: the
old shared parameters stay whole until the fragment is applied, and no further buffer is needed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import OuterOptimizer

BLOCK = 32_768
"""Elements worked on at once on the CPU: small enough that the passes of one step stay in cache, and that torch keeps to
the thread that calls it instead of taking the cores from the training."""
MEASURED = 2**24
"""Values whose change is measured at once: room for so many is taken for a moment."""

STATE_BUFFERS = {"nesterov": 1, "momentum": 1, "sgd": 0, "adam": 2, "sign_momentum": 1}
"""fp32 values kept per parameter besides the shared parameters."""


@dataclass(frozen=True)
class OuterStep:
    """Numbers of one step."""

    lr: float
    momentum: float
    beta2: float
    epsilon: float
    round: int
    """How often this fragment has been updated, this time included."""


Update = Callable[[Tensor, Tensor, list[Tensor], OuterStep], None]
"""(shared parameters, delta that becomes the next shared parameters, state, numbers)."""


def _sgd(theta: Tensor, delta: Tensor, _: list[Tensor], step: OuterStep) -> None:
    torch.add(theta, delta, alpha=-step.lr, out=delta)


def _momentum(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    buffer = torch.add(delta, state[0], alpha=step.momentum, out=state[0])
    torch.add(theta, buffer, alpha=-step.lr, out=delta)


def _nesterov(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    buffer = torch.add(delta, state[0], alpha=step.momentum, out=state[0])
    delta.add_(buffer, alpha=step.momentum)
    torch.add(theta, delta, alpha=-step.lr, out=delta)


def _sign_momentum(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    buffer = state[0].mul_(step.momentum).add_(delta, alpha=1 - step.momentum)
    torch.sign(buffer, out=delta)
    torch.add(theta, delta, alpha=-step.lr, out=delta)


def _adam(theta: Tensor, delta: Tensor, state: list[Tensor], step: OuterStep) -> None:
    first, second = state
    first.mul_(step.momentum).add_(delta, alpha=1 - step.momentum)
    second.mul_(step.beta2).addcmul_(delta, delta, value=1 - step.beta2)
    torch.sqrt(second, out=delta)
    delta.mul_(1 / math.sqrt(1 - step.beta2**step.round)).add_(step.epsilon)
    torch.div(first, delta, out=delta)
    torch.add(theta, delta, alpha=-step.lr / (1 - step.momentum**step.round), out=delta)


UPDATES: dict[str, Update] = {
    "nesterov": _nesterov,
    "momentum": _momentum,
    "sgd": _sgd,
    "adam": _adam,
    "sign_momentum": _sign_momentum,
}


def outer_update(
    config: OuterOptimizer, theta: Tensor, delta: Tensor, state: list[Tensor], outer_round: int
) -> float:
    """Turns `delta` into the next shared parameters and advances `state`; `theta` is only read. Returns the square of the norm
    of the change, measured while a block is in cache."""
    step = OuterStep(
        outer_lr(config, outer_round), config.momentum, config.beta2, config.epsilon, outer_round
    )
    update = UPDATES[config.name]
    size = BLOCK if theta.device.type == "cpu" else max(1, theta.numel())
    change = 0.0
    room = torch.empty(min(size, MEASURED, theta.numel()), device=theta.device)
    for start in range(0, theta.numel(), size):
        block = slice(start, start + size)
        update(theta[block], delta[block], [buffer[block] for buffer in state], step)
        for now, before in zip(
            delta[block].split(MEASURED), theta[block].split(MEASURED), strict=True
        ):
            moved = torch.sub(now, before, out=room[: now.numel()])
            change += torch.dot(moved, moved).item()
    return change


def outer_lr(config: OuterOptimizer, outer_round: int) -> float:
    """Learning rate of an outer round (the first is 1): keyed by rounds, so it is right for any number of workers."""
    if outer_round < config.warmup_rounds:
        return config.lr * outer_round / config.warmup_rounds
    if config.decay == "constant":
        return config.lr
    span = max(1, config.decay_rounds - config.warmup_rounds)
    progress = min(1.0, (outer_round - config.warmup_rounds) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.lr * (config.floor + (1 - config.floor) * shape)
