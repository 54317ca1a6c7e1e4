"""The grid of ranks, its groups and their timeouts."""

import logging
import os
import socket
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.processes import ProcessPool
from torchtitan_diloco.base.hardware import GLOO_INTERFACE
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.distributed import world as world_module
from torchtitan_diloco.distributed.world import (
    FSDP,
    WORKER,
    World,
    interface_and_address,
    join_world,
    leave_world,
    pick_device,
)


def join(workers: int, **timeouts: int) -> World:
    return join_world(Distributed(**timeouts), Link(), device="cpu", workers=workers, fsdp=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("size", "changes", "reason"),
    [
        (3, {}, "multiple of 2"),
        (4, {"fsdp": 3}, "parallel.fsdp = 2"),
        (2, {"device": "cuda"}, r'run.device = "cuda", .* "cpu"'),
    ],
)
def test_numbers_devices_and_links_that_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, size: int, changes: dict[str, Any], reason: str
) -> None:
    wanted: dict[str, Any] = {"device": "cpu", "fsdp": 0, "interface": ""} | changes
    link = Link(interface=wanted.pop("interface"))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(ValueError, match=reason):
        join_world(Distributed(), link, workers=2, **wanted)


def _grid() -> tuple[Any, ...]:
    world = join(2)
    assert world.mesh is not None
    assert world.host_mesh is not None
    groups = (*map(world.group, (WORKER, FSDP)), world.shards, world.host_mesh.get_group())
    return world.worker, tuple(world.mesh.shape), *map(dist.get_process_group_ranks, groups)


