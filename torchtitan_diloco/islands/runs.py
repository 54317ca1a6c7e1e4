"""A run of islands in a store: its decisions, and its objects with tensors."""

import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.islands.rules.commit import (
    Call,
    CallFailedError,
    Create,
    Delete,
    Get,
    List,
    Reader,
)
from torchtitan_diloco.islands.rules.decision import Decision, decode_decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.names import RUN, run_number
from torchtitan_diloco.store import AwayError, DamagedObjectError, FullError, LargeObjects, Store

STREAMS = 8
"""Default number of chunks of large objects that are in flight at a time."""
DAMAGE_REMEDY = (
    "if no syncer has decided since, delete it: the run goes on from the decision before it, and "
    "islands that had read it say that they must be restarted"
)
FULL_SECONDS = 30.0
"""Minimum time between two lines about a store that is full."""
Result = TypeVar("Result")


class DamagedDecisionError(MalformedError):
    """The bytes of a decision are not what was written. The next decision may be whole."""


class Run:
    """The objects of a run of islands. Any thread may use this.

    `Run` of the configuration is the section of its settings, that of the report what was recorded.
    """

    def __init__(self, store: Store, streams: int = STREAMS, patience: float = 0.0) -> None:
        """Use the objects in a store.

        `streams`: number of chunks of large objects in flight at a time. `patience`: seconds for
        which a call of a small object is repeated.
        """
        self.store = store
        self.location = store.location
        self.large = LargeObjects(store, streams)
        self.brief = store.with_patience(patience)
        """The same store for small objects, by default for threads that repeat a failed call
        themselves."""
        self._said_at = -math.inf
        """When this process last logged that the store is full."""
        self._full_at = -math.inf
        """When the store last had no room for an object of this process."""

    def drive(
        self, calls: Generator[Call, Any, Result], sleep: Callable[[float], None] = time.sleep
    ) -> Result:
        """Make the calls that a generator of the rules yields, and return its result.

        Raise a CallFailedError if a call failed that the generator does not repeat, a
        DamagedDecisionError for damaged bytes, and an error for users if the store refuses a call.
        """
        try:
            call = next(calls)
            while True:
                try:
                    result = self._make(call, sleep)
                except AwayError as error:
                    call = calls.throw(CallFailedError(str(error)))
                except FullError as error:
                    self.say_full(error)
                    call = calls.throw(CallFailedError(str(error)))
                else:
                    call = calls.send(result)
        except StopIteration as end:
            result_of_calls: Result = end.value
            return result_of_calls

    def _make(self, call: Call, sleep: Callable[[float], None]) -> object:
        match call:
            case Create():
                return self.brief.create(call.name, call.content)
            case Get():
                try:
                    stored = self.brief.get(call.name)
                except DamagedObjectError as error:
                    reason = str(error).removeprefix(f"{self.location}: ")
                    raise DamagedDecisionError(reason) from error
                return None if stored is None else stored.content
            case List():
                return [entry.name for entry in self.brief.list(call.prefix, call.after)]
            case Delete():
                self.brief.delete(call.name)
            case _:
                sleep(call.seconds)
        return None

    def say_full(self, error: FullError) -> None:
        """Note that nothing can be stored. Log it now and then."""
        now = time.monotonic()
        self._full_at = now
        if now - self._said_at >= FULL_SECONDS:
            self._said_at = now
            logger.warning(f"{error}: until then, islands train on, and nothing is merged")

    @property
    def is_full(self) -> bool:
        """Whether the store has lately had no room for an object of this process."""
        return time.monotonic() - self._full_at < FULL_SECONDS

    def newest(self) -> Decision | None:
        """Return the highest decision, or None if the location is empty."""
        return Decisions(self).next()

    def close(self) -> None:
        self.large.close()
        self.store.close()


def explain_unreadable(location: str, error: MalformedError) -> str:
    """Return why a decision cannot be read, and what to do, in words for users."""
    remedy = f"; {DAMAGE_REMEDY}" if isinstance(error, DamagedDecisionError) else ""
    return f"{location}: {error}{remedy}"


class Decisions:
    """Reads the decisions of a run, in one thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reader = Reader()

    @property
    def is_empty(self) -> bool:
        """Whether the location had no decision when it was last read."""
        return self._reader.number is None

    def next(self) -> Decision | None:
        """Return the highest decision if it is new. Raise a CallFailedError if the store is away,
        and a MalformedError if that decision cannot be read: `explain_unreadable`."""
        content = self._run.drive(self._reader.read(time.monotonic()))
        return None if content is None else decode_decision(content, self._reader.number)


def is_run_in_folder(folder: Path) -> bool:
    """Return whether a folder is the store of a run, and not the folder of its records."""
    decisions = folder / RUN
    return decisions.is_dir() and any(
        run_number(RUN + path.name) is not None for path in decisions.iterdir()
    )
