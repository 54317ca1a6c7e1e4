"""Outer step of one fragment on flat fp32 buffers.

The delta theta_outer - theta_local serves as gradient. The next shared parameters overwrite the
delta, as the current ones are needed until the fragment is applied.
"""

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


def outer_step(config: OuterOptimizer, theta: Tensor, delta: Tensor, slots: list[Tensor]) -> None:
    """Replace the mean delta with the next shared parameters, and update the momentum."""
    change = delta
    if config.name != "sgd":
        change = torch.add(delta, slots[0], alpha=config.momentum, out=slots[0])
    if config.name == "nesterov":
        change = delta.add_(change, alpha=config.momentum)
    torch.add(theta, change, alpha=-config.lr, out=delta)
