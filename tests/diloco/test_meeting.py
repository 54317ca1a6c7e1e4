"""Ranks meet those of their own attempt, in a store that outlives attempts."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan_diloco.diloco.meeting import store_of_attempt


def test_ranks_share_a_store_in_which_nothing_of_earlier_attempts_is() -> None:
    job: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as threads:
        for size in (3, 3, 2):  # a node may not come back
            given = [(job, rank, size, timedelta(minutes=1)) for rank in range(size)]
            stores = [one.result() for one in [threads.submit(store_of_attempt, *g) for g in given]]
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", str(size))
            assert all(store.get("address") == str(size).encode() for store in stores)


def test_a_rank_does_not_meet_those_of_the_attempt_before() -> None:
    job: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: store_of_attempt(job, rank, 2, timedelta(minutes=1)), (0, 1)))
    with pytest.raises(RuntimeError, match="did not start again"):
        store_of_attempt(job, 0, 2, timedelta(seconds=0.2))
