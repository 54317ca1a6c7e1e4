"""The nodes of a run: the number of this one, from the environment, and how to find the first."""

import errno
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torchtitan_diloco.base.hardware import is_loopback
from torchtitan_diloco.base.reach import dial, is_doctor, resolve, route
from torchtitan_diloco.base.user import UserError, cause_of

DEFAULT_PORT = 29500
DIAL_SECONDS = 1.0
"""Seconds between two checks whether the first node listens."""
TELL_SECONDS = 30.0
"""Seconds between two messages about a first node that does not listen."""
ANSWER_SECONDS = 2.0
"""Seconds within which a program other than torchrun's store would answer."""
ENDPOINT = "RDZV_ENDPOINT="
"""How users give the endpoint of a run."""
TWICE = "if this is not the first node, NODE_RANK=0 was given twice: number the nodes from 0"


class Nodes(NamedTuple):
    total: int = 1
    rank: int = 0
    endpoint: str = "localhost:0"
    setting: str = ENDPOINT
    """How the user gave the endpoint, for errors."""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_local(self) -> bool:
        """Whether all nodes are this machine."""
        return is_loopback(self.address[0])

    def __str__(self) -> str:
        return f"node {self.rank} of {self.total}"


def read_nodes(environment: Mapping[str, str]) -> Nodes:
    """Return the number of nodes, the number of this one, and their rendezvous endpoint."""
    count = read_whole_number(environment, "NNODES")
    rank = read_whole_number(environment, "NODE_RANK", minimum=0)
    endpoint = environment.get("RDZV_ENDPOINT", "")
    if count == 1 or not (count or endpoint or rank):
        return Nodes()
    if not (count and endpoint) or rank is None:
        given = {"NNODES": count, "NODE_RANK": rank, "RDZV_ENDPOINT": endpoint}
        now = {key: "not set" if value in (None, "") else value for key, value in given.items()}
        raise UserError(
            f"several nodes need NNODES (now {now['NNODES']}), NODE_RANK (now {now['NODE_RANK']}), "
            f"this node's number from 0, and RDZV_ENDPOINT (now {now['RDZV_ENDPOINT']}), host:port "
            "of the first node"
        )
    if rank >= count:
        raise UserError(
            f"NODE_RANK={rank} is too large for NNODES={count}: number the nodes from 0 to "
            f"{count - 1}, or raise NNODES on all of them"
        )
    if ":" not in endpoint.rpartition("]")[2]:
        endpoint = f"{endpoint}:{DEFAULT_PORT}"
    port = endpoint.rpartition(":")[2]
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"RDZV_ENDPOINT={endpoint} must be host:port, with a port up to 65535")
    return Nodes(total=count, rank=rank, endpoint=endpoint)


def read_whole_number(environment: Mapping[str, str], key: str, minimum: int = 1) -> int | None:
    """Return a variable's value, or None if it is not set."""
    value = environment.get(key, "").strip()
    if value and (not value.isdecimal() or int(value) < minimum):
        raise UserError(
            f"{key}={value} must be a whole number of at least {minimum}: correct it, or unset it"
        )
    return int(value) if value else None


# --- the first node -------------------------------------------------------------------------------


def check_endpoint(nodes: Nodes) -> None:
    """Raise a UserError if the nodes cannot meet at this address."""
    host, port = nodes.address
    try:
        resolve(host, port)
        route(host, port)
        if nodes.rank == 0:
            is_numbered = nodes.setting == ENDPOINT  # by the user
            _try_to_listen(host, port, hint=f"; {TWICE}" if is_numbered else "")
    except UserError as error:
        raise UserError(f"{nodes.setting}{nodes.endpoint}: {error}") from error


def explain_no_meeting(nodes: Nodes, patience: float, error: Exception) -> str:
    """Return why the nodes did not meet, from the error of torch or of `wait_for_first_node`."""
    endpoint = f"{nodes.setting}{nodes.endpoint}"
    if nodes.rank == 0 and "EADDRINUSE" in str(error):  # since `check_endpoint`
        return f"another program listens at {endpoint} on this node; {TWICE}"
    return (
        f"did not meet the other nodes at {endpoint} within {patience} s: start all nodes, each "
        f"with its own NODE_RANK from 0 to {nodes.total - 1}, and check the address and firewalls "
        f"({cause_of(error)})"
    )


def wait_for_first_node(nodes: Nodes, patience: float, say: Callable[[str], None]) -> None:
    """Return once the first node listens. Raise a TimeoutError after `patience` seconds.

    torch itself would print C++ stack traces while the first node does not listen.
    """
    say(f"{nodes}: waiting for the others at {nodes.endpoint}")
    started = time.monotonic()
    told_at = started
    while nodes.rank > 0 and (problem := _problem(nodes)):
        now = time.monotonic()
        if now >= started + patience:
            raise TimeoutError(problem)
        if now >= told_at + TELL_SECONDS:
            told_at = now
            say(f"{nodes}: {nodes.endpoint} after {now - started:.0f} s: {problem}")
        time.sleep(DIAL_SECONDS)


def _try_to_listen(host: str, port: int, hint: str) -> None:
    """Listen for a moment, and raise an error if the address does not belong to this machine.

    `hint`: ends the error.
    """
    two_kinds = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if two_kinds else socket.AF_INET
    try:
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=two_kinds)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = (
                "is in use on this node: stop the program that listens there, "
                f"or use another port on all nodes{hint}"
            )
        else:
            reason = (
                f"cannot be opened on this node: {error.strerror}; use another port on all nodes"
            )
        raise UserError(f"port {port} {reason}") from error
    with listening:
        listening.settimeout(ANSWER_SECONDS)
        try:
            dial(host, port)
            listening.accept()[0].close()
        except (UserError, TimeoutError) as error:
            raise UserError(
                "is not an address of this node, which is the first: start the first "
                f"node there, or give an address of this machine{hint}"
            ) from error


def _problem(nodes: Nodes) -> str:
    """Return why the store of the first node cannot be reached now, or an empty string."""
    try:
        dial(*nodes.address)
    except UserError as error:
        return str(error)
    try:
        listens = is_doctor(*nodes.address, ANSWER_SECONDS)
    except UserError as error:
        raise UserError(f"{nodes.setting}{nodes.endpoint}: {error}") from error
    except OSError as error:
        return str(error)
    return "`doctor` listens there: stop it, and start the first node" if listens else ""
