"""Agreement, reductions and the names of lost ranks."""

import os
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.test_world import join
from tests.processes import DIED, ProcessPool
from torchtitan_diloco.distributed.collectives import (
    PendingReduction,
    RanksLostError,
    assert_agreement,
    find_lost,
    gather_objects,
    naming_lost_ranks,
    on_first_rank,
)
from torchtitan_diloco.utils import cause_of


def _combine() -> tuple[Any, ...]:
    world = join(1)
    values = [1.0 + world.rank, 2.0**40 + world.rank]
    total = PendingReduction(world, values, "in the test")
    largest = PendingReduction(world, values, "in the test", dist.ReduceOp.MAX)
    gathered = gather_objects({"rank": world.rank}, world.control)
    first = on_first_rank(world, lambda: f"from rank {world.rank}")
    return total.result(), largest.result(), gathered, first


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_get_the_same(processes: ProcessPool, size: int) -> None:
    ranks = range(size)
    total = [sum(1.0 + rank for rank in ranks), size * 2.0**40 + sum(ranks)]
    largest = [float(size), 2.0**40 + size - 1]
    expected = total, largest, [{"rank": rank} for rank in ranks], "from rank 0"
    assert processes.run(_combine, size) == [expected] * size


def _refuse() -> str:
    world = join(1)

    def refuse() -> None:
        raise ValueError(f"rank {world.rank} refuses")

    try:
        on_first_rank(world, refuse)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_all_ranks_get_the_error_of_the_first(processes: ProcessPool) -> None:
    assert processes.run(_refuse, 2) == ["rank 0 refuses"] * 2


def _disagree() -> str:
    world = join(1)
    assert_agreement(world, {"corpus": "same", "code": "c"})
    try:
        assert_agreement(world, {"corpus": "a" if world.rank != 2 else "b", "code": "c"})
    except ValueError as error:
        return str(error)
    return "accepted"


def test_differing_ranks_are_named_on_every_rank(processes: ProcessPool) -> None:
    for message in processes.run(_disagree, 3):
        assert "corpus: a on rank 0, b on rank 2" in message
        assert "code" not in message


def _lose_a_rank(apart: float) -> tuple[list[int], str]:
    world = join(1)
    dist.barrier(group=world.control)
    if world.rank == 2:
        os._exit(1)
    time.sleep(apart * world.rank)
    lost = find_lost(world)
    try:
        with naming_lost_ranks(world, "in the test"):
            raise RuntimeError("closed")
    except RanksLostError as error:
        return lost, str(error)


def test_lost_ranks_are_the_same_for_all_that_ask_at_different_moments(
    processes: ProcessPool,
) -> None:
    """Rank 0 counts as alive although its byte arrives before rank 1 listens."""
    error = "rank 2 (worker 0) left or did not answer in time in the test (closed)"
    found = processes.run(_lose_a_rank, 3, 0.5, dying={2})
    assert found == [([2], error), ([2], error), DIED]


GLOO = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80. This. GLHF!"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (GLOO, "Connection closed by peer [127.0.0.1]:80"),
        ("Timed out waiting 4000ms. Try again\nand more", "Timed out waiting 4000ms. Try again"),
        ("", "RuntimeError"),
    ],
)
def test_the_cause_of_an_error_is_its_first_line(message: str, cause: str) -> None:
    assert cause_of(RuntimeError(message)) == cause
