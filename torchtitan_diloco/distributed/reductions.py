"""Numbers of all ranks made one: always sums, so that a mean is (global sum) / (global count)."""

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.distributed.roll_call import naming_lost_ranks
from torchtitan_diloco.distributed.world import World


class PendingReduction:
    """A reduction that goes on in the background: ranks far apart do not wait for each other to read a number."""

    def __init__(
        self, world: World, values: Tensor, operation: dist.ReduceOp.RedOpType, where: str
    ) -> None:
        self._total = values.detach().to("cpu", torch.float64, copy=True)
        self._world, self._where, self._work = world, where, None
        if world.control is not None:
            with naming_lost_ranks(world, where):
                self._work = dist.all_reduce(
                    self._total, operation, group=world.control, async_op=True
                )

    def result(self) -> list[float]:
        if self._work is not None:
            with naming_lost_ranks(self._world, self._where):
                self._work.wait()
            self._work = None
        values: list[float] = self._total.tolist()
        return values


def start_sum(world: World, values: list[float], where: str = "") -> PendingReduction:
    """`where`: words for the error, if ranks are lost meanwhile."""
    return PendingReduction(
        world, torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM, where
    )


def start_max(world: World, values: list[float], where: str = "") -> PendingReduction:
    return PendingReduction(
        world, torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX, where
    )


def sum_over_ranks(world: World, values: list[float], where: str = "") -> list[float]:
    """Element-wise sum of a few numbers over all ranks, exact for counts below 2**53."""
    return start_sum(world, values, where).result()
