"""Wait for a condition in a test."""

import time
from collections.abc import Callable

PATIENCE = 150
"""Seconds after which a test counts as hanging."""


def wait_until(reached: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until, f"waited too long for {what}"
        time.sleep(0.01)
