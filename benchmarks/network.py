"""A small network of one's own: workers in Linux namespaces, joined by a switch, each behind a link as slow as asked.

    with Network(3, up=[10, 10, 2], down=20) as network:  # Mbit/s; math.inf: no limit
        program = network.start(1, [sys.executable, "-m", ...], os.environ | network.launch_variables(1))
        sent, received = network.counters(1)
        network.set_rate(1, up=5, down=5)  # while the program runs

Every worker has one interface, `eth0` at `10.0.0.<worker + 1>`, and sees nothing but the others. Its link is a pair of
virtual Ethernet devices with a token bucket at each end: at the worker's for what it sends, at the switch's for what it gets.
Works without root where the kernel lets users have namespaces of their own; elsewhere NoNetworkError says what is missing.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.link import PROGRAMS, NoNetworkError

INTERFACE = "eth0"
PORT = 29500
BURST_SECONDS, BURST_BYTES = 0.005, 16_384
"""What may pass at once: so many seconds at the link's rate, and at least so many bytes (some packets)."""
QUEUE_SECONDS, QUEUE_BYTES = 0.1, 262_144
"""What waits at the bucket before packets are lost, as in a router: so much beyond the burst. TCP hands over up to 64 kB at
once, so a short queue would lose most of it and measure TCP's recovery."""
END_SECONDS = 10
"""Programs get so long to end after SIGTERM."""

HOLDER = "import socket, sys; socket.sethostname(sys.argv[1]); print(flush=True); sys.stdin.read()"
"""A namespace lives as long as a process in it: this one waits until its standard input is closed, which it also is when the
process that holds the network is killed. The machine's own name would lead nowhere from there: a worker is named by its
address, so that programs that look themselves up find it."""


