"""When the syncer writes a decision, and which objects then are garbage."""

import math
from collections import deque

import msgspec

from torchtitan_diloco.islands_store.decision import Decision, encode_decision
from torchtitan_diloco.islands_store.jobs import Commit
from torchtitan_diloco.islands_store.names import incarnation_of, is_garbage, run_number
from torchtitan_diloco.islands_store.presence import Presence

BEAT = 1.0
"""Maximum seconds between two decisions."""
LARGE, LARGE_SECONDS = 10_000, 1.0
"""Size of decisions above which they are written once a second."""
KEPT, KEPT_SECONDS = 12, 60.0
"""Minimum number of decisions to keep, and the time for which all are kept for late readers."""


class Writer:
    """Knowledge about the decisions that count, in addition to the changing state."""

    def __init__(self, decision: Decision | None, newest: int, now: float) -> None:
        """`newest`: number of the newest decision, if it is not this one."""
        self.number = newest
        """Number of the last decision that counts."""
        self.is_writing = False
        self._names, self._owners = set[str](), set[str]()
        self._next = self._names, self._owners
        if decision is not None:
            self.number = max(newest, decision.number)
            self._names, self._owners = decision.names, set(decision.owners())
        self._began, self._written_at = now, -math.inf
        self._size, self._body = 0, b""
        self._recent = deque[tuple[float, int]]()  # when own decisions began to count

    def write_if_due(self, state: Decision, now: float) -> Commit | None:
        """Return a decision to write after changes, and at least each second."""
        waited, least = now - self._written_at, state.settings.commit_seconds
        if self._size > LARGE:
            least = max(least, LARGE_SECONDS)
        if self.is_writing or waited < least:
            return None
        same = msgspec.structs.replace(state, number=0, age=0.0, written=0.0)
        body = msgspec.json.encode(same)
        if body == self._body and waited < BEAT:
            return None
        self._body, self.is_writing = body, True
        self._next = state.names, set(state.owners())
        content = encode_decision(state)
        self._size = len(content)
        return Commit(state.number, content)

    def on_committed(self, number: int, now: float) -> tuple[str, ...]:
        """Record that a decision counts. Return the names of objects that no decision names any
        longer."""
        dropped = self._names - self._next[0]
        self._names, self._owners = self._next
        self.number, self.is_writing, self._written_at = number, False, now
        self._recent.append((now, number))
        return tuple(sorted(dropped))

    def garbage(
        self, names: list[str], presence: Presence, gone: list[str], now: float
    ) -> list[str]:
        """Return which of all names are garbage: orphans of dead syncers, objects of incarnations
        that are `gone`, and old decisions."""
        oldest = self._oldest_kept(now)
        found = list[str]()
        for name in names if self.number else ():
            incarnation, number = incarnation_of(name), run_number(name)
            if incarnation is not None and incarnation not in self._owners:
                is_old = incarnation in gone or presence.is_unknown(incarnation)
            else:
                is_old = is_garbage(name, self.number, self._names)
            if is_old or (number is not None and number < oldest):
                found.append(name)
        return found

    def _oldest_kept(self, now: float) -> int:
        if now - self._began < KEPT_SECONDS:
            return 0  # it does not know how old those of its predecessor are
        while len(self._recent) > KEPT and now - self._recent[0][0] > KEPT_SECONDS:
            self._recent.popleft()
        return self._recent[0][1] if self._recent else 0
