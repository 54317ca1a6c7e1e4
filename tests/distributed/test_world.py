"""The grid of ranks, its groups and their timeouts."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.distributed.world import (
    FSDP,
    NCCL_ERROR_HANDLING,
    WORKER,
    World,
    join_world,
    leave_world,
    split_world,
)


def join(workers: int, *, outer_loop: bool = False, **timeouts: int) -> World:
    distributed = Distributed(**timeouts)
    return join_world(
        distributed, Link(), device="cpu", workers=workers, fsdp=0, outer_loop=outer_loop
    )


def test_a_single_process_has_no_process_groups() -> None:
    world = join(1)
    assert (world.size, world.mesh, world.control) == (1, None, None)
    assert not dist.is_initialized()
    leave_world(world)


@pytest.mark.parametrize(
    ("size", "workers", "fsdp", "reason"),
    [(3, 2, 0, "multiple of 2"), (4, 2, 3, "parallel.fsdp = 2"), (1, 2, 0, "multiple of 2")],
)
def test_numbers_that_do_not_fit(size: int, workers: int, fsdp: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split_world(size, workers, fsdp)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("device", "link", "reason"),
    [
        ("cuda", Link(), r'run.device = "cuda", .* "cpu"'),
        ("cpu", Link(backend="nccl"), r'backend = "nccl" needs a GPU'),
        ("cpu", Link(interface="nosuch0"), r'interface = "nosuch0" is no .*choose one of .*lo'),
    ],
)
def test_links_and_devices_that_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, device: str, link: Link, reason: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=reason):
        join_world(Distributed(), link, device=device, workers=2, fsdp=0)


def _grid() -> tuple[Any, ...]:
    world = join(2)
    assert world.mesh is not None
    assert world.host_mesh is not None
    groups = (*map(world.group, (WORKER, FSDP)), world.shards, world.host_mesh.get_group())
    return world.worker, tuple(world.mesh.shape), *map(dist.get_process_group_ranks, groups)


def test_consecutive_ranks_form_a_worker(processes: ProcessPool) -> None:
    assert processes.run(_grid, 4) == [
        (rank // 2, (2, 2), [rank % 2, rank % 2 + 2], *[[rank // 2 * 2, rank // 2 * 2 + 1]] * 3)
        for rank in range(4)
    ]


def _wait_for_a_silent_rank() -> str:
    world = join(1, train_timeout_seconds=2)
    if world.rank == 1:
        time.sleep(6)
        return "was silent"
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=world.group(FSDP))
    except RuntimeError:
        return "gave up" if time.monotonic() - started < 5.5 else "waited too long"
    return "went on"


def test_each_group_has_its_own_timeout(processes: ProcessPool) -> None:
    assert processes.run(_wait_for_a_silent_rank, 2) == ["gave up", "was silent"]


def _watchdog_of_each_group(outer_loop: bool, set_by_user: str) -> list[str | None]:
    """Return the variable while the groups (worker), (fsdp) and others are made, and afterwards."""
    seen: list[str | None] = []
    original = dist.new_subgroups_by_enumeration

    def new_subgroups(*given: Any, **more: Any) -> Any:
        seen.append(os.environ.get(NCCL_ERROR_HANDLING))
        return original(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(NCCL_ERROR_HANDLING, raising=False)
        if set_by_user:
            patch.setenv(NCCL_ERROR_HANDLING, set_by_user)
        patch.setattr(dist, "new_subgroups_by_enumeration", new_subgroups)
        join(2, outer_loop=outer_loop)
        return [*seen, os.environ.get(NCCL_ERROR_HANDLING)]


@pytest.mark.parametrize(
    ("outer_loop", "set_by_user", "expected"),
    [(True, "", ["0", None, None, None]), (False, "", [None] * 4), (True, "3", ["3"] * 4)],
)
def test_only_the_group_of_the_outer_loop_is_without_a_watchdog(
    processes: ProcessPool, outer_loop: bool, set_by_user: str, expected: list[str | None]
) -> None:
    assert processes.run(_watchdog_of_each_group, 2, outer_loop, set_by_user) == [expected] * 2
