"""Agreement, reductions and the names of lost ranks."""

import os
import re
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.test_world import join
from tests.processes import DIED, ProcessPool
from torchtitan_diloco.diloco.meeting import agree
from torchtitan_diloco.distributed.collectives import (
    PendingSum,
    RanksLostError,
    naming_lost_ranks,
    on_all_ranks,
)
from torchtitan_diloco.distributed.world import leave_world
from torchtitan_diloco.log import cause_of


def _combine() -> tuple[Any, ...]:
    world = join(1)
    values = [1.0 + world.rank, 2.0**40 + world.rank]
    total, nothing = (PendingSum(world, one, "in the test") for one in (values, []))
    assert on_all_ranks(world.control, lambda: world.rank) == world.rank
    agree({"corpus": "same"}, world.control, "rank")
    found = total.result(), nothing.result()
    assert total.is_complete
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_get_the_same(processes: ProcessPool, size: int) -> None:
    ranks = range(size)
    total = [sum(1.0 + rank for rank in ranks), size * 2.0**40 + sum(ranks)]
    assert processes.run(_combine, size) == [(total, [])] * size


def _refuse() -> tuple[str, str]:
    world = join(1)

    def refuse() -> None:
        if world.rank == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as refused:
        on_all_ranks(world.control, refuse)
    with pytest.raises(ValueError, match="differently") as different:
        agree({"corpus": "a" if world.rank != 2 else "b", "text": "same"}, world.control, "rank")
    return str(refused.value), str(different.value)


def test_all_ranks_get_the_error_of_one_and_the_names_of_differing_ones(
    processes: ProcessPool,
) -> None:
    for rank, (refused, different) in enumerate(processes.run(_refuse, 3)):
        assert refused == ("no" if rank == 1 else "no (on rank 1)")
        assert "corpus: a on rank 0, b on rank 2" in different
        assert "text" not in different


def _lose_a_rank(apart: float) -> str:
    world = join(1)
    dist.barrier(group=world.control)
    if world.rank == 2:
        os._exit(1)
    time.sleep(apart * world.rank)
    with pytest.raises(RanksLostError) as named, naming_lost_ranks(world, "in the test"):
        raise RuntimeError("closed")
    leave_world(world)
    return str(named.value)


def test_lost_ranks_are_the_same_for_all_that_ask_at_different_moments(
    processes: ProcessPool,
) -> None:
    """Rank 0 leaves before rank 1 asks, and is not taken for lost."""
    first, second, died = processes.run(_lose_a_rank, 3, 1.5, dying={2})
    for error in (first, second):
        assert re.fullmatch(
            r"rank 2 \(worker 0: .*\) left or did not answer in time in the test \(closed\)", error
        )
    assert died == DIED


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
