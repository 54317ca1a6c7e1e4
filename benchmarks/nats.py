"""Compare NATS with gloo and with plain sockets, as a way to carry chunks between islands.

    python -m benchmarks.nats [--rounds 9] [--chunks 48]

Two processes on one machine: one sends chunks of 1 MB, the other receives them, and the next round
begins when all have arrived. With NATS they go through a server, which is a third process; CPU time
is that of all processes. "stream" is JetStream on disk, flushed (`sync_interval: always`): the
receiver reads while the sender stores. The second table has the times of an append of 300 bytes to
a flushed stream until its acknowledgement, and until a subscriber sees it.

Needs the extra `islands` (pip install -e .[islands]) and the openssl command, for a certificate.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import multiprocessing as mp
import operator
import os
import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks import core
from torchtitan_diloco.utils import describe_device

CHUNK = 1_000_000
RECORD = bytes(300)
IN_FLIGHT = 8
"""Chunks that a sender stores at a time."""
START_SECONDS = 30
HOST = "127.0.0.1"
RATE_HEADER = "way | TLS | MB/s | CPU s / GB | sender | receiver | server | n"
LATENCY_HEADER = (
    "append of 300 bytes, flushed | TLS | acknowledged, ms | seen by a subscriber, ms | n"
)
LEGEND = """
Median (min ... max) of n rounds, the CPU time of single processes only as a median; latencies: of
n appends, one after the other."""


@dataclass(frozen=True)
class Place:
    """Port of a connection, folder of its certificate, and whether it is encrypted."""

    folder: Path
    port: int
    tls: bool

    @property
    def url(self) -> str:
        return f"{'tls' if self.tls else 'nats'}://{HOST}:{self.port}"

    def context(self, server: bool = False) -> ssl.SSLContext | None:
        if not self.tls:
            return None
        if not server:
            return ssl.create_default_context(cafile=self.folder / "cert.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        return context


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
        store = f"file://{place.folder}/store"
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
        context = place.context(server=sends)
        if sends:
            with socket.create_server((HOST, place.port)) as listener:
                self.link, _ = listener.accept()
        else:
            self.link = _connect(place.port)
        if context is not None:
            name = None if sends else HOST
            self.link = context.wrap_socket(self.link, server_side=sends, server_hostname=name)
        self.file = self.link.makefile("rb")

    def move(self, chunks: int) -> None:
        for _ in range(chunks):
            if self.sends:
                self.link.sendall(self.chunk)
            elif self.file.readinto(self.chunk) < CHUNK:
                raise ConnectionError("the other end is gone")

    def close(self) -> None:
        self.link.close()


class NatsEnd:
    """Through the server's memory, or through a stream on its disk."""

    def __init__(self, place: Place, sends: bool, *, stream: bool) -> None:
        self.sends, self.stream = sends, stream
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # warns when a TLS connection ends
        self.runner = asyncio.Runner()
        self.runner.run(self._open(place))

    async def _open(self, place: Place) -> None:
        import nats

        self.client = await nats.connect(place.url, tls=place.context())
        self.jetstream = self.client.jetstream(timeout=START_SECONDS)
        if self.stream and not self.sends:
            await self.jetstream.add_stream(name="parts", subjects=["parts"], max_msgs=500)
            self.subscription: Any = await self.jetstream.subscribe("parts", ordered_consumer=True)
        elif not self.sends:
            self.subscription = await self.client.subscribe("chunks", pending_bytes_limit=2**30)
            await self.client.flush()

    def move(self, chunks: int) -> None:
        self.runner.run(self._send(chunks) if self.sends else self._receive(chunks))

    async def _receive(self, chunks: int) -> None:
        for _ in range(chunks):
            await self.subscription.next_msg(timeout=START_SECONDS)

    async def _send(self, chunks: int) -> None:
        chunk = bytes(CHUNK)
        if self.stream:
            free = asyncio.Semaphore(IN_FLIGHT)

            async def store() -> None:
                async with free:
                    await self.jetstream.publish("parts", chunk)

            await asyncio.gather(*(store() for _ in range(chunks)))
            return
        for _ in range(chunks):
            await self.client.publish("chunks", chunk)
        await self.client.flush()

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


Build = Callable[[Place, bool], End]
WAYS: dict[str, tuple[Build, bool]] = {
    "gloo send and recv": (GlooEnd, False),
    "sockets": (SocketEnd, False),
    "sockets, TLS": (SocketEnd, True),
    "NATS": (partial(NatsEnd, stream=False), False),
    "NATS, TLS": (partial(NatsEnd, stream=False), True),
    "NATS, stream": (partial(NatsEnd, stream=True), False),
    "NATS, stream, TLS": (partial(NatsEnd, stream=True), True),
}


def receive(build: Build, place: Place, pipe: Connection) -> None:
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
def open_way(build: Build, place: Place, server: int | None) -> Iterator[Callable[[int], Transfer]]:
    """Start a receiver, and yield a function that transfers chunks."""
    spawn = mp.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=receive, args=(build, place, there), daemon=True)
    process.start()
    there.close()
    receiver = 0.0

    def transfer(chunks: int) -> Transfer:
        nonlocal receiver
        used = [cpu_seconds(), receiver, cpu_seconds(server) if server else 0.0]
        started = time.perf_counter()
        here.send(chunks)
        end.move(chunks)
        receiver = here.recv()
        seconds = time.perf_counter() - started
        now = [cpu_seconds(), receiver, cpu_seconds(server) if server else 0.0]
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


