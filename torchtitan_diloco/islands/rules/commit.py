"""How a decision takes effect, and how decisions are read.

A decision is created once, and counts if there is no higher one. All generators yield calls of the
store, and are sent the results. The caller throws a `CallFailedError` into them if it does not know
whether a call had an effect.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from torchtitan_diloco.islands.rules.decision import Decision, decode_decision
from torchtitan_diloco.islands.rules.founding import (
    EmptiedError,
    StrayDecisionError,
    WentBackError,
)
from torchtitan_diloco.islands.rules.names import RUN, run_name, run_number
from torchtitan_diloco.islands.rules.presence import most_listened

RETRY = 0.3
"""Seconds after which a failed call is repeated."""
LOOKS = 3
"""Number of attempts to see a decision that a list does not show."""
VISIBLE_SECONDS = 0.6
"""Seconds between these attempts."""


class CallFailedError(ConnectionError):
    """A call failed: it had an effect, had none, or will have one later."""


@dataclass(frozen=True)
class Create:
    """Create an object, and return whether it holds this content now."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Get:
    """Return the content of an object, or None."""

    name: str


@dataclass(frozen=True)
class List:
    """Return the names that begin with `prefix` and are greater than `after`."""

    prefix: str
    after: str = ""


@dataclass(frozen=True)
class Delete:
    name: str


@dataclass(frozen=True)
class Sleep:
    seconds: float


Call: TypeAlias = Create | Get | List | Delete | Sleep


class Outcome(Enum):
    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    """Another syncer decides. This one discards its state, deletes nothing and stands by."""


def commit(number: int, content: bytes) -> Generator[Call, Any, Outcome]:
    """Make a decision take effect.

    `content`: bytes that no other syncer writes. The number may be free because it is old, since
    only the newest decisions are kept. It therefore counts only if no higher one is listed
    afterwards. If the decision before it is missing, the store was restored to an older copy, or
    emptied. It is withdrawn, as objects that it names may be missing: a WentBackError is raised.
    """
    name = run_name(number)
    before = run_name(number - 1)
    went_back = False
    remaining = list[str]()
    while True:
        try:
            if went_back:
                remaining = yield List(RUN)
                yield Delete(name)
                break
            if not (yield Create(name, content)):
                return Outcome.SUPERSEDED
            for _ in range(LOOKS):
                names = yield List(RUN, after=run_name(number - 2))
                if any(other > name and run_number(other) is not None for other in names):
                    return Outcome.SUPERSEDED
                if number == 1 or before in names:
                    return Outcome.COMMITTED
                yield Sleep(VISIBLE_SECONDS)
            went_back = True
        except CallFailedError:
            yield Sleep(RETRY)
    is_empty = all(other == name or run_number(other) is None for other in remaining)
    kind = EmptiedError if is_empty else WentBackError
    raise kind(f"decision {number - 1} is no longer stored")


LIST_SECONDS = 5.0
"""Seconds after which the decisions are listed, although the next one is not there. A reader that
slept may find the next one deleted, and newer ones stored."""
WENT_BACK_SECONDS = 10.0
"""Seconds for which the highest decision is older than a known one, after which the store counts as
restored to an older copy. Lists may be late."""


class Reader:
    """Reads the decisions of a run.

    The highest one counts, never the next one: a paused syncer that has woken up may create the
    next number again, after it was deleted because it was old.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the highest decision that was read. None: the location is empty."""
        self.before: int | None = None
        """Number of the highest decision before that one, when they were last listed."""
        self._listed_at = -math.inf
        self._lower_since = math.inf

    @property
    def is_lower(self) -> bool:
        """Whether only older decisions were listed than one that was read."""
        return self._lower_since < math.inf

    @property
    def is_stray(self) -> bool:
        """Whether decisions are missing before the one that was read, although older ones are
        there. Those are deleted first."""
        if self.number is None or self.before is None:
            return False
        return self.before < self.number - 1

    def read(self, now: float) -> Generator[Call, Any, bytes | None]:
        """Return the highest decision if it is new, and None otherwise. Call this repeatedly.

        Raise a WentBackError if only older decisions are listed for some time.
        """
        is_listed = self.number is not None and now - self._listed_at < LIST_SECONDS
        if is_listed and (yield Get(run_name((self.number or 0) + 1))) is None:
            return None
        names = yield List(RUN)
        numbers = [number for name in names if (number := run_number(name)) is not None]
        highest = max(numbers, default=0)
        known = self.number or 0
        if highest < known:
            self._lower_since = min(self._lower_since, now)
            if now - self._lower_since >= WENT_BACK_SECONDS:
                if not numbers:
                    raise EmptiedError(f"decision {known} was read, and there is none now")
                raise WentBackError(f"decision {known} was read, and the highest is {highest}")
            return None
        self._lower_since = math.inf
        content: bytes | None = None
        if highest > known:
            content = yield Get(run_name(highest))
            if content is None:
                return None  # it is not visible yet, or was old: list again
            self.number = highest
        self.before = max((number for number in numbers if number < highest), default=None)
        self._listed_at = now
        return content


STANDSTILL = 10.0
"""Minimum seconds without a new decision after which a standby takes over."""
PAUSES_STILL = 3
"""Minimum number of pauses, between two decisions and between two looks, without a new decision
after which a standby takes over."""
LOOKS_APART = 2
"""Number of polls of an island between two looks of a standby."""


class StandBy:
    """A syncer that waits until the number stops growing. It uses its own clock: two syncers that
    lead at the same time do no harm, because decisions are created once.

    Only time in which it could read the store counts. After an outage, the leading syncer needs
    some time to continue, too.
    """

    def __init__(self, died: str = "") -> None:
        """`died`: session of a syncer that is known to have died."""
        self.newest: Decision | None = None
        """The newest decision. None: the location is empty."""
        self._died = died
        self._reader = Reader()
        self._read_at: float | None = None
        self._still = 0.0
        self._stray_since = math.inf

    @property
    def pause(self) -> float:
        """Usual seconds between two looks, or 0 if it is unknown."""
        return 0.0 if self.newest is None else LOOKS_APART * self.newest.settings.poll_seconds

    def watch(self, now: float) -> Generator[Call, Any, bool]:
        """Read the newest decision, and return whether to take over.

        Raise a StrayDecisionError if decisions before it are missing for some time.
        """
        content = yield from self._reader.read(now)
        if content is not None:
            self.newest = decode_decision(content, self._reader.number)
        if content is not None or self._read_at is None or self._reader.is_lower:
            self._still = 0.0
        else:
            self._still += min(now - self._read_at, most_listened(self.pause))
        self._read_at = now
        if self._reader.is_lower or (self.newest is None and self._reader.number is not None):
            return False  # there is a run, but it cannot be read
        if not self._has_no_leader():
            self._stray_since = math.inf
            return False
        return self._follows_on(now)

    def _has_no_leader(self) -> bool:
        if self.newest is None or self.newest.stopped or self.newest.session == self._died:
            return True
        pause = max(self.pause, self.newest.settings.commit_seconds)
        return self._still >= max(STANDSTILL, PAUSES_STILL * pause)

    def _follows_on(self, now: float) -> bool:
        """Return whether the newest decision may be continued. Lists may be late."""
        reader = self._reader
        if not reader.is_stray:
            self._stray_since = math.inf
            return True
        self._stray_since = min(self._stray_since, now)
        if now - self._stray_since >= WENT_BACK_SECONDS:
            raise StrayDecisionError(run_name(reader.number or 0), run_name(reader.before or 0))
        return False
