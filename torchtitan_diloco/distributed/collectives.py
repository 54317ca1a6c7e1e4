"""Collectives between all ranks for bookkeeping: agreement, small reductions, and lost ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan_diloco.diloco.object_collectives import broadcast_object, gather_objects
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import cause_of, code_fingerprint, find_differences

Value = TypeVar("Value")
ANSWER_SECONDS = 5.0
"""Seconds without an answer after which a rank counts as lost."""


def assert_agreement(world: World, facts: Mapping[str, str]) -> None:
    """Raise on every rank if facts, code or torch of a rank differ from those of rank 0."""
    own = {**facts, "code": code_fingerprint(), "torch version": str(torch.__version__)}
    differences = find_differences(gather_objects(own, world.control), "rank")
    if differences:
        raise ValueError(
            "processes were started differently; start all of them with the same:\n  "
            + "\n  ".join(differences)
        )


def on_first_rank(world: World, kind: type[Value], task: Callable[[], Value]) -> Value:
    """Run `task` on rank 0 and return its result, or raise its ValueError, on every rank.

    `kind` is the type of the result. Rank 0 raises the error itself, so that its traceback is not
    lost.
    """
    value: Value | None = None
    failure: ValueError | None = None
    if world.is_first:
        try:
            value = task()
        except ValueError as error:
            failure = error
    mistake = "" if failure is None else str(failure) or repr(failure)
    mistake = broadcast_object(mistake, str, world.control)
    if failure is not None:
        raise failure
    if mistake:
        raise ValueError(mistake)
    return broadcast_object(value, kind, world.control)


class PendingReduction:
    """Element-wise sum or maximum over all ranks in the background; counts up to 2**53 are exact.

    `where` completes the error message if ranks are lost meanwhile.
    """

    def __init__(
        self,
        world: World,
        values: Sequence[float],
        where: str,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        self._values = torch.tensor(values, dtype=torch.float64)
        self._world, self._where, self._work = world, where, None
        if world.control is not None and values:
            with naming_lost_ranks(world, where):
                self._work = dist.all_reduce(
                    self._values, operation, group=world.control, async_op=True
                )

    def result(self) -> list[float]:
        """Wait for the reduced values and return them."""
        if self._work is not None:
            with naming_lost_ranks(self._world, self._where):
                self._work.wait()
        values: list[float] = self._values.tolist()
        return values


class RanksLostError(RuntimeError):
    """Ranks died, or did not answer within the timeout."""


@contextmanager
def naming_lost_ranks(world: World, where: str) -> Iterator[None]:
    """Turn the failure of a collective over all ranks into an error that names the lost ranks."""
    try:
        yield
    except RuntimeError as error:
        if world.liveness is None:
            raise
        lost = [
            f"rank {rank} (worker {rank // world.ranks_per_worker})" for rank in find_lost(world)
        ]
        raise RanksLostError(
            f"{' and '.join(lost) or 'some rank'} left or did not answer in time {where} "
            f"({cause_of(error)})"
        ) from error


def find_lost(world: World) -> list[int]:
    """Return the lost ranks, by exchanging a byte with every other rank.

    The connection to a dead rank breaks at once. Silent ranks are named only where none is dead:
    a healthy rank may notice the failure late.
    """
    assert world.liveness is not None
    byte = torch.ones(1, dtype=torch.uint8)
    answers = torch.zeros(world.size, dtype=torch.uint8)
    dead, silent = list[int](), list[int]()
    receives, sends = dict[int, dist.Work](), list[dist.Work]()
    for rank in range(world.size):
        if rank == world.rank:
            continue
        try:  # the sends are kept alive: one without its work never arrives
            sends.append(_started(dist.isend(byte, group_dst=rank, group=world.liveness)))
            work = dist.irecv(answers[rank], group_src=rank, group=world.liveness)
            receives[rank] = _started(work)
        except RuntimeError:
            dead.append(rank)
    deadline = time.monotonic() + ANSWER_SECONDS
    for rank, work in receives.items():
        started, left = time.monotonic(), _seconds_until(deadline)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError:
            (dead if time.monotonic() - started < 0.9 * left else silent).append(rank)
    for work in sends:  # a rank that leaves before its byte has arrived would count as dead
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=_seconds_until(deadline)))
    return sorted(dead or silent)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _seconds_until(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
