"""Who is missing, when a collective over all ranks has failed: it says that somebody left, not who."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import cause_of

ANSWER_SECONDS = 5.0


class RanksLostError(RuntimeError):
    """Ranks died, or were silent beyond the timeout."""


@contextmanager
def naming_lost_ranks(world: World, where: str) -> Iterator[None]:
    """Around a collective on the control group: its failure becomes an error with the names of those who are missing."""
    try:
        yield
    except RuntimeError as error:
        lost = missing_ranks(world)
        names = (
            " and ".join(f"rank {rank} (worker {rank // world.ranks_per_worker})" for rank in lost)
            or "some rank"
        )
        raise RanksLostError(
            f"{names} left or did not answer in time {where} ({cause_of(error)})"
        ) from error


def missing_ranks(world: World) -> list[int]:
    """Every rank that has noticed says a word to every other one. A dead one's connection breaks at once; only where none
    is dead are those named that stay silent, as a healthy rank may be late to notice."""
    assert world.roll_call is not None
    others = [rank for rank in range(world.size) if rank != world.rank]
    word = torch.ones(1, dtype=torch.uint8)
    answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
    dead: list[int] = []
    silent: list[int] = []
    works: dict[int, dist.Work] = {}
    words: list[dist.Work | None] = []
    """Kept: a word whose work is gone never reaches one that listens later."""
    for rank in others:
        try:
            words.append(dist.isend(word, group_dst=rank, group=world.roll_call))
            work = dist.irecv(answers[rank], group_src=rank, group=world.roll_call)
            assert work is not None
            works[rank] = work
        except RuntimeError:
            dead.append(rank)
    deadline = time.monotonic() + ANSWER_SECONDS
    for rank, work in works.items():
        left = max(0.01, deadline - time.monotonic())
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError:
            (dead if time.monotonic() - started < 0.9 * left else silent).append(rank)
    for said in words:  # who leaves before it is heard would be taken for dead
        with suppress(RuntimeError):
            if said is not None:
                said.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
    return sorted(dead or silent)
