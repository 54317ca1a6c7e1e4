"""Page of a run and its numbers for Prometheus, served over HTTP behind the run's passwords."""

import base64
import binascii
import hmac
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchtitan_diloco.islands.config import Join, is_loopback
from torchtitan_diloco.islands.overview import TABLES, History, Stay, headline, table
from torchtitan_diloco.islands.reader import Reader, open_reader
from torchtitan_diloco.log import UserError

CACHE_SECONDS = 1.0
RETRY_SECONDS = 5.0
NEWS_SHOWN = 30
GAUGES: dict[str, tuple[str, ...]] = {
    "run": ("tokens_merged", "total_tokens", "tokens_per_second", "eta_seconds", "loss", "goodput"),
    "island": (
        *("trains", "step", "tokens", "tokens_per_second", "loss", "waited", "round_trip_seconds"),
        *("upload_bytes_per_second", "late_parts", "part_in_rounds", "heard_seconds_ago"),
    ),
    "fragment": ("version", "merged_seconds_ago", "open", "open_seconds", "waiting"),
}
"""Keys of an overview that are metrics, by what they belong to."""
STYLE = """
:root { color-scheme: light dark; --surface: #fff; --text: #1a1d21; --muted: #565f6b;
  --grid: #e4e7eb; --band: #eef1f5; --bar: #0b62b0; --late: #c24a17; }
@media (prefers-color-scheme: dark) { :root { --surface: #15181d; --text: #e8eaed;
  --muted: #a8b0bb; --grid: #2b3038; --band: #22282f; --bar: #6cb2ff; --late: #ff9a66; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 20px 16px 48px; background: var(--surface);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 24px; } h2 { margin: 32px 0 8px; font-size: 17px; }
p, dt, small { color: var(--muted); } p { margin: 4px 0 18px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 14px 24px;
  margin: 0; } dd { margin: 0; font-size: 17px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: left; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 400; font-size: 13px; } td:first-child { font-weight: 600; }
ul { margin: 0; padding: 0; list-style: none; } li small { margin-right: 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 36px; }
.chart { display: block; width: 100%; height: 150px; background: var(--band); }
@media (max-width: 760px) {
  thead { display: none; }
  tr { display: grid; grid-template-columns: 1fr 1fr; gap: 2px 16px; padding: 8px 0;
    border-bottom: 1px solid var(--grid); }
  td { border: 0; padding: 0; } td:first-child { grid-column: 1 / -1; }
  td::before { content: attr(data-name) " "; color: var(--muted); font-weight: 400; font-size: 13px;
    margin-right: 4px; } }
"""
LANE_STYLE = """
.lane { display: grid; grid-template-columns: minmax(90px, 12%) 1fr; align-items: center; gap: 8px;
  margin: 5px 0; } .lane div { position: relative; height: 20px; background: var(--band); }
.lane i, .lane u { position: absolute; top: 0; height: 100%; min-width: 2px; background: var(--bar,
  var(--series-1)); } .lane u { width: 2px; background: var(--late, var(--series-2)); }
.axis { display: flex; justify-content: space-between; gap: 12px; font-size: 13px;
  color: var(--muted); }
"""


def lanes(stays: Iterable[Stay], begin: float, end: float) -> str:
    """Return a lane for each island as HTML: when it gave signs of life, and its late parts.

    Times are in seconds since 1970.
    """
    length, by_name = max(end - begin, 1e-3), dict[str, list[Stay]]()
    for stay in stays:
        by_name.setdefault(stay.name, []).append(stay)

    def place(at: float) -> float:
        return min(100.0, max(0.0, 100 * (at - begin) / length))

    rows = []
    for name, own in by_name.items():
        marks = []
        for stay in own:
            for start, last in stay.spans:
                about = f"{name}: {time_text(start)} to {time_text(last)} {stay.ended}"
                left, width = place(start), place(last) - place(start)
                shape = f"left:{left:.2f}%;width:{width:.2f}%"
                marks.append(f'<i style="{shape}" title="{escape(about)}"></i>')
            for at in stay.late:
                about = f"{name}: a part was merged late, {time_text(at)}"
                marks.append(f'<u style="left:{place(at):.2f}%" title="{escape(about)}"></u>')
        rows.append(f'<div class="lane"><b>{escape(name)}</b><div>{"".join(marks)}</div></div>')
    axis = (
        f'<div class="axis"><span>{time_text(begin)} UTC</span><span>{time_text(end)}</span></div>'
    )
    return "\n".join([*rows, axis])


