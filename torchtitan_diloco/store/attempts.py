"""Attempts: retry temporary failures for some time, and log them."""

import copy
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torchtitan_diloco.base.formatting import brief
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.store.errors import AwayError, ClosedError, PassingError

T = TypeVar("T")
PAUSE = 0.1
"""Seconds between two attempts, which double after each, plus up to half of them at random."""
LONGEST_PAUSE = 0.2
"""Longest of these pauses, in seconds: decisions and notes go on as soon as a cut is over."""
LONGEST_LARGE_PAUSE = 2.0
"""The same for contents of some MB, of which a busy server is to get fewer."""
QUIET_SECONDS = 10.0
"""Minimum seconds between two log lines about the same verb, which grow with the failure."""
LONGEST_QUIET = 60.0
"""Seconds up to which they grow."""


class Attempts:
    """Retries calls of a backend. Any thread may use this."""

    def __init__(self, location: str, patience: float, *, quiet: bool = False) -> None:
        """Build the retries of one location.

        `patience`: seconds for which a call is retried. `quiet`: log nothing, the caller does.
        """
        self._location = location
        self._patience = patience
        self._quiet = quiet
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._failing: dict[str, float] = {}  # verb -> when it began to fail
        self._said: dict[str, float] = {}

    def with_patience(self, patience: float) -> "Attempts":
        """Return attempts that are retried for another time, and are logged and closed with
        these."""
        others = copy.copy(self)
        others._patience = patience
        return others

    def run(self, verb: str, name: str, call: Callable[[], T], *, large: bool = False) -> T:
        """Return the result of `call`. `large`: its content may have some MB."""
        end = time.monotonic() + self._patience
        pause = PAUSE
        while True:
            if self._closed.is_set():
                raise ClosedError(f"{self._location} was closed")
            try:
                result = call()
            except PassingError as error:
                self._note_failure(verb, name, error)
                if time.monotonic() + pause > end:
                    remedy = f"; {error.remedy}" if error.remedy else ""
                    raise AwayError(
                        f"{self._location}: could not {verb} {name or 'all'} "
                        f"for {self._patience:g} s ({error}){remedy}"
                    ) from error
                self._closed.wait(pause * random.uniform(1.0, 1.5))
                pause = min(2 * pause, LONGEST_LARGE_PAUSE if large else LONGEST_PAUSE)
            else:
                self._note_success(verb)
                return result

    def close(self) -> None:
        """End the attempts of all threads with ClosedError, once the current ones have failed."""
        self._closed.set()

    def _note_failure(self, verb: str, name: str, error: PassingError) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        with self._lock:
            began = self._failing.setdefault(verb, now)
            quiet = min(max(QUIET_SECONDS, now - began), LONGEST_QUIET)
            if now < self._said.get(verb, -quiet) + quiet:
                return
            self._said[verb] = now
        logger.warning(
            f"{self._location}: could not {verb} {name or 'all'} ({error}); trying again"
        )

    def _note_success(self, verb: str) -> None:
        if not self._failing:  # without the lock, as it is so nearly always
            return
        with self._lock:
            began = self._failing.pop(verb, None)
        if began is not None and (seconds := time.monotonic() - began) > 1.0:
            logger.info(f"{self._location}: can {verb} again, after {brief(seconds)}")
