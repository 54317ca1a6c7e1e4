"""How far a long job is: a line that is rewritten on a terminal, a line now and then elsewhere."""

import sys
import time

_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 15.0


class Progress:
    def __init__(self, label: str, total_bytes: int | None) -> None:
        self._label, self._total = label, total_bytes
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = self._start + (_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS)

    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def update(self, bytes_read: int, done_so_far: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS)
        line = f"{self._label}: {done_so_far}"
        if self._total and bytes_read:
            done = min(bytes_read / self._total, 1.0)
            left = self.seconds() * (1 - done) / done
            line = f"{line}, {done:.1%} of the text, about {left:,.0f} s left"
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def finish(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
