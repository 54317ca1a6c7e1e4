"""Networks for benchmarks: Linux network namespaces joined by links of limited rate.

    with Network(3, up=10, down=20) as network:  # Mbit/s; math.inf: no limit
        program = network.launch(1, [sys.executable, "-m", ...], Path("log.txt"))
        sent, received = network.counters(1)
        network.set_rate(1, up=5, down=5)  # while the program runs
        process = network.fork(2, function, Path("log.txt"), "argument")

Each worker has a namespace with one interface, `eth0` at `10.0.0.<worker + 1>`, and reaches only
the other workers. A token bucket at each end limits what it sends and receives. This needs no root
if the kernel allows user namespaces; NoNetworkError says what is missing.
"""

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from tests.processes import FORKS

INTERFACE = "eth0"
LOOPBACK = "lo"
PORT = 29500
LARGEST = 15_000
"""Bytes that leave a socket as one packet, at most."""
BURST = 16_384
"""Bytes that a link sends at once, at least. With fewer, after a change of its rate, a queued
packet would wait for ever."""
MARK = "BENCHMARK_IN_OWN_NETWORK"
ENVIRONMENT = os.environ | {
    "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
}
"""Environment for ip and tc, which may not be in the PATH of the user."""

HOLDER = "import socket, sys; socket.sethostname(sys.argv[1]); print(flush=True); sys.stdin.read()"
"""Process that keeps a namespace alive until its standard input is closed, for example because its
parent was killed. The host name is an address that programs in the namespace can look up."""


class NoNetworkError(SystemExit):
    """Network namespaces are not available to this user. It ends a benchmark with its text."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"links of a benchmark need network namespaces: {reason}")


def run_command(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if done.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def require(*commands: str) -> None:
    path = ENVIRONMENT["PATH"]
    missing = [command for command in commands if shutil.which(command, path=path) is None]
    if missing:
        raise NoNetworkError(f"{', '.join(missing)}: install util-linux and iproute2")


def unshare() -> list[str]:
    """Return the command that starts a program in a new network namespace."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--uts"]


