"""Hold what an island receives: records, messages and heartbeats of other islands."""

import math
import threading
import time
from collections import deque
from typing import NamedTuple, TypeAlias

import msgspec

from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import Chunk, Count, digest
from torchtitan_diloco.log import UserError, logger

TICK = 0.1
"""Longest wait in `receive`, in seconds."""


class LogRecord(NamedTuple):
    sequence: int
    raw: bytes
    at: float
    """`time.monotonic()` when it arrived."""
    stored: str = ""
    """Time of the server when it was stored, in ISO format. Empty: not known."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message from one island to another."""

    sender: str


class Leave(Message, frozen=True):
    """Leave the run."""


class SnapshotWanted(Message, frozen=True):
    fragment: Count


class Snapshot(Message, frozen=True):
    fragment: Count
    version: Count
    head: str
    """Hash of the entry that made the version."""
    chunks: tuple[Chunk, ...] = ()
    problem: str = ""
    """Why there are no chunks."""


AnyMessage: TypeAlias = Leave | SnapshotWanted | Snapshot


class Inbox:
    """Records, messages and heartbeats that a connection has received.

    Only the connection's thread calls the methods that begin with `note_`. Only one thread at a
    time takes `records` and `messages` and calls `receive`: first the caller of `Leader.join`, then
    the leader's own thread. No lock is needed, as each attribute has one writer, which appends to
    it or replaces it as a whole.
    """

    def __init__(self, expiry: float, patience: float) -> None:
        self.members = Members(expiry, patience)
        """Heartbeats of the other islands."""
        self.records: deque[LogRecord] = deque()
        """Records not read yet."""
        self.messages: deque[SnapshotWanted | Snapshot] = deque()
        """Messages to this island not read yet."""
        self.leaving = False
        """This island was asked to leave the run."""
        self.received, self.newest = 0, ""
        """Sequence number and `digest` of the last record received."""
        self.first, self.last = 1, -1
        """Sequence numbers of the first and the last record in the log when the connection was
        made. `last` is 0 if the log is empty, and -1 without a connection."""
        self.problem = ""
        """Why there is no connection."""
        self.failure: UserError | None = None
        """Why there will be none again."""
        self.round_trip: float | None = None
        """Seconds to the server and back, as measured last."""
        self._away_since = math.inf
        self._news = threading.Event()

    def note_connection(self, first: int, last: int) -> None:
        """`first`, `last`: sequence numbers of the first and the last record in the log."""
        if self.problem:
            logger.info("the server of the islands is there again")
        self.problem, self._away_since = "", math.inf
        self.members.connect(time.monotonic())
        self.first = first
        self.last = last  # after this, `receive_log` may return

    def note_loss(self, reason: str) -> None:
        self._away_since = min(self._away_since, time.monotonic())
        self.members.disconnect()
        self.problem = reason
        logger.warning(f"no connection to the server of the islands: {reason}")
        self.wake()

    def note_failure(self, failure: UserError) -> None:
        self.failure = failure
        self.wake()

    def note_record(self, sequence: int, raw: bytes, stored: str = "") -> None:
        self.records.append(LogRecord(sequence, raw, time.monotonic(), stored))
        self.received, self.newest = sequence, digest(raw)
        self.wake()

    def note_message(self, message: Hint | AnyMessage) -> None:
        if isinstance(message, Hint):
            self.members.hear(message, time.monotonic())
        elif isinstance(message, Leave):
            logger.info("this island was asked to leave the run")
            self.leaving = True
        else:
            self.messages.append(message)
            self.wake()

    def receive(self, seconds: float = TICK) -> None:
        """Wait until something arrives, at most for this time. Raises `failure`."""
        self.members.tick(time.monotonic())
        self._news.wait(seconds)
        self._news.clear()  # before the caller reads, so that nothing is missed
        if self.failure is not None:
            raise self.failure
        self.members.tick(time.monotonic())

    def wake(self) -> None:
        """End a wait in `receive`. Any thread may call this."""
        self._news.set()

    def receive_log(self, patience: float = math.inf) -> None:
        """Wait for all records that the log had when the connection was made."""
        end = time.monotonic() + patience
        while self.last < 0 or self.received < self.last:
            self.receive()
            if time.monotonic() > end:
                raise UserError(f"the server does not send its log {self.problem}".strip())

    def seconds_away(self) -> float:
        """Return the time since the connection was lost, at most 0 if there is one."""
        return time.monotonic() - self._away_since