class Network:
    def __init__(
        self,
        workers: int,
        *,
        up: float | Sequence[float] = math.inf,
        down: float | Sequence[float] = math.inf,
        latency_ms: float = 0.0,
    ) -> None:
        """`up` and `down`: Mbit/s from and to the workers, one for all or one for each; `latency_ms`: one way, needs netem."""
        self.workers, self._latency_ms = workers, latency_ms
        self._up, self._down = _for_each("up", up, workers), _for_each("down", down, workers)
        self._user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self._holders: list[subprocess.Popen[str]] = []
        self._programs: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what runs in it ----------------------------------------------------------------------------------------------

    def start(
        self,
        worker: int,
        command: Sequence[str],
        env: Mapping[str, str],
        output: IO[Any] | int | None = None,
    ) -> subprocess.Popen[Any]:
        """Starts a program as a worker; the process is the program itself. `output` takes its standard output and errors."""
        program = subprocess.Popen(
            [*self.inside(self.namespace(worker)), *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
        self._programs.append(program)
        return program

    def address(self, worker: int) -> str:
        return f"10.0.0.{worker + 1}"

    def launch_variables(self, worker: int) -> dict[str, str]:
        """Environment of `python -m torchtitan_diloco.launch` as one of several nodes, a process each."""
        return {
            "NNODES": str(self.workers),
            "NODE_RANK": str(worker),
            "NPROC": "1",
            "RDZV_ENDPOINT": f"{self.address(0)}:{PORT}",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def counters(self, worker: int) -> tuple[int, int]:
        """Bytes that the worker's interface has sent and received so far, headers included."""
        for line in Path(f"/proc/{self.namespace(worker).pid}/net/dev").read_text().splitlines():
            name, _, counted = line.partition(":")
            if name.strip() == INTERFACE:
                fields = counted.split()
                return int(fields[8]), int(fields[0])
        raise NoNetworkError(f"worker {worker} has no {INTERFACE}")

    def set_rate(self, worker: int, *, up: float, down: float) -> None:
        """Mbit/s from now on."""
        self._limit(self.namespace(worker), INTERFACE, up)
        self._limit(self.switch, _port(worker), down)

    def close(self) -> None:
        """Ends what still runs, then the namespaces, with all that is in them."""
        for program in self._programs:
            program.terminate()
        for program in self._programs:
            try:
                program.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        for holder in reversed(self._holders):
            holder.communicate()  # closes its standard input
        self._programs, self._holders = [], []

    # --- how it is made -----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        needed, path = ("unshare", "nsenter", "ip", "tc"), PROGRAMS["PATH"]
        missing = [command for command in needed if shutil.which(command, path=path) is None]
        if missing:
            raise NoNetworkError(
                f"a network of its own needs {', '.join(missing)}: install util-linux and iproute2"
            )
        own_user = ["--map-root-user"] if self._user else []
        self._hold(["unshare", *own_user, "--net", "--uts"], "switch")
        self._run(self.switch, "ip link add name switch type bridge")
        self._run(self.switch, "ip link set switch up")
        for worker in range(self.workers):
            self._hold(
                [*self.inside(self.switch), "unshare", "--net", "--uts"], self.address(worker)
            )
            namespace, port = self.namespace(worker), _port(worker)
            self._run(
                self.switch,
                f"ip link add {port} type veth peer name {INTERFACE} netns {namespace.pid}",
            )
            self._run(self.switch, f"ip link set {port} master switch up")
            self._run(namespace, f"ip address add {self.address(worker)}/24 dev {INTERFACE}")
            self._run(namespace, f"ip link set {INTERFACE} up")
            self._run(namespace, "ip link set lo up")
            self._limit(namespace, INTERFACE, self._up[worker])
            self._limit(self.switch, port, self._down[worker])

    def _hold(self, command: list[str], name: str) -> None:
        """A process that holds a new namespace, which `command` makes."""
        holder = subprocess.Popen(
            [*command, "--", sys.executable, "-S", "-c", HOLDER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise NoNetworkError(f"{' '.join(command)}: {holder.communicate()[1].strip()}")
        self._holders.append(holder)

    @property
    def switch(self) -> subprocess.Popen[str]:
        return self._holders[0]

    def namespace(self, worker: int) -> subprocess.Popen[str]:
        return self._holders[1 + worker]

    def inside(self, namespace: subprocess.Popen[str]) -> list[str]:
        return ["nsenter", "--target", str(namespace.pid), *self._user, "--net", "--uts", "--"]

    def _run(self, namespace: subprocess.Popen[str], command: str) -> None:
        done = subprocess.run(
            [*self.inside(namespace), *command.split()],
            capture_output=True,
            text=True,
            env=PROGRAMS,
        )
        if done.returncode:
            raise NoNetworkError(f"{command}: {done.stderr.strip()}")

    def _limit(self, namespace: subprocess.Popen[str], device: str, rate: float) -> None:
        """What leaves through a device. Only the worker's end delays: a packet leaves through one such end on its way."""
        bucket, delay = "", ""
        if rate < math.inf:
            bytes_per_second = rate * 1e6 / 8
            burst = max(BURST_BYTES, round(BURST_SECONDS * bytes_per_second))
            queue = max(QUEUE_BYTES, round(QUEUE_SECONDS * bytes_per_second))
            bucket = f"tbf rate {round(rate * 1e6)}bit burst {burst} limit {burst + queue}"
        if self._latency_ms and device == INTERFACE:
            delay = f"netem delay {self._latency_ms}ms limit 100000"
        try:
            if delay:
                self._run(namespace, f"tc qdisc replace dev {device} root handle 1: {delay}")
            where = "parent 1:1" if delay else "root"
            self._run(
                namespace, f"tc qdisc replace dev {device} {where} {bucket or 'pfifo limit 1000'}"
            )
        except NoNetworkError as error:
            if delay:
                raise NoNetworkError(
                    f"latency_ms = {self._latency_ms} needs a kernel with netem (sch_netem): {error}"
                ) from error
            raise


def _port(worker: int) -> str:
    """The switch's end of the worker's link."""
    return f"port{worker}"


def _for_each(name: str, rates: float | Sequence[float], workers: int) -> list[float]:
    found = (
        [float(rates)] * workers
        if isinstance(rates, (int, float))
        else [float(rate) for rate in rates]
    )
    if len(found) != workers:
        raise ValueError(
            f"{name} has {len(found)} rates for {workers} workers: give one for all, or one for each"
        )
    if not all(rate > 0 for rate in found):
        raise ValueError(f"{name} = {rates}: a rate is a number of Mbit/s above 0")
    return found
