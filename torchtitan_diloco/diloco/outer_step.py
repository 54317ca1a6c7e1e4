"""The outer step: from the mean delta of a round to the next shared parameters.

Jobs and the syncer of islands call `outer_step` with the rule of `OUTER_OPTIMIZERS` that
`diloco.outer_optimizer.name` chooses. All workers must get the same bits: arithmetic.py says how.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import OuterOptimizer

STEP_VALUES = 65_536
"""Values processed at once on a CPU, so that they stay in cache during a step."""
AVERAGE = OuterOptimizer(name="sgd", lr=1.0)
"""Plain averaging of the workers."""


def outer_step(
    config: OuterOptimizer,
    theta: Tensor,
    delta: Tensor,
    slots: Sequence[Tensor],
    *,
    count: int,
    lr: float,
) -> None:
    """Replace the mean delta with the next shared parameters, and update the optimizer state.

    The delta, theta_outer - theta_local, serves as gradient. The result overwrites it, because
    `theta` is needed until the fragment is applied.

    Args:
        config: its numbers except the learning rate, which may change from round to round.
        slots: state of the optimizer, from zeros on.
        count: number of steps with this state, including this one.
        lr: learning rate of this step.
    """
    rule = config.rule.load()
    rule(Direction(config, delta, slots, count))
    torch.sub(theta, delta.mul_(scalar(lr)), out=delta)


@lru_cache(maxsize=64)
def scalar(number: float) -> Tensor:
    """Return a number as a tensor, to avoid a conversion in each call of torch."""
    return torch.tensor(number, dtype=torch.float32, device="cpu")


# --- the rules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Direction:
    """What a rule turns into the direction of a step."""

    config: OuterOptimizer
    delta: Tensor
    """The mean delta, fp32 [n], which the rule replaces with the direction."""
    slots: Sequence[Tensor]
    """States of the optimizer for the same parameters, in the order of `OuterRule.slots`, which the
    rule updates. All were zeros before the first step."""
    steps: int
    """Number of steps with these states, including this one."""


def sgd(_: Direction) -> None:
    """Keep the delta as it is."""


def momentum(step: Direction) -> None:
    """Add the momentum, which is stored already decayed: this saves a pass over memory."""
    (slot,) = step.slots
    torch.mul(step.delta.add_(slot), scalar(step.config.momentum), out=slot)


def nesterov(step: Direction) -> None:
    """Add the momentum after it has taken the delta and has decayed, which is how it is stored."""
    (slot,) = step.slots
    step.delta.add_(slot.add_(step.delta).mul_(scalar(step.config.momentum)))


def adam(step: Direction) -> None:
    """Divide the first moment by the root of the second. Both are kept without bias: a first step
    replaces them."""
    config = step.config
    delta = step.delta
    first, second = step.slots
    square = delta * delta
    first.add_(delta.sub_(first).mul_(_newest_share(config.momentum, step.steps)))
    second.add_(square.sub_(second).mul_(_newest_share(config.beta2, step.steps)))
    square.copy_(second.double().sqrt_()).add_(scalar(config.epsilon))
    torch.div(first, square, out=delta)


@lru_cache(maxsize=64)
def _newest_share(decay: float, count: int) -> Tensor:
    """Return the weight of the newest of `count` values in a mean that discounts older ones."""
    # Products round alike on every machine, `pow` may not. So many make any decay vanish.
    remaining = math.prod(repeat(decay, min(count, 2**15)))
    return torch.tensor((1 - decay) / (1 - remaining), dtype=torch.float32, device="cpu")
