"""How a decision takes effect: it is created once, and there is no higher one.

Both functions yield calls of the store, and are sent the results. The caller throws a `StoreError`
into them if it does not know whether a call had an effect.
"""

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from torchtitan_diloco.islands_store.names import RUN, run_name, run_number

RETRY = 0.5
"""Seconds after which a failed call is repeated."""
LOOKS, VISIBLE_SECONDS = 3, 0.6
"""Number of attempts, and seconds between them, to read a decision that a list does not show."""


class StoreError(ConnectionError):
    """A call failed: it had an effect, had none, or will have one later."""


@dataclass(frozen=True)
class Create:
    """Create an object, and return whether the name was free."""

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
class Sleep:
    seconds: float


Call: TypeAlias = Create | Get | List | Sleep


class Outcome(Enum):
    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    """Another syncer decides. This one discards its state, deletes nothing and stands by."""
    RESTORED = "restored"
    """It counts, but the previous decision is missing: the store was restored to an older copy, and
    objects may be missing."""


def commit(number: int, content: bytes) -> Generator[Call, Any, Outcome]:
    """Make a decision take effect.

    `content`: bytes that no other syncer writes. The number may be free because it is old, since
    only the newest decisions are kept. It therefore counts only if no higher one is listed
    afterwards.
    """
    name, before = run_name(number), run_name(number - 1)
    while True:
        try:
            if not (yield Create(name, content)):
                there = yield Get(name)
                if there is None:  # not visible yet
                    raise StoreError(f"{name} exists, but cannot be read")
                if there != content:
                    return Outcome.SUPERSEDED
            for _ in range(LOOKS):
                names = yield List(RUN, after=run_name(number - 2))
                if any(other > name for other in names):
                    return Outcome.SUPERSEDED
                if number == 1 or before in names:
                    return Outcome.COMMITTED
                yield Sleep(VISIBLE_SECONDS)
            return Outcome.RESTORED
        except StoreError:
            yield Sleep(RETRY)


def read_newest() -> Generator[Call, Any, tuple[int, bytes] | None]:
    """Return the highest decision, or None in an empty location."""
    while True:
        try:
            names = yield List(RUN)
            numbers = [number for name in names if (number := run_number(name)) is not None]
            if not numbers:
                return None
            content = yield Get(run_name(max(numbers)))
            if content is not None:
                return max(numbers), content
        except StoreError:
            pass
        yield Sleep(RETRY)  # or it was listed, and is not readable yet, or was old


STANDSTILL = 10.0
"""Seconds without a new decision after which a standby takes over."""


class StandBy:
    """A syncer that waits until the number stops growing. It uses its own clock: two syncers that
    lead at the same time do no harm, because decisions are created once."""

    def __init__(self) -> None:
        self._newest: int | None = None
        self._since = 0.0
        self._has_looked = False

    def look(self, number: int | None, is_stopped: bool, now: float) -> bool:
        """Return whether to take over. `number`: of the newest decision; None: there is none.

        `is_stopped`: whether the decision says that its syncer has ended in order.
        """
        if not self._has_looked or number != self._newest:
            self._newest, self._since, self._has_looked = number, now, True
        return number is None or is_stopped or now - self._since >= STANDSTILL
