"""Page of a run and its numbers for Prometheus, served over HTTP."""

import base64
import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from torchtitan_diloco.base.hardware import is_loopback
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.stays import Stay, lanes_of, time_text
from torchtitan_diloco.islands.tables import TABLES, headline, table

LOOPBACK = "127.0.0.1"
GAUGES: dict[str, tuple[str, ...]] = {
    "run": (
        "tokens_merged",
        "total_tokens",
        "tokens_per_second",
        "eta_seconds",
        "loss",
        "kept_samples",
    ),
    "island": (
        *("trains", "step", "tokens", "tokens_per_second", "loss", "waited", "round_trip_seconds"),
        *("upload_bytes_per_second", "late_parts", "part_in_rounds", "heard_seconds_ago"),
    ),
    "fragment": ("version", "merged_seconds_ago", "open", "open_seconds", "waiting"),
}
"""Keys of an overview that are metrics, by the object that they describe."""
TEMPLATES = Path(__file__).parent  # folder of the templates


@cache
def _template() -> Template:
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, undefined=StrictUndefined, **options)
    return environment.get_template("page.html.jinja")


def html_page(
    numbers: dict[str, Any],
    stays: Sequence[Stay],
    losses: Sequence[tuple[float, float]],
    *,
    at: float,
) -> str:
    """Return the page of a run, which refreshes itself.

    Args:
        numbers: its overview.
        stays: when islands were there.
        losses: merged tokens, and the loss of the shared model.
        at: current time, in seconds since 1970.
    """
    return _template().render(
        found=numbers,
        headline=headline(numbers),
        at=time_text(at),
        lanes=lanes_of(stays, at),
        tables={title: table(numbers[key]) for title, key in TABLES.items()},
        losses=sorted(losses),
        news=[(time_text(event["time"]), event["text"]) for event in reversed(numbers["news"])],
    )


def metrics(numbers: Mapping[str, Any]) -> str:
    """Return the numbers for Prometheus, with names of islands and fragments as the only labels."""
    islands = [
        row | {"trains": row["doing"] == "trains"}
        for row in numbers["islands"]
        if row["slot"] is not None  # so there is one for each slot at most
    ]
    rows = {"run": [numbers], "island": islands, "fragment": numbers["fragments"]}
    lines = []
    for scope, keys in GAUGES.items():
        for key in keys:
            name = f"islands_{scope}_{key}"
            lines.append(f"# TYPE {name} gauge")
            for row in rows[scope]:
                text = str(row.get(scope)).replace("\\", r"\\").replace('"', r"\"")
                label = "" if scope == "run" else f'{{{scope}="{text}"}}'
                if row.get(key) is not None:
                    lines.append(f"{name}{label} {float(row[key])!r}")
    return "\n".join(lines) + "\n"


# --- server ---------------------------------------------------------------------------------------


class Pages(Protocol):
    """What a server shows."""

    def page(self, path: str) -> tuple[str, bytes] | None:
        """Return type and content, or None if there is no such page."""

    def close(self) -> None: ...


class Certificate(NamedTuple):
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


def page_address(text: str) -> tuple[str, int]:
    """Return host and port of [HOST:]PORT, by default on this machine only."""
    host, _, port = text.rpartition(":")
    address = host.removeprefix("[").removesuffix("]")
    is_open = ":" in address and host != f"[{address}]"
    if is_open or not port.isdecimal() or not int(port) < 65536:
        raise UserError(f"--http {text}: give a port, HOST:PORT or [IPv6 ADDRESS]:PORT")
    return address or LOOPBACK, int(port)


class PageServer(ThreadingHTTPServer):
    """Serves pages to users with a login, and in plain text to this machine only."""

    daemon_threads = True

    def __init__(
        self,
        pages: Pages,
        host: str,
        port: int,
        *,
        logins: Callable[[], Mapping[str, str]] | None,
        certificate: Certificate | None = None,
    ) -> None:
        """Listen, and serve the pages in a thread.

        Args:
            pages: what it shows. It is closed with the server, also if that does not start.
            host: address of this machine.
            port: TCP port, or 0 for any.
            logins: returns the password of each user. None: all users of this machine may read.
            certificate: for users of other machines.
        """
        self.pages = pages
        self._logins = logins
        shown = f"[{host}]" if ":" in host else host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_for_others = not is_loopback(host)
        try:
            if is_for_others and (certificate is None or logins is None):
                raise UserError(
                    f"--http {shown}:{port}: others could read the page without a login; give only "
                    "the port, and forward it with `ssh -L`"
                )
            super().__init__((host, port), _Handler)
        except OSError as error:
            pages.close()
            reason = f"{error.strerror}; give a free port, and an address of this machine"
            raise UserError(f"--http {shown}:{port}: {reason}") from error
        except UserError:
            pages.close()
            raise
        self.url = f"http://{shown}:{self.server_port}"
        if is_for_others and certificate is not None:  # the password must not be read on the way
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.certificate, certificate.key)
            options: Any = {"server_side": True, "do_handshake_on_connect": False}
            self.socket = context.wrap_socket(self.socket, **options)
            self.url = self.url.replace("http:", "https:")
        threading.Thread(target=self.serve_forever, name="islands-http", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.pages.close()

    def allows(self, header: str, host: str = "") -> bool:
        """Return whether a request may be answered.

        `header`: its `Authorization`, with a user and its password. `host`: its `Host`. Without
        logins, it has to be this machine: a page of somebody else, whose name resolves to it, must
        not read this one.
        """
        kind, _, encoded = header.partition(" ")
        try:
            if self._logins is None:
                return is_loopback(urlsplit(f"//{host}").hostname or "")
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            return False
        expected = self._logins().get(user, "")
        same = hmac.compare_digest(password.encode(), expected.encode())
        return kind.lower() == "basic" and bool(expected) and same

    def handle_error(self, *_: object) -> None:
        """Log nothing, because a browser may close a connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10
    server_version = "islands"
    sys_version = ""

    def do_GET(self) -> None:
        headers = self.headers
        if not self.server.allows(headers.get("Authorization", ""), headers.get("Host", "")):
            self._answer(401, {"WWW-Authenticate": 'Basic realm="islands"'})
        elif (page := self.server.pages.page(self.path)) is None:
            self._answer(404, {})
        else:
            policy = "default-src 'none'; style-src 'unsafe-inline'"
            answer = {"Content-Type": page[0], "Content-Security-Policy": policy}
            self._answer(200, answer | {"Cache-Control": "no-store"}, page[1])

    def _answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing for a request."""