def test_consecutive_ranks_form_a_worker_and_a_single_one_has_no_groups(
    processes: ProcessPool,
) -> None:
    assert processes.run(_grid, 4) == [
        (rank // 2, (2, 2), [rank % 2, rank % 2 + 2], *[[rank // 2 * 2, rank // 2 * 2 + 1]] * 3)
        for rank in range(4)
    ]
    world = join(1)
    assert (world.size, world.mesh, world.control) == (1, None, None)
    assert not dist.is_initialized()
    leave_world(world)


@pytest.mark.parametrize("outer_loop", [True, False])
def test_nccl_joins_only_ranks_that_train_together(
    monkeypatch: pytest.MonkeyPatch, outer_loop: bool
) -> None:
    """And these wait for each other longer than for another worker, which is named then."""
    device = torch.device("cuda", 0)
    made = list[tuple[Any, ...]]()

    def new_group(ranks: Any = None, timeout: Any = None, backend: str = "", **more: Any) -> object:
        seconds = None if timeout is None else timeout.total_seconds()
        made.append((backend, tuple(ranks or range(4)), seconds, more.get("device_id")))
        return object()

    def init_process_group(backend: str, **more: Any) -> None:
        made.append((backend, "all", None, more.get("device_id")))

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(world_module, "pick_device", lambda *_, **__: device)
    for name in ("store_of_job", "store_of_attempt"):
        monkeypatch.setattr(world_module, name, lambda *_: None)
    monkeypatch.setattr(world_module, "pick_streams", lambda *_: (1, ""))
    monkeypatch.setattr(world_module, "Liveness", lambda *_, **__: Liveness(None))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(DeviceMesh, "from_group", lambda *_, **__: None)
    limits = Distributed(train_timeout_seconds=300), Link(timeout_seconds=600)
    join_world(*limits, device="cuda", workers=2, fsdp=0, outer_loop=outer_loop)
    assert made[0] == ("gloo", "all", None, None), "no communicator of all ranks"
    seconds = 660 if outer_loop else 300
    inside = [("nccl", ranks, seconds, device) for ranks in ((0, 1), (2, 3))]
    across = [("nccl", ranks, 600, device) for ranks in ((0, 2), (1, 3))]
    nccl = [group for group in made if group[0] == "nccl"]
    assert nccl == (inside if outer_loop else across + inside)
    assert outer_loop == (("gloo", (0, 2), 600, None) in made)
    assert {group[3] for group in made if group[0] == "gloo"} == {None}


def test_gpus_that_are_shared_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(logging.getLogger("torchtitan_diloco"), "propagate", True)
    with pytest.raises(ValueError, match="there is no GPU for local rank 1, because torch sees 1"):
        pick_device("auto", 1)
    assert pick_device("auto", 1, share=True) == torch.device("cuda", 0)
    assert "shares cuda:0 with another" in caplog.text


def _interface_of_each_group() -> list[tuple[bool, str]]:
    """Return for each group whether it joins workers, and the interface that it is made for."""
    seen: list[tuple[bool, str]] = []
    original: Any = dist.new_group

    def new_group(ranks: list[int] | None = None, *given: Any, **more: Any) -> Any:
        joins_workers = len({rank // 2 for rank in ranks or range(4)}) > 1
        seen.append((joins_workers, os.environ["GLOO_SOCKET_IFNAME"]))
        return original(ranks, *given, **more)

    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(socket, "if_nameindex", lambda: [(1, loopback), (2, f"{loopback},")])
        link = Link(interface=f"{loopback},")  # another name of the same one for gloo
        join_world(Distributed(), link, device="cpu", workers=2, fsdp=0, outer_loop=True)
    return seen


def test_an_interface_is_for_groups_between_workers_only(processes: ProcessPool) -> None:
    for seen in processes.run(_interface_of_each_group, 4):
        assert {joins for joins, _ in seen} == {True, False}
        assert all(joins == interface.endswith(",") for joins, interface in seen)


def test_a_failure_leaves_no_interface_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("", "eth0"):
        monkeypatch.setenv(GLOO_INTERFACE, before)
        with suppress(OSError), world_module.gloo_over("eth1"):
            assert os.environ[GLOO_INTERFACE] == "eth1"
            raise OSError
        assert os.environ[GLOO_INTERFACE] == before


# --- TCP streams between workers ------------------------------------------------------------------


def _join(
    count: int, problem: str = "", ranks: int = 1, *, loopback: bool = False
) -> tuple[int, list[str], list[str]]:
    """Return the streams, the lines of the log and the interfaces of the group between workers."""
    said = list[str]()
    made = list[str]()
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])

    def find_interface(name: str) -> tuple[str, str]:
        if problem and rank:
            raise OSError(problem)
        return interface_and_address(name)

    def make_group(*given: Any, **more: Any) -> Any:
        made.append(os.environ[GLOO_INTERFACE])
        return original(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        original: Any = dist.new_group
        patch.setattr(dist, "new_group", make_group)
        patch.setattr(world_module, "is_loopback", lambda _: loopback)
        patch.setattr(world_module, "interface_and_address", find_interface)
        patch.setattr(logger, "warning", said.append)
        given: dict[str, Any] = {"device": "cpu", "workers": size // ranks, "fsdp": ranks}
        world = join_world(Distributed(), Link(streams=count), **given, outer_loop=True)
        leave_world(world)
    return world.streams, said, sorted(set(made))


@pytest.mark.parametrize(("size", "ranks", "streams"), [(2, 1, 5), (3, 1, 5), (4, 2, 3)])
def test_ranks_of_a_machine_share_the_streams(
    processes: ProcessPool, size: int, ranks: int, streams: int
) -> None:
    results = processes.run(_join, size, 5, "", ranks)
    name = results[0][2][0]
    for result in results:
        assert result == (streams, [], [name, ",".join([name] * streams)])


def _on_loopback() -> tuple[int, list[str], list[str]]:
    return _join(5, loopback=True)


def test_one_machine_and_an_unknown_interface_have_one_stream(processes: ProcessPool) -> None:
    for streams, said, made in processes.run(_on_loopback, 2):
        assert (streams, said, len(made)) == (1, [], 1)
    (streams, said, made), other = processes.run(_join, 2, 3, "no such one")
    assert (streams, len(made), other) == (1, 1, (1, [], made))
    assert "(rank 1: no such one): each rank uses 1 TCP stream" in said[0]


def _differently() -> str:
    try:
        _join(1 + int(os.environ["RANK"]))
    except ValueError as error:
        return str(error)
    return ""


def test_another_number_on_another_rank(processes: ProcessPool) -> None:
    for said in processes.run(_differently, 2):
        assert (
            "diloco.link.streams = 1 on rank 0, 2 on rank 1: set the same value on all ranks"
            in said
        )
    with pytest.raises(ValueError, match=r"Link.streams = 33.*<= 32"):
        Link(streams=33)
