"""How long the transfers of an island take."""

import math
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchtitan_diloco.diloco.reports import STILL_RATIO, STILL_SECONDS
from torchtitan_diloco.islands.rules.names import Object


@dataclass
class _Upload:
    began: float
    size: int


AGAIN_SECONDS = 0.5
"""Seconds after which an island, or the syncer, repeats a failed transfer."""
UNREADABLE_SECONDS = 300.0
"""Seconds for which an object cannot be read, although the store is there, after which an island
takes another one in its place, and the syncer refuses a part."""


class Unread:
    """Objects that could not be read, and since when. One thread uses this."""

    def __init__(self) -> None:
        self._since = dict[Object, float]()

    def choose(self, wanted: Collection[Object]) -> Object | None:
        """Return what to read next: one that could not be read comes after the others. Forget those
        that are no longer wanted."""
        self._since = {stored: at for stored, at in self._since.items() if stored in wanted}
        return min(wanted, key=self._since.__contains__, default=None)

    def note(self, stored: Object, at: float) -> bool:
        """Note an attempt that has failed, and return whether the object is given up: over a slow
        link, another one in its place, such as a whole copy, would take even longer."""
        return at > self._since.setdefault(stored, at) + UNREADABLE_SECONDS


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
