"""A blocking connection to a NATS server, with the few messages of its protocol that islands need.

Chunks are sent from the caller's memory, and received into it. NATS's own client copies each byte
several times, which takes three times the CPU.
"""

import json
import secrets
import socket
import ssl
import struct
from contextlib import suppress
from select import select
from typing import Any, NamedTuple

from torchtitan_diloco.islands.config import Join

ANSWER_SECONDS, OPEN_SECONDS = 120.0, 10.0
"""Seconds without a byte of an awaited answer after which a connection counts as lost, and seconds
to connect. Links may be slow; the kernel notices dead ones earlier."""
UNCONFIRMED_SECONDS = 30.0
"""Seconds within which the other end must acknowledge some bytes. A slow link does, a dead one does
not."""
KEEPALIVE_SECONDS = 10
LAST_RECEIVED = 52
"""Offsets of `tcpi_last_data_recv` and `tcpi_last_ack_recv`, in milliseconds, in Linux's
tcp_info."""


class ServerError(ConnectionError):
    """The server has sent an error."""


class Message(NamedTuple):
    """The head of a message. Its content is read next."""

    subject: str
    size: int  # bytes of the content
    status: int = 0  # status of an answer, 0 if it has none
    headers: dict[str, str] = {}

    @property
    def number(self) -> int:
        """Number of the request that this message answers."""
        return int(self.subject.rpartition(".")[2])


class Wire:
    """A connection to the server."""

    def __init__(
        self, join: Join, address: str, name: str, patience: float = ANSWER_SECONDS
    ) -> None:
        """`patience`: seconds without a byte of an awaited answer after which the connection is
        lost."""
        host, _, port = address.rpartition(":")
        seconds = min(patience, OPEN_SECONDS)
        self._socket = socket.create_connection((host.strip("[]"), int(port)), seconds)
        try:
            self._open(join, host, name)
            self._socket.settimeout(patience)
        except BaseException:
            self.close()
            raise

    def _open(self, join: Join, host: str, name: str) -> None:
        limit = round(1000 * UNCONFIRMED_SECONDS)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # while an answer is awaited
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS),
        ):
            self._socket.setsockopt(level, option, value)
        if (context := join.context()) is not None:
            name_of_host = host.strip("[]") if context.check_hostname else None
            self._socket = context.wrap_socket(self._socket, server_hostname=name_of_host)
        self._room = bytearray(2**16)
        self._view, self._start, self._end = memoryview(self._room), 0, 0
        self.pongs = self.subscriptions = 0
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        login = {"user": join.user, "pass": join.password} if join.user else {}
        options = {"name": name, "lang": "python", "version": "1", "protocol": 1, **login}
        options |= {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        login_and_ping = json.dumps(options | {"echo": False}), f"SUB {self.inbox}.* 0", "PING\r\n"
        # At once, as a server that refuses the login closes the connection.
        self.send(("CONNECT " + "\r\n".join(login_and_ping)).encode())
        self.server: dict[str, Any] = json.loads(self._line().removeprefix(b"INFO "))
        """Information that the server sends about itself."""
        self.wait()

    def send(self, *pieces: bytes | memoryview) -> None:
        for piece in pieces:
            self._socket.sendall(piece)

    def subscribe(self, subject: str) -> None:
        self.subscriptions += 1
        self.send(b"SUB %s %d\r\n" % (subject.encode(), self.subscriptions))

    def publish(self, subject: str, content: bytes | memoryview, number: int | None = None) -> None:
        """Publish a message. `number`: number of the wanted answer, or None."""
        reply = "" if number is None else f" {self.inbox}.{number}"
        head = f"PUB {subject}{reply} {len(content)}\r\n"
        self.send(head.encode(), content, b"\r\n")

    def ping(self) -> None:
        """Wait for an answer of the server, with no other request in flight."""
        self.ask()
        self.wait()

    def ask(self) -> None:
        self.send(b"PING\r\n")

    def wait(self) -> None:
        """Wait for an answer to a ping. Messages before it are dropped."""
        before = self.pongs
        while self.pongs == before:
            if (message := self.next_message()) is not None:
                self.content(message)

    def is_readable(self, seconds: float, other: socket.socket) -> bool:
        """Wait until there is something to read here, or from another socket."""
        pending = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        if pending or self._start < self._end:
            return True
        return self._socket in select([self._socket, other], [], [], seconds)[0]

    def next_message(self) -> Message | None:
        """Return the next message, or None if the server sends something else first."""
        if not (line := self._line()).startswith((b"MSG", b"HMSG")):
            return None
        kind, subject, *_, size = line.decode().split()
        if kind == "MSG":
            return Message(subject, int(size))
        length = int(line.split()[-2])
        first, *lines = self.read(bytearray(length)).tobytes().decode(errors="replace").splitlines()
        status = first.split()[1:2]  # NATS/1.0 404
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        number = int(status[0]) if status and status[0].isdigit() else 0
        return Message(subject, int(size) - length, number, headers)

    def next_answer(self) -> Message:
        """Return the next message."""
        while (message := self.next_message()) is None:
            pass
        return message

    def content(self, message: Message) -> bytes:
        """Read the content of a message, and its end."""
        content = self.read(bytearray(message.size)).tobytes()
        self.read_end()
        return content

    def read(self, room: bytearray | memoryview) -> memoryview:
        """Fill the buffer, and return it."""
        room = memoryview(room)
        have = min(len(room), self._end - self._start)
        room[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(room):
            have += self._receive(room[have:])
        return room

    def read_end(self) -> None:
        """Read the end of a message."""
        self.read(bytearray(2))

    def _receive(self, room: memoryview) -> int:
        if not (count := self._socket.recv_into(room)):
            raise ConnectionError("the server closed the connection")
        return count

    def _line(self) -> bytes:
        """Return the next line. Answer a ping of the server, and raise its errors."""
        while (end := self._room.find(b"\r\n", self._start, self._end)) < 0:
            rest = bytes(self._view[self._start : self._end])
            self._room[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
            self._end += self._receive(self._view[self._end :])
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        if line == b"PING":
            self.send(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            raise ServerError(line[5:].decode(errors="replace").strip("'"))
        self.pongs += line == b"PONG"
        return line

    def silent_seconds(self) -> float:
        """Return the time for which the kernel has received nothing, not even an
        acknowledgement."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        return float(min(struct.unpack_from("II", info, LAST_RECEIVED))) / 1000

    def end(self) -> None:
        """End the connection from another thread. The call that waits on it then fails."""
        with suppress(OSError):  # not the method of TLS, which only one thread may use
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
