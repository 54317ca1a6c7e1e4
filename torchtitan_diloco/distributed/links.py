"""The TCP streams between workers: how many, and over which network interface."""

import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

import torch.distributed as dist

from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.link import MOST_STREAMS, Sender, Speed, listen, measure
from torchtitan_diloco.diloco.object_collectives import gather_objects
from torchtitan_diloco.hardware import interfaces
from torchtitan_diloco.log import UserError, logger

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127."
LEAST_STREAMS = 4
"""In a measurement of a link. With many workers each has few, as all links are measured at once."""
Facts = dict[str, Any]


def pick_streams(link: Link, rank: int, ranks_per_worker: int) -> tuple[int, str]:
    """Return the streams from this rank to each other worker, and the interfaces for gloo.

    Collective over all ranks. Gloo has a connection for every entry of its list of interfaces. An
    empty list leaves the choice to gloo.
    """
    me, name, listener = rank // ranks_per_worker, "", None
    mine: Facts = {"streams": link.streams, "host": "", "port": 0, "problem": ""}
    mine["local"] = int(os.environ.get("LOCAL_WORLD_SIZE", ranks_per_worker))
    try:
        name, mine["host"] = interface_and_address(link.interface)
        if rank % ranks_per_worker == 0 and not link.streams:
            listener = listen(mine["host"])
            mine["port"] = listener.server_address[1]
    except OSError as error:
        mine["problem"] = f"worker {me}: {error}"
    all_ranks = gather_objects(mine, dist.group.WORLD)
    problem = next((one["problem"] for one in all_ranks if one["problem"]), "")
    if len({one["streams"] for one in all_ranks}) > 1:
        shown = ", ".join(f"{one['streams']} on rank {n}" for n, one in enumerate(all_ranks))
        raise UserError(f"diloco.link.streams = {shown}: give all ranks the same")
    if link.streams > 1 and problem:
        raise UserError(
            f"diloco.link.streams = {link.streams} needs the network interface between workers "
            f"({problem}): set diloco.link.interface"
        )
    streams = link.streams or 1
    if not link.streams and not all(one["host"].startswith(LOOPBACK) for one in all_ranks):
        found = {"": problem}
        if listener is not None and not problem:
            found = _measure(all_ranks[::ranks_per_worker], me)
        tables = gather_objects(found, dist.group.WORLD)[::ranks_per_worker]
        sharing = min(ranks_per_worker, *(one["local"] for one in all_ranks))
        streams = _streams_of(tables, sharing, name, says=rank == 0)
    if listener is not None:
        listener.shutdown()
        listener.server_close()
    return streams, ",".join([name] * streams) if streams > 1 else ""


def _measure(firsts: list[Facts], me: int) -> Facts:
    """Return the speed to each other worker as [round trip, rate], and what failed as "".

    All links are measured at once, as they are used at once.
    """
    others = [worker for worker in range(len(firsts)) if worker != me]
    each = max(LEAST_STREAMS, MOST_STREAMS // len(others))
    found: Facts = {"": ""}

    def ask(worker: int) -> None:
        place = firsts[worker]
        try:
            found[str(worker)] = list(measure(partial(Sender, place["host"], place["port"]), each))
        except OSError as error:
            found[""] = f"worker {me} to worker {worker}: {error}"

    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(ask, others))
    return found


def _streams_of(tables: list[Facts], sharing: int, name: str, *, says: bool) -> int:
    """Return the streams that `sharing` ranks need each, and say what each link has."""
    if problem := next((table[""] for table in tables if table[""]), ""):
        if says:
            logger.warning(
                f"the links between workers could not be measured ({problem}): each rank uses 1 "
                "stream; set diloco.link.streams if the links are long"
            )
        return 1
    links: dict[tuple[int, int], Speed] = {}
    for first, second in combinations(range(len(tables)), 2):
        both = Speed(*tables[first][str(second)]), Speed(*tables[second][str(first)])
        rates = [one.bits_per_second for one in both if not math.isnan(one.bits_per_second)]
        slower = min(rates, default=math.nan)
        links[first, second] = Speed(min(one.round_trip for one in both), slower)
    streams = math.ceil(max(speed.streams for speed in links.values()) / sharing)
    count = f"{streams} stream{'s' * (streams > 1)}{' a rank' * (sharing > 1)}"
    for (first, second), speed in links.items() if says else ():
        logger.info(f"worker {first} - worker {second}: {speed}, {count} over {name}")
    return streams


def interface_and_address(name: str) -> tuple[str, str]:
    """Return the network interface that gloo uses if its setting is `name`, and its address."""
    found = interfaces()
    if name := name or os.environ.get(GLOO_INTERFACE, "").partition(",")[0]:
        if name not in found:
            raise OSError(f"{name} has no IPv4 address")
        return name, found[name]
    address = "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    for one, own in found.items():
        if own == address or own[:4] == address[:4] == LOOPBACK:
            return one, address
    raise OSError(f"no network interface has the address {address} of this machine's name")
