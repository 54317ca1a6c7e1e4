"""How far a long command is: a bar on a terminal, else a line every so often."""

import sys
import time
from typing import Any, NamedTuple

from tqdm import tqdm

from torchtitan_diloco.base.formatting import BAR_SECONDS, FIRST_LINE_SECONDS, clock, counted
from torchtitan_diloco.base.process import say

LINE_SECONDS = 30.0
"""Seconds between two lines."""


class Amount(NamedTuple):
    """What is read, and the tokens that are written of it."""

    bytes: int
    documents: int
    tokens: int


class Progress:
    """Shows amounts and rates on stderr, and the share and the time left where they are known.

    Rates and the time left are those of this start: what an earlier one did took no time.
    """

    def __init__(self, action: str, start: Amount, share: float | None) -> None:
        self._action = action
        self._start = start
        self._start_share = share
        self._is_terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._next = self._began + (BAR_SECONDS if self._is_terminal else FIRST_LINE_SECONDS)
        self._bar: tqdm[Any] | None = None

    def show(self, amount: Amount, share: float | None) -> None:
        """Show what there is, unless that was just done. `share` is None if it is not known."""
        now = time.monotonic()
        if now < self._next:
            return
        text = self.describe(amount, share, now - self._began)
        if not self._is_terminal:
            percent = "" if share is None else f"{share:.1%}, "
            say(f"data: {self._action}: {percent}{text}")
            self._next = now + LINE_SECONDS
            return
        if self._bar is None:
            look = "{desc}" if share is None else "{percentage:3.0f}%|{bar:12}| {desc}"
            self._bar = tqdm(total=1.0, bar_format=look, leave=False, dynamic_ncols=True)
        self._bar.n = share or 0.0
        self._bar.set_description_str(text)
        self._next = now + BAR_SECONDS

    def describe(self, amount: Amount, share: float | None, seconds: float) -> str:
        """Return the amounts, their rates in these seconds, and the time left."""
        bytes_rate = (amount.bytes - self._start.bytes) / seconds
        tokens_rate = (amount.tokens - self._start.tokens) / seconds
        parts = [
            _short(amount.bytes, "B"),
            counted(amount.documents, "document"),
            _short(amount.tokens, " tokens"),
            _short(bytes_rate, "B/s"),
            _short(tokens_rate, " tokens/s"),
        ]
        done = 0.0 if share is None else share - (self._start_share or 0.0)
        if share is not None and done > 0:
            parts.append(f"{clock(seconds * (1.0 - share) / done)} left")
        return ", ".join(parts)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _short(value: float, unit: str) -> str:
    """Format as `1.23 GB` or `45.6 M tokens`."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.0f} {unit.strip()}"
