"""Page of a run and its numbers for Prometheus, served over HTTP behind the run's passwords."""

import base64
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.config import Join, is_loopback
from torchtitan_diloco.islands.overview import TABLES, History, Stay, headline, table
from torchtitan_diloco.islands.reader import Reader, open_reader
from torchtitan_diloco.islands.server import Server
from torchtitan_diloco.islands.server_folder import LOOPBACK

CACHE_SECONDS = 1.0
RETRY_SECONDS = 5.0
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


class Lanes(NamedTuple):
    """A lane for each island: its name, signs of life and late parts, in percent of the width and
    as text."""

    rows: list[tuple[str, list[tuple[float, float, str]], list[tuple[float, str]]]]
    begin: str
    end: str


def lanes_of(stays: Iterable[Stay], end: float = 0.0) -> Lanes:
    """`end`: end of the lanes, at least that of the last stay, in seconds since 1970."""
    by_name = dict[str, list[Stay]]()
    for stay in stays:
        by_name.setdefault(stay.name, []).append(stay)
    spans = [span for own in by_name.values() for stay in own for span in stay.spans]
    begin = min((start for start, _ in spans), default=end)
    end = max([end, *(last for _, last in spans)])  # clocks of machines differ
    share, rows = 100 / ((end - begin) or 1.0), []
    for name, own in by_name.items():
        bars = [
            (share * (a - begin), share * (b - a), f"{time_text(a)} to {time_text(b)} {stay.ended}")
            for stay in own
            for a, b in stay.spans
        ]
        late = [(share * (at - begin), time_text(at)) for stay in own for at in stay.late]
        rows.append((name, bars, late))
    return Lanes(rows, time_text(begin), time_text(end))


def time_text(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"


@cache
def _template() -> Template:
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, undefined=StrictUndefined, **options)
    return environment.get_template("page.html.jinja")


def html_page(found: dict[str, Any], history: History, at: float) -> str:
    """Return the page of a run, which refreshes itself. `at`: current time, in seconds since
    1970."""
    return _template().render(
        found=found,
        headline=headline(found),
        at=time_text(at),
        lanes=lanes_of(history.stays.values(), at),
        tables={title: table(found[key]) for title, key in TABLES.items()},
        losses=sorted(history.losses),
        news=[(time_text(one["time"]), one["text"]) for one in reversed(found["news"])],
    )


def metrics(found: Mapping[str, Any]) -> str:
    """Return the numbers for Prometheus, with names of islands and fragments as the only labels."""
    islands = [
        row | {"trains": row["doing"] == "trains"}
        for row in found["islands"]
        if row["slot"] is not None  # so there is one for each slot at most
    ]
    rows = {"run": [found], "island": islands, "fragment": found["fragments"]}
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


class Watcher:
    """Reads the log and the heartbeats in a thread, over a separate connection."""

    def __init__(self, join: Join) -> None:
        self._join, self._lock, self._closed = join, threading.Lock(), threading.Event()
        self._reader: Reader | None = None
        self._problem, self._built_at = "reading the log", -CACHE_SECONDS
        self._pages: dict[str, tuple[str, bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="islands-page", daemon=True)
        self._thread.start()

    def page(self, path: str) -> tuple[str, bytes] | None:
        """Return type and content, at most a second old, or None if there is no such page."""
        with self._lock:
            if time.monotonic() > self._built_at + CACHE_SECONDS:
                self._pages, self._built_at = self._build(), time.monotonic()
            return self._pages.get(path)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _build(self) -> dict[str, tuple[str, bytes]]:
        if self._reader is None:
            return {"/": ("text/plain", self._problem.encode())}
        found = self._reader.overview()
        html = html_page(found, self._reader.history, time.time())
        return {
            "/": ("text/html", html.encode()),
            "/metrics": ("text/plain; version=0.0.4", metrics(found).encode()),
        }

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with open_reader(self._join, whole=True) as reader:
                    while not self._closed.is_set():
                        with self._lock:
                            reader.read()
                            self._reader = reader
                        reader.connection.receive()
            except Exception as error:  # the server may have ended, or its log be another one
                self._reader, self._problem = None, f"the log cannot be read: {error}"
            self._closed.wait(RETRY_SECONDS)


def page_address(text: str) -> tuple[str, int]:
    """Return host and port of [HOST:]PORT, by default on this machine only."""
    host, _, port = text.rpartition(":")
    address = host.removeprefix("[").removesuffix("]")
    is_open = ":" in address and host != f"[{address}]"
    if is_open or not port.isdecimal() or not int(port) < 65536:
        raise UserError(f"--http {text}: give a port, HOST:PORT or [IPv6 ADDRESS]:PORT")
    return address or LOOPBACK, int(port)


class PageServer(ThreadingHTTPServer):
    """Serves the page of a run to users with one of its passwords."""

    daemon_threads = True

    def __init__(self, of: Server, host: str, port: int) -> None:
        self._run, self.watcher = of, Watcher(of.admin)
        shown = f"[{host}]" if ":" in host else host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            self.watcher.close()
            reason = f"{error.strerror}; give a free port, and an address of this machine"
            raise UserError(f"--http {shown}:{port}: {reason}") from error
        self.url = f"http://{shown}:{self.server_port}"
        if not is_loopback(host):  # the password must not be read on the way
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(of.path / "certificate.pem", of.path / "key.pem")
            options: Any = {"server_side": True, "do_handshake_on_connect": False}
            self.socket = context.wrap_socket(self.socket, **options)
            self.url = self.url.replace("http:", "https:")
        threading.Thread(target=self.serve_forever, name="islands-http", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.watcher.close()

    def allows(self, header: str) -> bool:
        """Return whether the header `Authorization` has a user and its password."""
        kind, _, encoded = header.partition(" ")
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            return False
        expected = self._run.settings.sites.get(user, "")
        same = hmac.compare_digest(password.encode(), expected.encode())
        return kind.lower() == "basic" and bool(expected) and same

    def handle_error(self, *_: object) -> None:
        """Log nothing, because a browser may close a connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10
    server_version, sys_version = "islands", ""

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Authorization", "")):
            self._answer(401, {"WWW-Authenticate": 'Basic realm="islands"'})
        elif (found := self.server.watcher.page(self.path)) is None:
            self._answer(404, {})
        else:
            policy = "default-src 'none'; style-src 'unsafe-inline'"
            headers = {"Content-Type": found[0], "Content-Security-Policy": policy}
            self._answer(200, headers | {"Cache-Control": "no-store"}, found[1])

    def _answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing for a request."""