@contextmanager
def run_server(place: Place, store: Path) -> Iterator[int]:
    """Run nats-server with JetStream; yield its process number."""
    store.mkdir()
    files = {"cert_file": f"{place.folder}/cert.pem", "key_file": f"{place.folder}/key.pem"}
    settings = {
        "listen": f"{HOST}:{place.port}",
        "max_payload": 2 * CHUNK,
        "jetstream": {"store_dir": str(store), "sync_interval": "always"},
        **({"tls": files} if place.tls else {}),
    }
    path = store / "server.json"
    path.write_text(json.dumps(settings))
    with (store / "server.log").open("wb") as log:
        server = subprocess.Popen([find_server(), "-c", str(path)], stdout=log, stderr=log)
    try:
        _connect(place.port).close()
        yield server.pid
    finally:
        server.terminate()
        server.wait(START_SECONDS)


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


def find_server() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    return shutil.which("nats-server") or (str(beside) if beside.exists() else "")


def make_certificate(folder: Path) -> None:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", *words.split(), *names, *files], check=True, capture_output=True)


def missing() -> list[str]:
    """Return what this machine lacks."""
    found = []
    if importlib.util.find_spec("nats") is None or not find_server():
        found.append("nats-py and nats-server: pip install -e .[islands]")
    if shutil.which("openssl") is None:
        found.append("the openssl command: install openssl")
    return found


def rate_row(name: str, found: list[Transfer], chunks: int) -> list[str]:
    gigabytes = chunks * CHUNK / 1e9
    return [
        name.removesuffix(", TLS"),
        "yes" if name.endswith(", TLS") else "",
        core.summary([1e3 * gigabytes / one.seconds for one in found], 0),
        core.summary([(one.sender + one.receiver + one.server) / gigabytes for one in found], 2),
        *(
            f"{statistics.median(getattr(one, process) for one in found) / gigabytes:.2f}"
            for process in ("sender", "receiver", "server")
        ),
        str(len(found)),
    ]


async def measure_latencies(place: Place, appends: int) -> tuple[list[float], list[float]]:
    """Return the seconds until acknowledgement, and until a subscriber sees the record."""
    import nats

    client = await nats.connect(place.url, tls=place.context())
    jetstream = client.jetstream(timeout=START_SECONDS)
    await jetstream.add_stream(name="log", subjects=["log"])
    watcher = await nats.connect(place.url, tls=place.context())
    subscription = await watcher.jetstream().subscribe("log", ordered_consumer=True)

    async def see() -> float:
        await subscription.next_msg(timeout=START_SECONDS)
        return time.perf_counter()

    acknowledged, seen = [], []
    for number in range(appends + 10):
        started = time.perf_counter()
        watch = asyncio.create_task(see())
        await jetstream.publish("log", RECORD)
        ended = time.perf_counter()
        arrived = await watch
        if number >= 10:
            acknowledged.append(ended - started)
            seen.append(arrived - started)
    await watcher.close()
    await client.close()
    return acknowledged, seen


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[list[str]], list[list[str]]]:
    make_certificate(folder)
    with ExitStack() as stack:
        servers: dict[bool, tuple[Place, int]] = {}
        for tls in (False, True):
            place = Place(folder, free_port(), tls)
            servers[tls] = place, stack.enter_context(run_server(place, folder / f"server{tls}"))
        tasks = {}
        for name, (build, tls) in WAYS.items():
            place, server = servers[tls] if "NATS" in name else (Place(folder, free_port(), tls), 0)
            transfer = stack.enter_context(open_way(build, place, server or None))
            tasks[name] = partial(transfer, options.chunks)
        found = core.take_turns(tasks, options.rounds)
        rates = [rate_row(name, results, options.chunks) for name, results in found.items()]
        latencies = []
        for tls, (place, _) in servers.items():
            columns = asyncio.run(measure_latencies(place, options.appends))
            cells = [core.summary(column, 2, 1e3) for column in columns]
            latencies.append(["stream", "yes" if tls else "", *cells, str(options.appends)])
    return rates, latencies


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=9)
    parser.add_argument("--chunks", type=core.positive, default=48, help="chunks of 1 MB a round")
    parser.add_argument("--appends", type=core.positive, default=300)
    options = parser.parse_args()
    if lacking := missing():
        parser.exit(2, f"error: this benchmark needs {'; and '.join(lacking)}\n")
    with tempfile.TemporaryDirectory() as folder:
        rates, latencies = measure(options, Path(folder))
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    title = f"{describe_device(torch.device('cpu'))}; {options.chunks} chunks of 1 MB; {load}"
    core.print_table(title, RATE_HEADER, rates)
    core.print_table("latency", LATENCY_HEADER, latencies)
    print(LEGEND)


if __name__ == "__main__":
    main()
