"""Other islands, as far as one has heard of them."""

import math
import statistics
from collections import deque
from dataclasses import dataclass

import msgspec

from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.records import Count, Name, Seconds


class IslandFencedError(ValueError):
    """Another start of this island, or another island, has taken its slot."""


class IslandFailedError(RuntimeError):
    """This island cannot go on. Started again, it begins with what the log says."""


class Hint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Heartbeat of an island, for the others. Nothing valid depends on it."""

    incarnation: Name
    step: Count
    tokens: Count
    step_seconds: Seconds
    caught_up: bool
    leaving: bool = False


@dataclass(frozen=True)
class Member:
    """Last heartbeat of another island, and when it came, by this island's clock."""

    hint: Hint
    heard: float
    moved: float
    """When its step last changed."""


LAGS = 8
"""Latest parts of a slot by which an island knows what they weigh and how long they take."""
PATIENCE = 1.5
"""Times the usual lag of a part for which a round stays open for it."""


class Habits:
    """Usual lag and weight of the parts of a slot, since its owner has it."""

    def __init__(self, fragments: int) -> None:
        self.lags = deque[float](maxlen=LAGS)
        """Seconds from the opening of a round until a part could be used here."""
        self.weights = [deque[int](maxlen=LAGS) for _ in range(fragments)]

    def patience(self, longest: float) -> float:
        """Return for how long a round stays open for the slot: not at all if that is too long."""
        usual = PATIENCE * statistics.median(self.lags) if self.lags else longest
        return usual if usual <= longest else 0.0

    def weight(self, fragment: int) -> int:
        """Return the usual weight. The first part after an outage has the work of many cycles."""
        weights = self.weights[fragment]
        return statistics.median_low(weights) if weights else 0


class Members:
    """Heartbeats of the other islands: hints for waiting, never for what is valid.

    After a connection, and after a pause of this process, nobody counts as gone for the first
    `expiry` seconds: an outage takes all keys, and a paused process has heard of nobody.

    `connect`, `disconnect` and `hear` are called in the connection's thread, `tick` in the thread
    that reads the log. No attribute is written by both.
    """

    def __init__(self, expiry: float) -> None:
        self.expiry = expiry
        self.heard: dict[str, Member] = {}
        """Grows only. Copy it before a loop, as a member may be added meanwhile."""
        self._connected_at: float | None = None
        self._last_tick = self._paused_at = -math.inf

    @property
    def connected(self) -> bool:
        return self._connected_at is not None

    def connect(self, now: float) -> None:
        self._connected_at = now

    def disconnect(self) -> None:
        self._connected_at = None

    def tick(self, now: float) -> None:
        """Notice a pause. Call this more often than every half of `expiry`, and first of all."""
        if now - self._last_tick > self.expiry / 2:
            self._paused_at = now
        self._last_tick = now

    def hear(self, hint: Hint, now: float) -> None:
        known = self.heard.get(hint.incarnation)
        moved = now if known is None or known.hint.step != hint.step else known.moved
        self.heard[hint.incarnation] = Member(hint, now, moved)

    def has_caught_up(self, incarnation: str) -> bool:
        """Return whether it was heard, and has told that it had caught up with the log."""
        member = self.heard.get(incarnation)
        return member is not None and member.hint.caught_up

    def is_new(self, now: float) -> bool:
        """Return whether there was no time yet to hear of all others."""
        since = self._connected_at
        return since is None or now - max(since, self._paused_at) < self.expiry

    def is_gone(self, incarnation: str, now: float) -> bool:
        """Return whether its slot may be taken."""
        member = self.heard.get(incarnation)
        return not self.is_new(now) and (member is None or now - member.heard >= self.expiry)

    def is_ready(self, incarnation: str, now: float, step_seconds: float) -> bool:
        """Return whether a round waits for it. `step_seconds`: of this island's steps."""
        if self.is_new(now):
            return True
        if not self.has_caught_up(incarnation) or self.is_gone(incarnation, now):
            return False
        return now - self.heard[incarnation].moved < max(self.expiry, 3 * step_seconds)

    def slot_to_take(self, state: State, own: str, now: float) -> tuple[int, str | None] | None:
        """Return a slot for the incarnation `own` to take, and the owner that this replaces.

        That of an earlier start of the same island comes first. Raises a ValueError if that one is
        running.
        """
        owners = [(slot, found.owner) for slot, found in enumerate(state.slots)]
        for slot, owner in owners:
            if owner is not None and name_of(owner) == name_of(own):
                if self.is_gone(owner, now):
                    return slot, owner
                if self.is_new(now):
                    return None
                raise ValueError(
                    f"an island with the name {name_of(own)} is running already: give this one "
                    "another islands.name, or end the other one"
                )
        for slot, owner in sorted(owners, key=lambda pair: pair[1] is not None):
            if owner is None or self.is_gone(owner, now):
                return slot, owner
        return None


def name_of(incarnation: str) -> str:
    """Return the name of the island that this is a start of."""
    return incarnation.partition("/")[0]
