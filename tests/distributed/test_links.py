"""Streams between workers: their number, and what the start says of it."""

import math
import os
import socket
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import link as speeds
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.link import Speed
from torchtitan_diloco.distributed import links
from torchtitan_diloco.distributed.world import join_world, leave_world
from torchtitan_diloco.log import logger

ROUND_TRIP, RATE = 0.05, 5e8 * 8
"""Of a link that needs nine streams."""


def _join(count: int, problem: str = "", ranks: int = 1) -> tuple[int, list[str], list[str]]:
    """Return the streams, the lines of the log and the interfaces of the group between workers."""
    said, made = list[str](), list[str]()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def measure(connect: Any, streams: int) -> Speed:
        if problem and rank:
            raise OSError(problem)
        found = speeds.measure(connect, streams)
        assert 0 < found.bits_per_second < math.inf
        return Speed(ROUND_TRIP, RATE / (1 + rank // ranks))

    def make_group(*given: Any, **more: Any) -> Any:
        made.append(os.environ[links.GLOO_INTERFACE])
        return original(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        original: Any = dist.new_group
        patch.setattr(dist, "new_group", make_group)
        patch.setattr(links, "LOOPBACK", "not here")
        patch.setattr(links, "measure", measure)
        patch.setattr(speeds, "SHORT_SECONDS", 0.0)
        for level in ("info", "warning"):
            patch.setattr(logger, level, said.append)
        given: dict[str, Any] = {"device": "cpu", "workers": size // ranks, "fsdp": ranks}
        world = join_world(Distributed(), Link(streams=count), **given, outer_loop=True)
        leave_world(world)
    return world.streams, said, sorted(set(made))


@pytest.mark.parametrize(("size", "ranks", "streams"), [(2, 1, 5), (3, 1, 5), (4, 2, 3)])
def test_streams_follow_from_the_links(
    processes: ProcessPool, size: int, ranks: int, streams: int
) -> None:
    """The slower direction counts, and the ranks of a worker share a link."""
    results = processes.run(_join, size, 0, "", ranks)
    name = results[0][2][0]
    per_rank = " a rank" * (ranks > 1)
    for rank, (count, said, interfaces) in enumerate(results):
        assert (count, interfaces) == (streams, [name, ",".join([name] * streams)])
        assert bool(said) == (rank == 0)
    rates = ["2", "1.3", "1.3"]
    pairs = list(combinations(range(size // ranks), 2))
    for line, (first, second), rate in zip(results[0][1], pairs, rates, strict=False):
        assert line.startswith(f"worker {first} - worker {second}: 50 ms, {rate} Gbit/s, ")
    assert len(results[0][1]) == len(pairs)
    assert results[0][1][0].endswith(f", {streams} streams{per_rank} over {name}")


def test_a_link_that_cannot_be_measured_has_one_stream(processes: ProcessPool) -> None:
    (count, said, made), other = processes.run(_join, 2, 0, "no way")
    assert (count, len(made), other) == (1, 1, (1, [], made))
    assert "(worker 1 to worker 0: no way): each rank uses 1 stream" in said[0]
    assert processes.run(_join, 2, 3)[0][:2] == (3, []), "a given number is taken"


def _differently() -> str:
    try:
        _join(1 + int(os.environ["RANK"]))
    except ValueError as error:
        return str(error)
    return ""


def test_another_number_on_another_rank(processes: ProcessPool) -> None:
    for said in processes.run(_differently, 2):
        assert "diloco.link.streams = 1 on rank 0, 2 on rank 1: give all ranks the same" in said
    with pytest.raises(ValueError, match=r"Link.streams = 33.*<= 32"):
        Link(streams=33)


def test_no_interface_to_make_streams_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", list)
    monkeypatch.delenv(links.GLOO_INTERFACE, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(links, "gather_objects", lambda mine, _: [mine])
    assert links.pick_streams(Link(streams=1), 0, 1) == (1, "")
    with pytest.raises(ValueError, match=r"streams = 4 needs .*: set diloco.link.interface"):
        links.pick_streams(Link(streams=4), 0, 1)
