"""Ranks leave mistakes and starts in the store of their job, where others read them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan_diloco.base import hardware
from torchtitan_diloco.base.user import FENCED, USER_ERROR, UserError
from torchtitan_diloco.diloco.rendezvous import MistakeElsewhereError, store_of_attempt
from torchtitan_diloco.distributed.job import Job
from torchtitan_diloco.islands import IslandFencedError

LIMIT = timedelta(minutes=1)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def test_a_mistake_before_the_ranks_are_connected_ends_those_that_wait(store: Any) -> None:
    jobs = [Job(store, rank, size=2) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(store_of_attempt, store, 0, 2, LIMIT)
        jobs[1].leave_mistake(UserError("data.corpus is missing"))
        with pytest.raises(MistakeElsewhereError, match=r"is missing \(on rank 1\)") as mistake:
            waiting.result()
    assert mistake.value.exit_code == USER_ERROR
    jobs[0].leave_mistake(mistake.value)
    assert jobs[1].mistake_of_others() is None, "the first one only passed it on"


def test_a_mistake_of_a_connected_rank_is_read_by_those_that_lose_it(store: Any) -> None:
    jobs = [Job(store, rank, size=3) for rank in range(3)]
    assert jobs[0].mistake_of_others() is None, "no rank has started"
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda rank: store_of_attempt(store, rank, 3, LIMIT), range(3)))
    assert jobs[0].mistake_of_others() is None
    jobs[2].leave_mistake(IslandFencedError("its slot was taken"))
    mistake = jobs[0].mistake_of_others()
    assert mistake is not None
    assert (str(mistake), mistake.exit_code) == ("its slot was taken (on rank 2)", FENCED)
    assert jobs[2].mistake_of_others() is None


def test_starts_without_a_step_are_counted(store: Any) -> None:
    def start(*, steps: int) -> int:
        job = Job(store)
        job.begin()
        for _ in range(steps):
            job.complete_step()
        return job.starts_without_step

    assert [start(steps=count) for count in (0, 0, 2, 0, 1, 0)] == [0, 1, 2, 0, 1, 0]
    Job(store)  # a start whose ranks did not meet, such as while a node is away
    assert start(steps=0) == 1


def test_a_process_that_the_system_kills_for_its_memory_is_noticed(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "vmstat"
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "VMSTAT", counter)
    assert not Job(None).memory_has_run_out(), "no counter"
    counter.write_text("pgfault 7\noom_kill 3\n")
    job = Job(store)
    job.begin()
    assert not job.memory_has_run_out()
    counter.write_text("pgfault 7\noom_kill 4\n")
    assert job.memory_has_run_out()
    restarted = Job(store)
    assert restarted.memory_had_run_out
    assert not restarted.memory_has_run_out()
    restarted.begin()
    assert not Job(store).memory_had_run_out
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 0\n")
    assert not Job(None).memory_has_run_out(), "the container's own counter comes first"
