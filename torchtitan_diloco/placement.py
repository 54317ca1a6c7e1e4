"""Place of the training processes: nodes, processes of each node, and where the nodes meet."""

import errno
import ipaddress
import itertools
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DEFAULT_PORT = 29500


class LaunchError(ValueError):
    """Mistake in the environment variables of a run, with the remedy."""


@dataclass(frozen=True)
class Node:
    """Place of this machine in the run. On one machine, port 0 lets each run take a free port."""

    count: int = 1
    rank: int = 0
    endpoint: str = "127.0.0.1:0"
    run_id: str = "torchtitan_diloco"

    @property
    def is_local(self) -> bool:
        """True if all nodes are on this machine."""
        return self.endpoint.startswith(("localhost:", "127.", "[::1]:"))

    @property
    def host(self) -> str:
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def listen(self) -> socket.socket:
        """Open the port where the nodes meet, only on the address of `endpoint`.

        Open it on all interfaces if that is the address of a router, or is known only here
        (127.0.1.1 in /etc/hosts).
        """
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        if self.is_local or not ipaddress.ip_address(address[0]).is_loopback:
            try:
                return socket.create_server(address[:2], family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        ipv6 = socket.has_dualstack_ipv6()
        everywhere = socket.AF_INET6 if ipv6 else socket.AF_INET
        return socket.create_server(("", self.port), family=everywhere, dualstack_ipv6=ipv6)


def read_node(environment: Mapping[str, str]) -> Node:
    """Read NNODES, NODE_RANK and the RDZV variables."""
    nodes = whole_number(environment, "NNODES")
    rank = whole_number(environment, "NODE_RANK", minimum=0)
    endpoint = environment.get("RDZV_ENDPOINT", "")
    backend = environment.get("RDZV_BACKEND", "")
    run_id = environment.get("RDZV_ID") or Node.run_id
    if backend not in ("", "static"):
        raise LaunchError(f"RDZV_BACKEND={backend}: nodes are numbered by NODE_RANK here; unset it")
    if nodes is None and (endpoint or rank):
        raise LaunchError(
            f"RDZV_ENDPOINT={endpoint} and NODE_RANK={rank or 0}, but NNODES is not set; "
            "set it to the number of nodes"
        )
    if rank is not None and rank >= (nodes or 1):
        raise LaunchError(
            f"NODE_RANK={rank} with NNODES={nodes}; nodes are numbered 0 to {(nodes or 1) - 1}"
        )
    if nodes is None or nodes == 1:
        return Node()
    if not endpoint or rank is None:
        raise LaunchError(
            f"NNODES={nodes} needs RDZV_ENDPOINT (now {endpoint!r}), host:port of the first node, "
            f"and NODE_RANK (now {rank}), this node's number, 0 to {nodes - 1}"
        )
    if ":" not in endpoint or endpoint.endswith("]"):
        endpoint = f"{endpoint}:{DEFAULT_PORT}"
    port = endpoint.rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise LaunchError(f"RDZV_ENDPOINT={endpoint}: {port!r} is no port; give host:port")
    return Node(nodes, rank, endpoint, run_id)


def whole_number(environment: Mapping[str, str], key: str, minimum: int = 1) -> int | None:
    """Return a variable's value, or None if it is not set."""
    value = environment.get(key, "").strip()
    if value and (not value.isdecimal() or int(value) < minimum):
        raise LaunchError(
            f"{key}={value} must be a whole number of at least {minimum}: correct it, or unset it"
        )
    return int(value) if value else None


def local_processes(*, workers: int, fsdp: int, nodes: int, gpus: int, nproc: int | None) -> int:
    """Return the number of processes of each node. `nproc` is NPROC; `gpus` is 0 on the CPU."""
    per_node = nproc or gpus
    places = f"NPROC={nproc} x " if nproc else f"{gpus} GPUs x " if gpus else ""
    places += f"NNODES={nodes}"
    if fsdp or not per_node:
        each, rest = divmod(workers * max(fsdp, 1), nodes)
        if rest or (nproc and nproc != each) or (not nproc and 0 < gpus < each):
            remedy = (
                "change one of these numbers, use --parallel.fsdp 0 to take what there is, or "
                "--run.device cpu to take no GPUs"
            )
            if not fsdp:
                remedy = f"set --diloco.workers to a multiple of {nodes}, or set NPROC"
            raise LaunchError(
                f"diloco.workers={workers} x parallel.fsdp={fsdp or 1} = {workers * max(fsdp, 1)} "
                f"processes do not fit {places}; {remedy}"
            )
        return each
    if per_node * nodes % workers:
        raise LaunchError(
            f"{places} = {per_node * nodes} processes cannot be divided among diloco.workers="
            f"{workers}; set --diloco.workers to a divisor of {per_node * nodes}, set NPROC "
            "(processes of each node), or use --run.device cpu"
        )
    return per_node


def count_gpus() -> int:
    """Return the number of GPUs that torch will see, without the seconds of importing torch."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    try:
        listing = subprocess.check_output(["nvidia-smi", "-L"], text=True, timeout=60)
        installed = sum(line.startswith("GPU ") for line in listing.splitlines())
    except (OSError, subprocess.SubprocessError):  # containers often lack nvidia-smi
        installed = len(list(Path("/dev").glob("nvidia[0-9]*")))
    selection = os.environ.get("CUDA_VISIBLE_DEVICES")
    if selection is None or not installed:
        return installed

    def is_known(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < installed)

    # CUDA ignores the first unknown entry and all that follow.
    names = [name.strip() for name in selection.split(",")]
    return len(list(itertools.takewhile(is_known, names)))
