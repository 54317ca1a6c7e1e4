"""Client of an https server of a folder (server.py). Any thread may use it.

Each call is one request over a connection of a pool. Credentials are only sent after the
certificate was checked.
"""

import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, SSLError

from torchtitan_diloco.store.address import Address
from torchtitan_diloco.store.attempts import ATTEMPT_SECONDS
from torchtitan_diloco.store.errors import (
    DamagedError,
    FullError,
    PassingError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.protocol import (
    LIST_ROUTE,
    MODIFIED,
    MOST_REPLY_BYTES,
    NOW,
    OBJECT_ROUTE,
    WAIT_ROUTE,
    Listing,
    Mark,
)
from torchtitan_diloco.store.rights import parts_of
from torchtitan_diloco.store.store import MOST_RAW_BYTES, SLOWEST, Backend, Listed, Raw

Answer = TypeVar("Answer")
MOST_CONNECTIONS = 64
"""Number of connections that are kept for later calls."""
UNCONFIRMED_SECONDS = 10.0
"""Seconds within which the other end must acknowledge some bytes. A slow link acknowledges some
bytes, a dead one none."""
KEEPALIVE_SECONDS = 10
"""Seconds without a packet after which one is sent."""
PIECE_BYTES = 2**14
"""Size of a TLS record. Each record that is sent has its own timeout."""
READ_BYTES = 2**18


class _Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class Https(Backend):
    """A server."""

    def __init__(self, address: Address) -> None:
        self.location = f"https://{address.place}"
        self.own_prefix = parts_of(address.login)
        self._address = address
        self._pool = urllib3.HTTPSConnectionPool(
            address.host,
            address.port,
            maxsize=MOST_CONNECTIONS,
            retries=False,
            ssl_context=_context(pinned=bool(address.fingerprint)),
            assert_fingerprint=address.fingerprint or None,
            socket_options=socket_options(),
        )
        login = f"{address.login}:{address.password}"
        self._headers = urllib3.make_headers(basic_auth=login if address.login else None)

    def create(self, name: str, content: bytes, seconds: float) -> bool:
        reply = self._ask("POST", f"{OBJECT_ROUTE}{name}", seconds, content=content)
        if reply.status == 409:
            return False
        self._expect(reply, 200, 201)
        return True

    def replace(self, name: str, content: bytes, seconds: float) -> None:
        self._expect(self._ask("PUT", f"{OBJECT_ROUTE}{name}", seconds, content=content), 200, 201)

    def get(self, name: str, seconds: float) -> Raw | None:
        reply = self._ask("GET", f"{OBJECT_ROUTE}{name}", seconds)
        if reply.status == 404 and NOW in reply.headers:  # another server's 404 is no answer
            return None
        self._expect(reply, 200)
        return Raw(reply.content, self._modified(reply, float(reply.headers[MODIFIED])))

    def list(self, prefix: str, after: str, seconds: float) -> list[Listed]:
        objects = list[Listed]()
        while True:
            question = urlencode({"prefix": prefix, "after": after})
            reply = self._ask("GET", f"{LIST_ROUTE}?{question}", seconds, most=MOST_REPLY_BYTES)
            self._expect(reply, 200)
            page = self._decode(reply, Listing)
            for listed in page.objects:
                modified = self._modified(reply, listed.modified)
                objects.append(listed._replace(modified=modified))
            if not page.objects or not page.more:
                return objects
            after = page.objects[-1].name

    def delete(self, name: str, seconds: float) -> None:
        self._expect(self._ask("DELETE", f"{OBJECT_ROUTE}{name}", seconds), 200, 204)

    def wait(self, prefix: str, mark: str, seconds: float) -> str:
        question = urlencode({"prefix": prefix, "mark": mark, "seconds": f"{seconds:.3f}"})
        reply = self._ask("GET", f"{WAIT_ROUTE}?{question}", seconds + ATTEMPT_SECONDS[0])
        self._expect(reply, 200)
        return self._decode(reply, Mark).mark

    def close(self) -> None:
        self._pool.close()

    # --- requests ---------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        route: str,
        seconds: float,
        *,
        content: bytes | None = None,
        most: int = MOST_RAW_BYTES,
    ) -> _Reply:
        """Send a request and return the reply, with at most `most` bytes."""
        sent = len(content) if content is not None else 0
        timeout = urllib3.Timeout(connect=seconds, read=seconds + sent / SLOWEST)
        headers = dict(self._headers)
        if content is not None:
            headers["Content-Length"] = str(sent)
        reply: urllib3.BaseHTTPResponse | None = None
        try:
            reply = self._pool.urlopen(
                method,
                f"{self._address.path}{route}",
                body=None if content is None else _pieces(content),
                headers=headers,
                timeout=timeout,
                preload_content=False,
                redirect=False,
            )
            raw = self._read(reply, route, seconds=seconds, most=most)
        except (HTTPError, OSError) as error:
            if reply is not None:
                reply.close()  # not to be used again
            raise self._explained(error) from error
        reply.release_conn()
        return _Reply(reply.status, reply.headers, raw)

    def _read(
        self, reply: urllib3.BaseHTTPResponse, route: str, *, seconds: float, most: int
    ) -> bytes:
        """Return the content of a reply. Raise an error if it has more than `most` bytes."""
        end = time.monotonic() + seconds + most / SLOWEST
        size = 0
        pieces = list[bytes]()
        for piece in reply.stream(READ_BYTES, decode_content=False):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                reply.close()
                raise DamagedError(
                    f"{self.location}: the reply to {route} has more than {most} "
                    "bytes, the most that an object of a store has; delete it"
                )
            if time.monotonic() > end:
                raise TimeoutError("the reply does not end")
        return b"".join(pieces)

    def _modified(self, reply: _Reply, modified: float) -> float:
        """Return the time of a modification, on the clock of this machine."""
        return time.time() - (float(reply.headers[NOW]) - modified)

    def _decode(self, reply: _Reply, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except ValueError as error:
            raise self._no_store(str(error)) from error

    # --- what may fail ----------------------------------------------------------------------------

    def _expect(self, reply: _Reply, *statuses: int) -> None:
        """Raise an error unless the server carried out the request."""
        if reply.status not in statuses:
            self._refuse(reply)
        if reply.status != 204 and NOW not in reply.headers:
            raise self._no_store("its reply does not contain the time")

    def _refuse(self, reply: _Reply) -> NoReturn:
        text = _one_line(reply.content)
        if reply.status == 401:
            raise RefusedError(
                f"{self.location}: the server does not accept the login "
                f"{self._address.login!r} with this password; use the newest join "
                "file that it has written for this site"
            )
        if reply.status == 403:
            raise RefusedError(f"{self.location}: {text}")
        if reply.status == 422:
            raise DamagedError(f"{self.location}: {text}")
        if reply.status == 507:
            raise FullError(f"{self.location}: {text}")
        if reply.status in (404, 405) or 300 <= reply.status < 400:
            raise self._no_store(f"status {reply.status}")
        if 400 <= reply.status < 500 and reply.status not in (408, 425, 429):
            raise StoreError(f"{self.location}: {text} (status {reply.status})")
        raise PassingError(f"status {reply.status}: {text}")

    def _no_store(self, reason: str) -> RefusedError:
        return RefusedError(
            f"{self.location}: the server there is not a store server ({reason}); "
            "check the address and its path"
        )

    def _explained(self, error: Exception) -> Exception:
        cause: object = error.args[0] if isinstance(error, SSLError) and error.args else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RefusedError(_about_certificate(self.location, cause))
        if isinstance(error, SSLError) and "ingerprint" in str(error):
            return RefusedError(
                f"{self.location}: its certificate is not the one in the join file: "
                "it is another server, or its folder was created again; use the "
                "newest join file that it has written"
            )
        if "WRONG_VERSION_NUMBER" in str(error) or "HTTP_REQUEST" in str(error):
            return RefusedError(f"{self.location}: the server there does not use TLS")
        return PassingError(_one_line(str(error).rpartition(": ")[2].encode()) or "no answer")


def _pieces(content: bytes) -> Iterator[bytes]:
    for at in range(0, len(content), PIECE_BYTES):
        yield content[at : at + PIECE_BYTES]


def _context(*, pinned: bool) -> ssl.SSLContext:
    """Return a context for all connections, because loading the system's certificates takes
    long."""
    if not pinned:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pool compares the certificate itself
    return context


def socket_options() -> list[tuple[int, int, int]]:
    """Return options that detect a dead link without mistaking a slow one for dead."""
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, value in (
        ("TCP_USER_TIMEOUT", round(1000 * UNCONFIRMED_SECONDS)),
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
    ):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _about_certificate(location: str, error: ssl.SSLCertVerificationError) -> str:
    text = f"{location}: this system does not trust its certificate ({error.verify_message})"
    if error.verify_code in (9, 10):  # not yet valid, expired
        clock = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        return f"{text}: the time here is {clock} UTC; set the clock, or renew the certificate"
    return f"{text}; copy the whole line from a join file, which contains the certificate to trust"


def _one_line(text: bytes) -> str:
    """Return a message of a server, safe to print."""
    words = text[:2000].decode(errors="replace").split()
    return re.sub(r"[^\x20-\x7e]", "?", " ".join(words))[:300]