def read_counters(interface: str, process: int | str = "self") -> tuple[int, int]:
    """Return the bytes sent and received by an interface so far, including headers."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == interface:
            fields = counted.split()
            return int(fields[8]), int(fields[0])
    raise NoNetworkError(f"/proc/{process}/net/dev has no {interface}")


class Program:
    """A program in a network, and its log."""

    def __init__(self, process: "subprocess.Popen[Any]", log: Path) -> None:
        self.process = process
        self.log = log
        self.pid = process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def line(self, pattern: str) -> str:
        """Return the first line of the log that matches the pattern, or an empty string."""
        return next((line for line in self.printed().splitlines() if re.search(pattern, line)), "")

    def wait(self, seconds: float = 90.0) -> int | None:
        """Return the exit code, or None if the program has to be killed after `seconds`."""
        try:
            return self.process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Network:
    def __init__(self, workers: int, *, up: float = math.inf, down: float = math.inf) -> None:
        """Describe a network. `up`, `down`: Mbit/s from and to each worker."""
        self.workers = workers
        self._up = up
        self._down = down
        self._user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self._holders: list[subprocess.Popen[str]] = []
        self._programs: list[Program] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def launch(self, worker: int, command: Sequence[str], log: Path, **env: str) -> Program:
        """Start a program of one thread as a worker, and append its output to `log`.

        It gets the variables of a rank. The process is the program itself, not a shell.
        """
        variables = {"OMP_NUM_THREADS": "1", **self.rank_variables(worker), **env}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.enter_command(worker), *command],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._programs.append(Program(process, log))
        return self._programs[-1]

    def fork(
        self,
        worker: int,
        function: Callable[..., Any],
        log: Path,
        *arguments: Any,
        variables: Mapping[str, str] | None = None,
    ) -> BaseProcess:
        """Start a function of one thread as a worker, in a process that has imported torch already.

        It appends its output to `log`, and gets no variables of a rank but these.
        """
        given = self.holder(worker), variables or {}, log, function, arguments
        process = FORKS.Process(target=run_inside, args=given, daemon=True)
        process.start()
        return process

    def address(self, worker: int) -> str:
        return f"10.0.0.{worker + 1}"

    def rank_variables(self, worker: int) -> dict[str, str]:
        """Return the variables that torchrun would set for a worker of one rank."""
        return {
            "RANK": str(worker),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def counters(self, worker: int) -> tuple[int, int]:
        """Return the bytes sent and received by a worker so far, including headers."""
        return read_counters(INTERFACE, self.namespace(worker).pid)

    def set_rate(self, worker: int, *, up: float, down: float) -> None:
        """Change the rate of a worker's link, in Mbit/s."""
        self._limit(self.namespace(worker), INTERFACE, up)
        self._limit(self.switch, port_of(worker), down)

    def set_rate_to(self, worker: int, other: int, rate: float) -> None:
        """Limit what a worker sends to another one to this rate, in Mbit/s, and nothing else."""
        device = f"dev {INTERFACE}"
        for command in (
            f"qdisc replace {device} root handle 1: htb default 1",
            f"class add {device} parent 1: classid 1:1 htb rate {self._up}mbit",
            f"class add {device} parent 1: classid 1:2 htb rate {rate}mbit",
            f"filter add {device} parent 1: u32 match ip dst {self.address(other)} flowid 1:2",
        ):
            self._run(self.namespace(worker), f"tc {command}")

    def lose_large(self, worker: int, size: int = 1000) -> None:
        """Silently drop all packets above a size that a worker sends."""
        require("nft")
        for command in (
            "add table inet lossy",
            "add chain inet lossy output { type filter hook output priority 0; }",
            f"add rule inet lossy output ip length > {size} drop",
        ):
            run_command([*self.inside(self.namespace(worker)), "nft", command])

    def cut(self, worker: int, *, closed: bool) -> None:
        """Silently drop all packets of a worker's link, or let them pass again."""
        change = "nomaster" if closed else "master switch"
        self._run(self.switch, f"ip link set {port_of(worker)} {change}")

    def close(self) -> None:
        """End all programs and then the namespaces."""
        for program in self._programs:
            program.process.terminate()
        for program in self._programs:
            program.wait(10)
        for holder in reversed(self._holders):
            holder.communicate()  # closes its standard input
        self._programs = []
        self._holders = []

    @property
    def switch(self) -> "subprocess.Popen[str]":
        return self._holders[0]

    def namespace(self, worker: int) -> "subprocess.Popen[str]":
        return self._holders[1 + worker]

    def holder(self, worker: int) -> int | None:
        """Return the process whose network a worker enters, or None if it stays in that of this
        process."""
        return self.namespace(worker).pid

    def enter_command(self, worker: int) -> list[str]:
        """Return the words before a command that a worker runs."""
        return self.inside(self.namespace(worker))

    def inside(self, namespace: "subprocess.Popen[str]") -> list[str]:
        return ["nsenter", "--target", str(namespace.pid), *self._user, "--net", "--uts", "--"]

    def _build(self) -> None:
        require("unshare", "nsenter", "ip", "tc")
        self._hold(unshare(), "switch")
        self._run(self.switch, "ip link add name switch type bridge")
        self._run(self.switch, "ip link set switch up")
        for worker in range(self.workers):
            # No user namespace of its own, which would separate the worker from the switch.
            self._hold(
                [*self.inside(self.switch), "unshare", "--net", "--uts"], self.address(worker)
            )
            namespace = self.namespace(worker)
            port = port_of(worker)
            peer = f"peer name {INTERFACE} netns {namespace.pid}"
            self._run(self.switch, f"ip link add {port} type veth {peer}")
            self._run(self.switch, f"ip link set {port} gso_max_size {LARGEST} master switch up")
            self._run(namespace, f"ip address add {self.address(worker)}/24 dev {INTERFACE}")
            self._run(namespace, f"ip link set {INTERFACE} gso_max_size {LARGEST} up")
            self._run(namespace, "ip link set lo up")
            self.set_rate(worker, up=self._up, down=self._down)

    def _hold(self, command: list[str], name: str) -> None:
        """Start the process that holds a new namespace, which `command` creates."""
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

    def _run(self, namespace: "subprocess.Popen[str]", command: str) -> None:
        run_command([*self.inside(namespace), *command.split()])

    def _limit(self, namespace: "subprocess.Popen[str]", device: str, rate: float) -> None:
        """Limit the rate at which packets leave through a device."""
        queue = "pfifo limit 1000"
        if rate < math.inf:
            bytes_per_second = rate * 1e6 / 8
            burst = max(BURST, round(0.005 * bytes_per_second))
            # As in a router. With less, benchmarks would measure how TCP recovers from losses.
            waiting = max(262_144, round(0.1 * bytes_per_second))
            queue = f"tbf rate {round(rate * 1e6)}bit burst {burst} limit {burst + waiting}"
        self._run(namespace, f"tc qdisc replace dev {device} root {queue}")


class NoNetwork(Network):
    """Workers without links, in the network of this process."""

    def __init__(self) -> None:
        super().__init__(0)

    def holder(self, worker: int) -> None:  # noqa: ARG002
        return None

    def enter_command(self, worker: int) -> list[str]:  # noqa: ARG002
        return []

    def address(self, worker: int) -> str:  # noqa: ARG002
        return "127.0.0.1"

    def rank_variables(self, worker: int) -> dict[str, str]:  # noqa: ARG002
        return {}

    def _build(self) -> None: ...


def run_inside(
    holder: int | None,
    variables: Mapping[str, str],
    log: Path,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """Run a function in this forked process, in the network of the process `holder`, if any."""
    import torch

    if holder is not None:
        enter(holder)
    torch.set_num_threads(1)
    os.environ.update(variables)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    function(*arguments)


def enter(holder: int) -> None:
    """Move this process into the network of another one. It must not have other threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts") if os.geteuid() == 0 else ("user", "net", "uts"):
        with open(f"/proc/{holder}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {kind}")


def port_of(worker: int) -> str:
    """Return the name of a worker's port at the switch."""
    return f"port{worker}"


def enter_own_network(module: str) -> None:
    """Run a module again in a namespace of its own, unless this process is in one."""
    if MARK in os.environ:
        return
    with Network(1) as network:
        command = [*network.inside(network.namespace(0)), sys.executable, "-m", module]
        sys.exit(subprocess.call([*command, *sys.argv[1:]], env=os.environ | {MARK: "1"}))
