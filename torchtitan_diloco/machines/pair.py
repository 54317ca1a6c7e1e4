"""Two machines that meet at an address, tell each other what they measure, and measure their link.

The first machine listens and the second connects. After a greeting, each line is a JSON object with
a value, or with the error that ended the sender, which then ends the receiver too. The link is
measured over other connections, in both directions at the same time, as workers use it.
"""

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from typing import Self, TypeVar

import msgspec
import torch
import torch.distributed as dist

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.reach import PATIENCE
from torchtitan_diloco.base.user import UserError, cause_of
from torchtitan_diloco.components.metrics import all_reduce_bytes
from torchtitan_diloco.distributed.world import gloo_over
from torchtitan_diloco.launching.nodes import (
    TELL_SECONDS,
    Nodes,
    check_endpoint,
    wait_for_first_node,
)
from torchtitan_diloco.machines.link import Sender, Speed, TooSlowError, listen, measure

GREETING = b"torchtitan-diloco compare\n"
POLL_SECONDS = 0.2
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that does not answer for 25 seconds counts as lost."""
RATE_SECONDS = 3.0
"""Seconds for which a rate is measured."""
FEWEST = 3
MOST = 100
"""Minimum and maximum number of all-reduces to measure."""
CONNECT_SECONDS = 30.0
Value = TypeVar("Value")
Say = Callable[[str], None]


class Message(msgspec.Struct, omit_defaults=True):
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class LinkSpeed(msgspec.Struct):
    """Measurements of the link from one machine to the other."""

    round_trip: float
    bits_per_second: dict[int, float]
    """Rate by the number of TCP streams."""


class Pair:
    """Connection to the other machine, which receives any error that leaves this context.

    `rank`: 0 for the machine that listens, else 1.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self.rank = rank
        self.other = f"machine {1 - rank}"
        self._arrived = deque[Message]()
        self._unfinished = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, UserError | KeyboardInterrupt):
            self.tell_error(str(error) or "stopped by Ctrl-C")
        self._connection.close()

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses of this machine and of the other."""
        ends = self._connection.getsockname(), self._connection.getpeername()
        own_address, other_address = (str(end[0]).removeprefix("::ffff:") for end in ends)
        return own_address, other_address

    def exchange(
        self, own_value: Value, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Value]:
        """Send a value to the other machine, and return the values of both, in order of rank.

        `meanwhile` is called repeatedly until the other value arrives.
        """
        self._send(Message(value=msgspec.Raw(msgspec.json.encode(own_value))))
        self._raise_error()
        while not self._arrived:
            meanwhile()
            self.check(POLL_SECONDS)
        other_value = self._decode(self._arrived.popleft().value, type(own_value))
        return [other_value, own_value] if self.rank else [own_value, other_value]

    def _decode(self, text: bytes | msgspec.Raw, kind: type[Value]) -> Value:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{self.other} has different code: install the same commit on both"
            ) from error

    def tell_error(self, error: str) -> None:
        """Send the other machine the error that ended this one, if it is still connected."""
        with suppress(OSError, UserError):
            self._send(Message(error=error))

    def check(self, seconds: float = 0.0) -> None:
        """Read what arrives within some seconds. Raise an error if the other machine failed or
        left.

        Values sent before an error are read first: both may have found the same mistake.
        """
        self._raise_error()
        if not select.select([self._connection], [], [], seconds)[0]:
            return
        try:
            received = self._connection.recv(2**16)
        except OSError as error:
            raise self._gone() from error
        if not received:
            raise self._gone()
        *lines, self._unfinished = (self._unfinished + received).split(b"\n")
        for line in lines:
            self._arrived.append(self._decode(line, Message))
        self._raise_error()

    def _raise_error(self) -> None:
        if self._arrived and self._arrived[0].error:
            raise UserError(f"{self.other}: {self._arrived[0].error}")

    def _send(self, message: Message) -> None:
        try:
            self._connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> UserError:
        return UserError(f"{self.other} has ended: its console says why; restart both")


# --- the meeting ----------------------------------------------------------------------------------


def meet(endpoint: str, rank: int, patience: float, say: Say) -> Pair:
    """Wait up to `patience` seconds for the other machine, and return the connection to it."""
    nodes = Nodes(2, rank, endpoint, setting="--endpoint ")
    check_endpoint(nodes)
    connection = _dial(nodes, patience, say) if rank else _accept(nodes, patience, say)
    return Pair(connection, rank)


def _dial(nodes: Nodes, patience: float, say: Say) -> socket.socket:
    """Wait until the first machine listens, and greet it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            wait_for_first_node(nodes, deadline - time.monotonic(), say)
        except TimeoutError as error:
            raise UserError(
                f"{nodes.setting}{nodes.endpoint}: machine 0 did not answer "
                f"within {patience:g} s ({error}): run the same command with "
                "--listen on it"
            ) from error
        if connection := _greeted(nodes.address):
            return connection
        if time.monotonic() > deadline:
            raise UserError(
                f"{nodes.setting}{nodes.endpoint}: another program listens there: "
                "stop it, or use another port on both machines"
            )
        say = _say_nothing
        time.sleep(POLL_SECONDS)


def _say_nothing(_: str) -> None: ...


