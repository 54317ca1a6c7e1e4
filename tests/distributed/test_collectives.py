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


def _agree() -> tuple[Any, ...]:
    """Return sums over all ranks, and the errors where rank 1 fails and rank 2 differs."""
    world = join(1)
    values = [1.0 + world.rank, 2.0**40 + world.rank]
    total, nothing = (PendingSum(world, one, "in the test") for one in (values, []))
    assert on_all_ranks(world.control, lambda: world.rank) == world.rank
    agree({"corpus": "same"}, world.control, "rank")
    sums = total.result(), nothing.result()
    assert total.is_complete
    if world.size == 1:
        return sums

    def refuse() -> None:
        if world.rank == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as refused:
        on_all_ranks(world.control, refuse)
    with pytest.raises(ValueError, match="differently") as different:
        agree({"corpus": "a" if world.rank != 2 else "b", "text": "same"}, world.control, "rank")
    return *sums, str(refused.value), str(different.value)


def test_all_ranks_get_the_same_and_the_error_of_one(processes: ProcessPool) -> None:
    assert processes.run(_agree, 1) == [([1.0, 2.0**40], [])]
    for rank, (total, nothing, refused, different) in enumerate(processes.run(_agree, 3)):
        assert (total, nothing) == ([6.0, 3 * 2.0**40 + 3], [])
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


def test_the_cause_of_an_error_is_its_first_line() -> None:
    gloo = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80. GLHF!"
    assert cause_of(RuntimeError(gloo)) == "Connection closed by peer [127.0.0.1]:80"
    late = "Timed out waiting 4000ms. Try again"
    assert cause_of(RuntimeError(f"{late}\nand more")) == late
    assert cause_of(RuntimeError()) == "RuntimeError"
