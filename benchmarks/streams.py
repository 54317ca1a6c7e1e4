"""Measure what several TCP streams carry over a long link, for both wires.

    .venv/bin/python -m benchmarks.streams [--latency 50,100] [--streams 1,2,4,8] [--rounds 5]

A proxy in user space stands in for the link. It delays what it passes on by half of --latency (a
round trip, in ms), and limits each connection to 200 Mbit/s and all together, in each direction, to
800. All connections of a network namespace are redirected to it, so no program knows
of it. It takes nftables and the rights of root in the namespace.

With --rates inf,1000,100,13 it measures short links instead, of these rates in Mbit/s, without the
proxy: whether several streams are slower than one where one is enough.

gloo: two workers exchange a delta in fp32. Islands: one stores a large object in a bucket of one's
own (`islands serve`), and fetches it.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch

from benchmarks import core
from benchmarks.hosts import BucketHost
from benchmarks.network import (
    INTERFACE,
    Network,
    NoNetwork,
    enter_own_network,
    require,
    run_command,
)
from tests.processes import ProcessPool
from torchtitan_diloco.base.log import start_logging
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import Link, Quantization
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.transport import Header
from torchtitan_diloco.distributed.world import WORKER, join_world
from torchtitan_diloco.store import LargeObjects, open_store

ADDRESSES = "10.0.0.1", "10.0.1.1"
"""Of the ends of the link, which are both in one namespace."""
PROXY_ADDRESS = "10.0.0.2"
INTERFACES = INTERFACE, "eth1"
PROXY_PORT = 9
SO_ORIGINAL_DST = 80
PIECE = 2**17
AHEAD = 2e-3
BURST = 1e-2
STREAM_RATE = 200 / 8e-6
"""Bytes per second of a connection."""
RATE = 800 / 8e-6
"""Bytes per second of all connections in a direction."""
REPEATS = 3
"""Runs over a short link with each number of streams."""
HEADER = "wire | round trip, ms | streams | Mbit/s | n"


# --- the link -------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Passes on bytes at a rate."""

    bytes_per_second: float
    free: float = 0.0

    def take(self, size: int) -> float:
        """Return when the last of these bytes has left."""
        self.free = max(self.free, time.monotonic() - BURST) + size / self.bytes_per_second
        return self.free


async def pass_on(source: socket.socket, sink: socket.socket, link: Bucket, delay: float) -> None:
    """Pass on what arrives from `source` to `sink`, later, until the connection ends.

    `link` is shared by all connections in this direction.
    """
    loop = asyncio.get_running_loop()
    bucket = Bucket(STREAM_RATE)
    queue = asyncio.Queue[tuple[float, bytes]]()

    async def deliver() -> None:
        while True:
            at, data = await queue.get()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, data)

    delivering = asyncio.create_task(deliver())
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, PIECE):
            left_at = max(bucket.take(len(data)), link.take(len(data)), time.monotonic())
            queue.put_nowait((left_at + delay, data))
            ahead = left_at - time.monotonic()
            if ahead > AHEAD:  # the sender waits, as TCP has a window
                await asyncio.sleep(ahead)
    queue.put_nowait((time.monotonic() + delay, b""))
    with contextlib.suppress(OSError):
        await delivering


async def serve(delay: float) -> None:
    """Run the proxy. `delay`: seconds of one way."""
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()
    towards = {address: Bucket(RATE) for address in ADDRESSES}
    listening = socket.create_server(("", PROXY_PORT), backlog=512)
    listening.setblocking(False)

    async def connect(near: socket.socket) -> None:
        packed = near.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        port, host = struct.unpack("!2xH4s8x", packed)
        far = socket.socket()
        address = socket.inet_ntoa(host)
        with near, far, contextlib.suppress(OSError):
            if address not in towards:
                return  # it was not redirected
            back = next(end for end in ADDRESSES if end != address)
            far.setblocking(False)
            far.bind((PROXY_ADDRESS, 0))
            await asyncio.sleep(2 * delay)  # the handshake
            await loop.sock_connect(far, (address, port))
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.gather(
                pass_on(near, far, towards[address], delay),
                pass_on(far, near, towards[back], delay),
            )

    while True:
        near, _ = await loop.sock_accept(listening)
        near.setblocking(False)
        tasks.add(task := asyncio.create_task(connect(near)))
        task.add_done_callback(tasks.discard)


def run_proxy(delay: float) -> None:
    asyncio.run(serve(delay))


@contextmanager
def long_link(latency: float) -> Iterator[None]:
    """Run the proxy. `latency`: of a round trip, in ms."""
    proxy = multiprocessing.get_context("spawn").Process(
        target=run_proxy, args=(latency / 2e3,), daemon=True
    )
    proxy.start()
    try:
        while proxy.is_alive():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PROXY_PORT)):
                break
            time.sleep(0.05)
        yield
    finally:
        proxy.kill()
        proxy.join()


def redirect() -> None:
    """Redirect connections to the addresses of both ends to the proxy, except its own."""
    require("ip", "nft")
    for command in (
        f"ip address add {PROXY_ADDRESS}/24 dev {INTERFACES[0]}",
        f"ip link add {INTERFACES[1]} type veth peer name other1",
        f"ip address add {ADDRESSES[1]}/24 dev {INTERFACES[1]}",
        f"ip link set {INTERFACES[1]} up",
    ):
        run_command(command.split())
    for rule in (
        "add table ip nat",
        "add chain ip nat out { type nat hook output priority -100; }",
        f"add rule ip nat out ip saddr {PROXY_ADDRESS} accept",
        *(
            f"add rule ip nat out ip daddr {address} tcp dport 1-65535 redirect to :{PROXY_PORT}"
            for address in ADDRESSES
        ),
    ):
        run_command(["nft", rule])