def time_text(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"


def html_page(found: dict[str, Any], history: History, at: float) -> str:
    """Return the page of a run. It refreshes itself. `at`: now, in seconds since 1970."""
    facts = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in _facts(found))
    starts = [span[0] for stay in history.stays.values() for span in stay.spans]
    shown = lanes(history.stays.values(), min(starts, default=at), at)
    islands, *others = (_table(title, found[key]) for title, key in TABLES.items())
    loss = _chart("Loss of the shared model", sorted(history.losses), "{:,.0f} tokens".format)
    merged = _chart("Tokens merged", history.clocks, time_text)
    news = "".join(
        f"<li><small>{time_text(one['time'])}</small>{escape(one['text'])}</li>"
        for one in [*found["news"]][: -NEWS_SHOWN - 1 : -1]
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(found["run"])}</title><style>{STYLE}{LANE_STYLE}</style></head><body>
<h1>{escape(found["run"])}</h1>
<p>{escape(found["phase"])}; server: {escape(found["connection"])}; {time_text(at)} UTC</p>
<dl>{facts}</dl>{islands}
<h2>who was there</h2>{shown}
<small>Bar: signs of life. Mark: a part was merged late.</small>
<div class="charts">{loss}{merged}</div>{"".join(others)}
<h2>news</h2><ul>{news or "none"}</ul></body></html>
"""


def _facts(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    return ((escape(name), escape(text)) for name, text in headline(found).items())


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    names, cells = table(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in cells
    )
    return f"<h2>{title}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _chart(title: str, points: Sequence[tuple[float, float]], form: Callable[[float], str]) -> str:
    """Return a line chart. `form`: of the ends of the x axis."""
    if len(points) < 2:
        return ""
    (left, right), values = (points[0][0], points[-1][0]), [value for _, value in points]
    low, high, width = min(values), max(values), (right - left) or 1.0
    height = (high - low) or 1.0
    line = " ".join(
        f"{100 * (x - left) / width:.2f},{96 - 92 * (y - low) / height:.2f}" for x, y in points
    )
    return (
        f'<div><h2>{title}</h2><div class="axis"><span>{low:,.4g} to {high:,.4g}</span></div>'
        '<svg class="chart" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<polyline points="{line}" fill="none" stroke="var(--bar)" stroke-width="2" '
        'vector-effect="non-scaling-stroke"/></svg>'
        f'<div class="axis"><span>{form(left)}</span><span>{form(right)}</span></div></div>'
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
    """Reads the log and the heartbeats in a thread, with a connection of its own."""

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
        found, at = self._reader.overview(), time.time()
        html = html_page(found, self._reader.history, at)
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


class PageServer(ThreadingHTTPServer):
    """Serves the page of a run to whoever has one of its passwords."""

    daemon_threads = True

    def __init__(
        self, address: str, join: Join, users: Callable[[], Mapping[str, str]], tls: tuple[str, str]
    ) -> None:
        """
        Args:
            address: [HOST:]PORT, by default on this machine only.
            users: returns the passwords by user.
            tls: paths of certificate and key, for other hosts than this machine.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        if not port.isdecimal() or not int(port) < 65536:
            raise UserError(f"--http {address}: give a port, or HOST:PORT")
        self.users, self.watcher = users, Watcher(join)
        try:
            super().__init__((host, int(port)), _Handler)
        except OSError as error:
            self.watcher.close()
            reason = f"{error.strerror}; give another port, and an address of this machine"
            raise UserError(f"--http {address}: {reason}") from error
        self.url = f"http://{host}:{self.server_port}"
        if not is_loopback(host):  # the password must not be read on the way
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
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
        except (binascii.Error, UnicodeDecodeError):
            return False
        expected = self.users().get(user, "")
        same = hmac.compare_digest(password.encode(), expected.encode())
        return kind.lower() == "basic" and bool(expected) and same

    def handle_error(self, *_: object) -> None:
        """Say nothing: a browser may close a connection at any time."""


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
        """Write no line for a request."""
