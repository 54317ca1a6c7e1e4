"""How long the transfers of an island take."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan_diloco.diloco.reports import STILL_RATIO, STILL_SECONDS


@dataclass
class _Upload:
    began: float
    size: int


AGAIN_SECONDS = 0.5
"""Seconds after which an island, or the syncer, repeats a failed transfer."""


class Transfers:
    """Measures the transfers of an island with the store. Any thread may call this."""

    def __init__(self, fragments: int) -> None:
        self.upload_rate = 0.0
        """Bytes per second of the latest upload. 0: unknown."""
        self._fragments = fragments
        self._lock = threading.Lock()
        self._uploads = dict[int, float]()
        self._downloads = dict[int, float]()
        """Seconds of the latest transfer of each fragment."""
        self._current: _Upload | None = None

    @contextmanager
    def upload(self, fragment: int, size: int) -> Iterator[None]:
        """Measure the upload of a part."""
        began = time.monotonic()
        self._current = _Upload(began, size)
        try:
            yield
            seconds = max(1e-6, time.monotonic() - began)
            self.upload_rate = size / seconds
            with self._lock:
                self._uploads[fragment] = seconds
        finally:
            self._current = None

    def add_download(self, fragment: int, seconds: float) -> None:
        with self._lock:
            self._downloads[fragment] = seconds

    def cycle(self) -> tuple[float, float]:
        """Return the seconds of the uploads and downloads of a cycle, 0 if they are not known."""
        with self._lock:
            return self._of_cycle(self._uploads), self._of_cycle(self._downloads)

    def _of_cycle(self, known: dict[int, float]) -> float:
        return sum(known.values()) * self._fragments / len(known) if known else 0.0

    def stuck_seconds(self, stored_at: float, in_flight: int) -> float:
        """Return for how long an upload has made no progress, if that is unusually long, or 0.

        `stored_at`: time at which something of it was last stored. `in_flight`: maximum number of
        bytes that are stored at a time.
        """
        current = self._current
        if current is None:
            return 0.0
        still = time.monotonic() - max(current.began, stored_at)
        size = min(current.size, in_flight)
        usual = size / self.upload_rate if self.upload_rate else math.inf
        return still if still > max(STILL_SECONDS, STILL_RATIO * usual) else 0.0
