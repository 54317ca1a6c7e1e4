"""The page of a run with a log."""

import threading
import time

from torchtitan_diloco.islands import page_server
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.page_server import Certificate, html_page, metrics, page_address
from torchtitan_diloco.islands.reader import Reader, open_reader
from torchtitan_diloco.islands.server import Server

__all__ = ["PageServer", "page_address"]

CACHE_SECONDS = 1.0
RETRY_SECONDS = 5.0


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
        history = self._reader.history
        html = html_page(
            found, list(history.stays.values()), history.losses, at=time.time(), source="server"
        )
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


class PageServer(page_server.PageServer):
    """Serves the page of a run to users with one of its passwords."""

    def __init__(self, of: Server, host: str, port: int) -> None:
        super().__init__(
            Watcher(of.admin),
            host,
            port,
            logins=lambda: of.settings.sites,
            certificate=Certificate(of.path / "certificate.pem", of.path / "key.pem"),
        )
