"""A network of one's own: a Linux namespace that has nothing but a loopback interface, as slow as asked.

Its interface counters count nothing but the benchmark, and no other program feels the slow link.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

MARK = "BENCHMARK_IN_OWN_NETWORK"
INTERFACE = "lo"


PROGRAMS = os.environ | {
    "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
}
"""An environment for tc, which lies where not every PATH looks."""


class NoNetworkError(RuntimeError):
    """The kernel or the machine does not give this user a network of its own."""


def in_own_network() -> bool:
    return MARK in os.environ


def enter_own_network(module: str, rate: str) -> None:
    """Starts `python -m module` again inside a new namespace and does not return; a second call, from inside, sets up the
    interface. `rate` is a bandwidth as tc writes it, such as 200mbit; empty leaves loopback as fast as it is."""
    if in_own_network():
        _set_up(rate)
        return
    commands = ["unshare", "ip", *(["tc"] if rate else [])]
    missing = [
        command for command in commands if shutil.which(command, path=PROGRAMS["PATH"]) is None
    ]
    if missing:
        raise NoNetworkError(
            f"a network of its own needs {' and '.join(missing)}: install util-linux and iproute2"
        )
    unshare = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--uts"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode:
        raise NoNetworkError(f"{' '.join(unshare)}: {tried.stderr.strip()}")
    command = [*unshare, "--", sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(command[0], command, os.environ | {MARK: "1"})


def _set_up(rate: str) -> None:
    """The bucket is one queue for all processes, so both directions share the rate."""
    socket.sethostname("localhost")  # the machine's own name leads nowhere from here
    commands = [["ip", "link", "set", INTERFACE, "up"]]
    if rate:
        bucket = ["rate", rate, "burst", "512kb", "latency", "2000ms"]
        commands.append(["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=PROGRAMS)
        if done.returncode:
            raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


def bytes_on_the_wire() -> int:
    """What the kernel has put on the loopback interface so far: all processes of this network, headers of TCP included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise NoNetworkError(f"/proc/net/dev has no {INTERFACE}")
