"""Outer step of one fragment on flat fp32 buffers.

The delta theta_outer - theta_local serves as gradient. The next shared parameters overwrite the
delta, as the current ones are needed until the fragment is applied.

All workers must get the same bits, on any processor and GPU. So sums and products are calls of
their own: `alpha=` and `lerp` round once where there is a fused multiply-add, else twice. Divisions
are rounded correctly everywhere. Square roots in fp32 are not: torch takes them from MKL, whose
last bit depends on the processor. Those of fp64 are exact enough to round correctly to fp32.
"""

import math
from functools import lru_cache
from itertools import repeat

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import OuterOptimizer

BLOCK = 65_536
"""Values processed at once on a CPU, so that they stay in cache during a step."""
AVERAGE = OuterOptimizer(name="sgd", lr=1.0)
"""Plain averaging of the workers."""


def slot_count(config: OuterOptimizer) -> int:
    """Return the fp32 values of optimizer state per parameter: the momentum, the second moment."""
    return {"sgd": 0, "adam": 2}.get(config.name, 1)


@lru_cache(maxsize=64)
def _constant(number: float) -> Tensor:
    """Return a number as a tensor, which saves a conversion in every call of torch."""
    return torch.tensor(number, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=64)
def _newest_share(decay: float, count: int) -> Tensor:
    """Return the share of the newest of `count` values in their mean, in which older ones fade."""
    # Products round alike on every machine, `pow` may not. So many make any decay vanish.
    remaining = math.prod(repeat(decay, min(count, 2**15)))
    return torch.tensor((1 - decay) / (1 - remaining), dtype=torch.float32, device="cpu")


def outer_step(
    config: OuterOptimizer, theta: Tensor, delta: Tensor, slots: list[Tensor], count: int
) -> None:
    """Replace the mean delta with the next shared parameters, and update the optimizer state.

    `count`: steps with this state, with this one. The momentum is kept already decayed, as this
    saves a pass over memory. The moments of Adam are kept without bias: a first step replaces them.
    """
    decay = _constant(config.momentum)
    match config.name:
        case "nesterov":
            delta.add_(slots[0].add_(delta).mul_(decay))
        case "momentum":
            torch.mul(delta.add_(slots[0]), decay, out=slots[0])
        case "adam":
            first, second = slots
            square = delta * delta
            first.add_(delta.sub_(first).mul_(_newest_share(config.momentum, count)))
            second.add_(square.sub_(second).mul_(_newest_share(config.beta2, count)))
            square.copy_(second.double().sqrt_()).add_(_constant(config.epsilon))
            torch.div(first, square, out=delta)
    torch.sub(theta, delta.mul_(_constant(config.lr)), out=delta)
