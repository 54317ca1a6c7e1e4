"""Numbers of all ranks made one: always sums, so that a mean is (global sum) / (global count)."""

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.distributed.world import World


def sum_over_ranks(world: World, values: Tensor) -> list[float]:
    """Element-wise sum of a small vector over all ranks, exact for counts below 2**53."""
    return _reduce(world, values, dist.ReduceOp.SUM)


def max_over_ranks(world: World, values: Tensor) -> list[float]:
    return _reduce(world, values, dist.ReduceOp.MAX)


def _reduce(world: World, values: Tensor, operation: dist.ReduceOp.RedOpType) -> list[float]:
    total = values.detach().to("cpu", torch.float64)
    if world.control is not None:
        total = total.clone()
        dist.all_reduce(total, operation, group=world.control)
    result: list[float] = total.tolist()
    return result