def _greeted(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection on which the greeting was answered."""
    with suppress(OSError):
        connection = socket.create_connection(address, PATIENCE)
        with suppress(OSError):
            connection.sendall(GREETING)
            if connection.recv(len(GREETING), socket.MSG_WAITALL) == GREETING:
                connection.settimeout(None)
                return connection
        connection.close()
    return None


def _answered(connection: socket.socket) -> bool:
    """Answer the greeting of the second machine. Return whether it is one."""
    connection.settimeout(PATIENCE)
    with suppress(OSError):
        # The first byte of another program is another one, and the rest may never come.
        begun = connection.recv(1) == GREETING[:1]
        if begun and connection.recv(len(GREETING) - 1, socket.MSG_WAITALL) == GREETING[1:]:
            connection.sendall(GREETING)
            connection.settimeout(None)
            return True
    connection.close()
    return False


def _accept(nodes: Nodes, patience: float, say: Say) -> socket.socket:
    """Wait for a connection that starts with the greeting, and ignore others."""
    two_kinds = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if two_kinds else socket.AF_INET
    port = nodes.address[1]
    server = socket.create_server(("", port), family=family, dualstack_ipv6=two_kinds)
    started = time.monotonic()
    told_at = started
    say(f"machine 0: waiting for machine 1 at {nodes.endpoint}")
    with closing(server):
        while (now := time.monotonic()) < started + patience:
            if now >= told_at + TELL_SECONDS:
                told_at = now
                say(
                    f"machine 0: still waiting for machine 1 at {nodes.endpoint} "
                    f"after {now - started:.0f} s"
                )
            if not select.select([server], [], [], POLL_SECONDS)[0]:
                continue
            if _answered(connection := server.accept()[0]):
                return connection
    raise UserError(
        f"{nodes.setting}{nodes.endpoint}: the other machine did not connect "
        f"within {patience:g} s: run the same command without --listen there, and "
        "open the port in firewalls"
    )


# --- the link -------------------------------------------------------------------------------------


def measure_link(pair: Pair, counts: Iterable[int], say: Say) -> list[LinkSpeed]:
    """Return the speed of the way from each machine to the other, with each number of TCP streams.

    Raise an error if one machine cannot reach the other, as two workers must.
    """
    own_address, other_address = pair.addresses
    listener = listen(own_address)
    try:
        port = pair.exchange(int(listener.server_address[1]))[1 - pair.rank]
        connect = partial(Sender, other_address, port)
        speeds = dict[int, Speed]()
        for count in counts:
            say(f"measuring the link with {counted(count, 'TCP stream')}")
            pair.exchange(count)  # both begin at the same time
            speeds[count] = measure(connect, count, RATE_SECONDS)
    except TooSlowError as error:
        pair.check()
        remedy = "use another link"
        if count > 1:
            remedy = "set --diloco.link.streams 1 on both"
        raise UserError(f"machine {pair.rank}: {error}: {remedy}") from error
    except OSError as error:
        pair.check()  # it may have ended, and says why
        raise UserError(
            f"machine {pair.rank} cannot reach {pair.other} at {other_address}, port "
            f"{port}, which the system chose ({error}): open all ports between "
            "the two, because a run needs them "
            "(docs/troubleshooting.md#ports-and-security)"
        ) from error
    else:
        rates = {count: speed.bits_per_second for count, speed in speeds.items()}
        round_trip = min(speed.round_trip for speed in speeds.values())
        return pair.exchange(LinkSpeed(round_trip, rates))
    finally:
        listener.shutdown()
        listener.server_close()


def slower(ways: list[LinkSpeed], streams: int) -> float:
    """Return the bits per second in the slower direction."""
    return min((way.bits_per_second[streams] for way in ways), default=math.inf)


def measure_all_reduce(
    pair: Pair,
    *,
    parameters: int,
    dtype: torch.dtype,
    bits_per_second: float,
    interface: str,
    say: Say,
) -> float:
    """Return the bits per second that each machine sends in an all-reduce of gloo, as in data
    parallelism on a CPU: a ring whose steps wait for each other does not fill a link.

    `parameters`: of a bucket of gradients of this `dtype`, of which as many are sent as take a
    second. `interface`: for gloo, as for a run.
    """
    say(f"measuring all-reduces over {interface or 'the interface that gloo chooses'}")
    of_a_second = int(bits_per_second / (8 * dtype.itemsize))
    gradients = torch.zeros(max(1, min(parameters, of_a_second)), dtype=dtype)
    sent = 8 * all_reduce_bytes(gradients.numel(), workers=2, each=dtype.itemsize)
    count = min(max(FEWEST, math.ceil(RATE_SECONDS * bits_per_second / sent)), MOST)
    limit = timedelta(seconds=CONNECT_SECONDS)
    try:
        with gloo_over(interface):
            store = _store(pair, limit)
            dist.init_process_group("gloo", store=store, rank=pair.rank, world_size=2)
        dist.all_reduce(gradients)  # connects
        pair.exchange(count)
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(gradients)
        seconds = (time.perf_counter() - started) / count
    except RuntimeError as error:
        raise UserError(
            "gloo cannot connect the two machines over "
            f"{interface or 'the interface it chose'} ({cause_of(error)}): set "
            "diloco.link.interface to the one that leads to the other machine, and "
            "open all ports (docs/troubleshooting.md#ports-and-security)"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return min(pair.exchange(sent / seconds))


def _store(pair: Pair, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Return a store for both machines, which the first one serves."""
    host = pair.addresses[pair.rank]  # that of the first machine
    store = partial(dist.TCPStore, host, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    if pair.rank == 0:
        first = store(port=0, is_master=True)
        pair.exchange(int(first.port))
        return first
    return store(port=pair.exchange(0)[0], is_master=False)
