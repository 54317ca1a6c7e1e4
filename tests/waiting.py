"""Wait for a condition in a test or a benchmark."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 150.0
"""Seconds after which a test counts as hanging."""


def wait_until(
    reached: Callable[[], object], awaited: str, log: Path | None = None, seconds: float = PATIENCE
) -> None:
    """Wait for a condition. Raise a TimeoutError, with the end of `log`, if it does not come."""
    until = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > until:
            printed = log.read_text(errors="replace")[-2000:] if log else ""
            raise TimeoutError(f"{awaited} did not come in {seconds:g} s:\n{printed}")
        time.sleep(0.01)
