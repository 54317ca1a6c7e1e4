"""A blocking connection to a NATS server, with the few messages of its protocol that chunks need.

The caller's memory is sent and filled directly. The client of the log, nats-py, copies each byte
several times, which takes three times the CPU.
"""

import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from torchtitan_diloco.islands import session
from torchtitan_diloco.islands.config import Join

ANSWER_SECONDS, OPEN_SECONDS = 120.0, 10.0
"""Seconds without a byte of an awaited answer until a connection counts as lost, and to connect.
Links may be slow. The kernel notices dead ones earlier."""
KEEPALIVE_SECONDS = 10


class ServerError(ConnectionError):
    """The server has sent an error, and closes the connection."""


class Wire:
    """A connection to the server, with the messages of NATS's protocol that chunks need."""

    def __init__(self, join: Join, address: str, name: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), OPEN_SECONDS)
        try:
            self._open(join, host, name)
        except BaseException:
            self.close()
            raise

    def _open(self, join: Join, host: str, name: str) -> None:
        limit = round(1000 * session.UNCONFIRMED_SECONDS)
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
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        login = {"user": join.user, "pass": join.password} if join.user else {}
        options = {"name": name, "lang": "python", "version": "1", "protocol": 1, **login}
        options |= {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        self.send(
            b"CONNECT %s\r\nSUB %s.* 1\r\n" % (json.dumps(options).encode(), self.inbox.encode())
        )
        self.server: dict[str, Any] = json.loads(self._line().removeprefix(b"INFO "))
        """What the server says of itself."""
        self.ping()
        self._socket.settimeout(ANSWER_SECONDS)

    def send(self, *pieces: bytes | memoryview) -> None:
        for piece in pieces:
            self._socket.sendall(piece)

    def publish(self, subject: str, number: int, content: bytes | memoryview) -> None:
        """Publish, with a reply subject that ends in a number."""
        head = f"PUB {subject} {self.inbox}.{number} {len(content)}\r\n"
        self.send(head.encode(), content, b"\r\n")

    def ping(self) -> None:
        """Wait for an answer of the server, with nothing else under way."""
        self.ask()
        self.wait()

    def ask(self) -> None:
        self.send(b"PING\r\n")

    def wait(self) -> None:
        """Wait for an answer to a ping."""
        while not self._line().startswith(b"PONG"):
            pass

    def next_answer(self) -> tuple[int, int, int]:
        """Return the number, the status and the size of the next answer, whose content is read
        next. The status is 0 if there is none."""
        while not (line := self._line()).startswith((b"MSG", b"HMSG")):
            pass
        kind, subject, _, *sizes = line.split()
        size, status = int(sizes[-1]), 0
        if kind == b"HMSG":
            head = self.read(bytearray(int(sizes[-2])))
            size -= len(head)
            found = bytes(head[:12]).split()  # NATS/1.0 404
            status = int(found[1]) if len(found) > 1 and found[1].isdigit() else 0
        return int(subject.rpartition(b".")[2]), status, size

    def read(self, room: bytearray | memoryview) -> memoryview:
        """Fill the room, and return it."""
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
        """Return the next line. Answer the server's pings, and raise its errors."""
        while True:
            end = self._room.find(b"\r\n", self._start, self._end)
            if end < 0:
                rest = bytes(self._view[self._start : self._end])
                self._room[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
                self._end += self._receive(self._view[self._end :])
                continue
            line = bytes(self._view[self._start : end])
            self._start = end + 2
            if line == b"PING":
                self.send(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                raise ServerError(line[5:].decode(errors="replace").strip("'"))
            else:
                return line

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
