"""Outer step of one fragment on flat fp32 buffers: shared parameters, mean delta -> next shared.

The delta is theta_outer - theta_local, so it takes the place of a gradient. The result is written
over the delta: the present shared parameters stay whole until the fragment is applied, and no
further buffer is needed.
"""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import OuterOptimizer

BLOCK = 65_536
"""Values processed at once on a CPU, so that the operations of a step find them in cache."""
AVERAGE = OuterOptimizer(name="sgd", lr=1.0)
"""Takes the mean of the workers as it is."""


def slot_count(config: OuterOptimizer) -> int:
    """Return how many fp32 values of optimizer state a parameter has: its momentum, or none."""
    return 0 if config.name == "sgd" else 1


def outer_step(config: OuterOptimizer, theta: Tensor, delta: Tensor, slots: list[Tensor]) -> None:
    """Replace the mean delta by the next shared parameters, and update the momentum."""
    change = delta
    if config.name != "sgd":
        change = torch.add(delta, slots[0], alpha=config.momentum, out=slots[0])
    if config.name == "nesterov":
        change = delta.add_(change, alpha=config.momentum)
    torch.add(theta, change, alpha=-config.lr, out=delta)
