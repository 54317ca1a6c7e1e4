"""The page of a run, and its numbers for Prometheus."""

import threading
import time
from contextlib import suppress
from pathlib import Path

from torchtitan_diloco.islands.overview import View, overview
from torchtitan_diloco.islands.page_server import PageServer, html_page, metrics, page_address
from torchtitan_diloco.islands.reader import REFRESH_SECONDS, Reader
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import AwayError, ClosedError, open_store
from torchtitan_diloco.store.join_file import read_join_file

VIEW_SECONDS = 2.0
"""Longest wait of a request for the newest state."""
REOPEN_SECONDS = 2.0
"""Seconds after which a store that could not be opened is opened again."""


class RunPages:
    """Reads a run in a thread, with its whole history, and renders its pages.

    What the history says is only worked out when somebody asks: after some weeks that takes a good
    part of a second, and the process may be the one that decides for the run.
    """

    def __init__(self, location: str | Path) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._is_asked = threading.Event()
        self._is_viewed = threading.Event()
        """Whether `_view` is newer than the last request for it."""
        self._view: View | None = None
        self._problem = "reading the run"
        self._built_at = -REFRESH_SECONDS
        self._pages: dict[str, tuple[str, bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="islands-page", daemon=True)
        self._thread.start()

    def page(self, path: str) -> tuple[str, bytes] | None:
        """Return type and content, or None if there is no such page. They are at most a second old,
        unless the store answers late."""
        with self._lock:
            if time.monotonic() > self._built_at + REFRESH_SECONDS:
                self._is_viewed.clear()
                self._is_asked.set()
                self._is_viewed.wait(VIEW_SECONDS)
                self._pages = self._build()
                self._built_at = time.monotonic()
            return self._pages.get(path)

    def close(self) -> None:
        self._closed.set()
        self._is_asked.set()
        self._thread.join()

    def _build(self) -> dict[str, tuple[str, bytes]]:
        view = self._view
        if view is None:
            return {"/": ("text/plain", self._problem.encode())}
        numbers = overview(view)
        past = view.past
        html = html_page(numbers, past.stays, past.losses, at=past.ended or time.time())
        return {
            "/": ("text/html", html.encode()),
            "/metrics": ("text/plain; version=0.0.4", metrics(numbers).encode()),
        }

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._read()
            except ClosedError:
                return
            except Exception as error:  # the store may be away, or the run be another one
                self._view = None
                self._problem = f"the run cannot be read: {error}"
                self._is_viewed.set()
            if not self._closed.is_set():
                self._is_asked.clear()
                self._is_asked.wait(REOPEN_SECONDS)

    def _read(self) -> None:
        """Read a run until this is closed."""
        run = Run(open_store(self._location, writes=None, patience=0.0, quiet=True))
        try:
            reader = Reader(run, whole=True)
            while not self._closed.is_set():
                with suppress(AwayError):  # the page says so
                    reader.read()
                if self._is_asked.is_set():
                    self._is_asked.clear()
                    self._view = reader.view()
                    self._is_viewed.set()
                self._is_asked.wait(REFRESH_SECONDS)
        finally:
            run.close()


def serve_page(location: str, address: str) -> PageServer:
    """Serve the page of a run to this machine, and return its server.

    `address`: [HOST:]PORT. Users need the login of a join file, if the location is one.
    """
    host, port = page_address(address)
    path = Path(location).expanduser()
    logins: dict[str, str] | None = None
    if "://" not in location and path.is_file():
        join = read_join_file(path)
        logins = {join.access_key_id: join.secret_access_key}
    known = logins
    return PageServer(
        RunPages(location), host, port, logins=None if known is None else lambda: known
    )
