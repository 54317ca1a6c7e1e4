"""Collectives between all ranks for bookkeeping: agreement, small sums, and lost ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan_diloco.diloco.meeting import gather_objects
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import UserError, cause_of

Value = TypeVar("Value")


def on_all_ranks(group: dist.ProcessGroup | None, task: Callable[[], Value]) -> Value:
    """Run `task` on every rank and return its result. If a rank gets a ValueError or OSError, raise
    it there, with its traceback, and as a ValueError on the others."""
    try:
        value = task()
    except (ValueError, OSError) as error:
        gather_objects(str(error) or repr(error), group)
        raise
    for rank, mistake in enumerate(gather_objects("", group)):
        if mistake:
            raise UserError(f"{mistake} (on rank {rank})")
    return value


class PendingSum:
    """Element-wise sum over all ranks in the background, exact for counts up to 2**53.

    `where` completes the error message if ranks are lost meanwhile.
    """

    def __init__(self, world: World, values: Sequence[float], where: str) -> None:
        self._values = torch.tensor(values, dtype=torch.float64)
        self._world, self._where, self._work = world, where, None
        if world.control is not None and values:
            with naming_lost_ranks(world, where):
                self._work = dist.all_reduce(self._values, group=world.control, async_op=True)

    @property
    def is_complete(self) -> bool:
        return self._work is None or self._work.is_completed()

    def result(self) -> list[float]:
        """Wait for the reduced values and return them."""
        if self._work is not None:
            with naming_lost_ranks(self._world, self._where):
                self._world.liveness.wait_for(self._work.get_future())
                self._work.wait()  # raises its error
        values: list[float] = self._values.tolist()
        return values


class RanksLostError(RuntimeError):
    """Ranks died, or did not answer within the timeout."""


@contextmanager
def naming_lost_ranks(world: World, where: str) -> Iterator[None]:
    """Turn a failure of the body, which waits for all ranks, into one that names the lost rank."""
    try:
        yield
    except WorkerLostError as error:
        raise WorkerLostError(error.workers, f"{error.reason}; seen {where}") from error
    except RuntimeError as error:
        if world.control is None:
            raise
        lost = [
            f"rank {rank} (worker {rank // world.ranks_per_worker}: {reason})"
            for rank, reason in world.liveness.lost_ranks().items()
        ]
        raise RanksLostError(
            f"{' and '.join(lost) or 'some rank'} left or did not answer in time {where} "
            f"({cause_of(error)})"
        ) from error
