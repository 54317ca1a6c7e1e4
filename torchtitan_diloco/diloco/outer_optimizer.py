"""Outer step of one fragment on flat fp32 buffers.

The delta theta_outer - theta_local serves as gradient. The next shared parameters overwrite the
delta, as the current ones are needed until the fragment is applied.

All workers must get the same bits, on any processor and GPU. So sums and products are calls of
their own: `alpha=` and `lerp` round once where there is a fused multiply-add, else twice.
"""

from functools import cache

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import OuterOptimizer

BLOCK = 65_536
"""Values processed at once on a CPU, so that they stay in cache during a step."""
AVERAGE = OuterOptimizer(name="sgd", lr=1.0)
"""Plain averaging of the workers."""


def slot_count(config: OuterOptimizer) -> int:
    """Return the fp32 values of optimizer state per parameter: the momentum, or none."""
    return 0 if config.name == "sgd" else 1


@cache
def _constant(number: float) -> Tensor:
    """Return a number as a tensor, which saves a conversion in every call of torch."""
    return torch.tensor(number, dtype=torch.float32, device="cpu")


def outer_step(config: OuterOptimizer, theta: Tensor, delta: Tensor, slots: list[Tensor]) -> None:
    """Replace the mean delta with the next shared parameters, and update the momentum.

    The momentum is kept already decayed, as this saves a pass over memory.
    """
    decay = _constant(config.momentum)
    match config.name:
        case "nesterov":
            delta.add_(slots[0].add_(delta).mul_(decay))
        case "momentum":
            torch.mul(delta.add_(slots[0]), decay, out=slots[0])
    torch.sub(theta, delta.mul_(_constant(config.lr)), out=delta)