# --- the wires ------------------------------------------------------------------------------------


def exchange(
    streams: int, megabytes: float, rounds: int, interface: str = ""
) -> tuple[int, list[float]]:
    """Return the number of streams, and the bytes per second of each round."""
    start_logging()
    link = Link(interface=interface or INTERFACES[int(os.environ["RANK"])], streams=streams)
    world = join_world(Distributed(), link, device="cpu", workers=2, fsdp=1, outer_loop=True)
    group = world.group(WORKER)
    assert group is not None
    delta = torch.ones(round(megabytes * 1e6 / 4))
    made = Exchange(
        group,
        build_codec(Quantization(codec="fp32")),
        largest=len(delta),
        device=core.CPU,
        timeout_seconds=600,
        streams=world.streams,
    )
    header = Header(0, 1, 0, 0, 0, weight=1.0, checksum=0)
    rates = list[float]()
    for _ in range(1 + rounds):
        started = time.perf_counter()
        made.average(delta, header)
        rates.append(delta.nbytes / (time.perf_counter() - started))
    made.close()
    world.liveness.close()
    return world.streams, rates[1:]


class ThisEnd(NoNetwork):
    """The network of this process, in which servers have the address of an end of the link."""

    def address(self, worker: int) -> str:
        return ADDRESSES[worker]


def large_objects(
    location: str, streams: int, megabytes: float, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the bytes per second of all uploads and downloads."""
    content = os.urandom(round(megabytes * 1e6))
    up = list[float]()
    down = list[float]()
    store = open_store(location)
    with LargeObjects(store, streams) as large:
        for number in range(1 + rounds):
            name = f"part/measured-{streams}-{number}"
            started = time.perf_counter()
            large.create(name, content)
            between = time.perf_counter()
            large.get(name, len(content))
            up.append(len(content) / (between - started))
            down.append(len(content) / (time.perf_counter() - between))
            large.delete(name)
    store.close()
    return up[1:], down[1:]


def measure(options: argparse.Namespace, latency: float) -> list[list[str]]:
    """Return the rows of a round trip of so many ms."""
    rates_of_wires: list[tuple[str, str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        network = stack.enter_context(ThisEnd())
        host = BucketHost(Path(folder), network, worker=0, islands=1)
        stack.callback(host.stop)
        host.start()
        stack.enter_context(long_link(latency))
        for streams in options.streams:
            pool = ProcessPool(600)
            (count, rates), *_ = pool.run(exchange, 2, streams, options.megabytes, options.rounds)
            pool.close()
            rates_of_wires.append(("gloo, each way", str(count), rates))
            rates_of_ways = large_objects(host.join(0), streams, options.megabytes, options.rounds)
            for way, rates in zip(("up", "down"), rates_of_ways, strict=True):
                rates_of_wires.append((f"islands, {way}", str(streams), rates))
    return [
        [wire, f"{latency:g}", name, core.summary(rates, ",.0f", 8e-6), str(len(rates))]
        for wire, name, rates in sorted(rates_of_wires, key=itemgetter(0))
    ]


def measure_short(options: argparse.Namespace, rate: float) -> list[list[str]]:
    """Return the rows of a link of so many Mbit/s without a delay, with the streams in turns."""
    rates: dict[int, list[float]] = {streams: [] for streams in options.streams}
    # A round takes at most a second or two.
    megabytes = min(options.megabytes, rate / 8)
    for _ in range(REPEATS):
        for streams in options.streams:
            with tempfile.TemporaryDirectory() as folder, Network(2, up=rate, down=rate) as network:
                words = ["--as-worker", "--streams", str(streams)]
                words += ["--megabytes", str(megabytes), "--rounds", str(options.rounds)]
                command = [sys.executable, "-m", "benchmarks.streams", *words]
                logs = [Path(folder) / f"{worker}.txt" for worker in range(2)]
                programs = [network.launch(n, command, log) for n, log in enumerate(logs)]
                for program in programs:
                    program.wait(300)
                printed = programs[0].line("^rates: ")
                rates[streams] += json.loads(printed.removeprefix("rates: "))
    return [
        [
            "gloo, each way",
            "0",
            str(streams),
            core.summary(measured, ",.0f", 8e-6),
            str(len(measured)),
        ]
        for streams, measured in rates.items()
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    add = parser.add_argument
    numbers = core.list_of(float)
    add("--latency", type=numbers, default=[50.0, 100.0], help="round trips, in ms")
    add("--streams", type=core.list_of(int), default=[1, 2, 4, 8])
    add("--megabytes", type=float, default=64.0)
    add("--rounds", type=core.positive, default=5)
    add("--rates", type=numbers, default=[], help="rates of short links, in Mbit/s")
    add("--as-worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_worker:
        _, measured = exchange(options.streams[0], options.megabytes, options.rounds, INTERFACE)
        print(f"rates: {json.dumps(measured)}", flush=True)
        return
    for rate in options.rates:
        title = f"short link of {rate:g} Mbit/s; torch {torch.__version__}"
        core.print_table(title, HEADER, measure_short(options, rate))
    if options.rates:
        return
    enter_own_network("benchmarks.streams")
    redirect()
    start_logging()
    rows = [row for latency in options.latency for row in measure(options, latency)]
    title = f"{options.megabytes:g} MB; torch {torch.__version__}"
    core.print_table(title, HEADER, rows)


if __name__ == "__main__":
    main()
