"""Inbox of an island: records of the log, heartbeats and messages from the server."""

import math
import queue
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import Chunk
from torchtitan_diloco.utils import logger

TICK = 0.1
"""Seconds between two looks at the clock."""
LEAVE = b"leave"
"""Message that asks an island to leave the run."""


@dataclass(frozen=True)
class LogRecord:
    sequence: int
    raw: bytes


@dataclass(frozen=True)
class Asked:
    """A message of another island."""

    sender: str
    raw: bytes


@dataclass(frozen=True)
class Connected:
    last: int
    """Sequence number of the last record in the log at this moment."""


@dataclass(frozen=True)
class Disconnected:
    """There is no connection. It comes once more if a new attempt fails for another reason."""

    reason: str


Event: TypeAlias = LogRecord | Hint | Asked | Connected | Disconnected


class SnapshotWanted(msgspec.Struct, frozen=True, tag="snapshot wanted"):
    fragment: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    fragment: int
    version: int
    head: str
    """Hash of the entry that made the version."""
    chunks: tuple[Chunk, ...]


Message: TypeAlias = SnapshotWanted | Snapshot


class Inbox:
    """Events of the connection: records wait to be read, all others are handled as they come."""

    def __init__(
        self, events: "queue.SimpleQueue[Event]", members: Members, incarnation: str = ""
    ) -> None:
        self._events, self._members, self._incarnation = events, members, incarnation
        self.records: deque[LogRecord] = deque()
        self.messages: deque[tuple[str, Message]] = deque()
        """Messages of other islands, with their senders."""
        self.leaving = False
        """This island was asked to leave the run."""
        self.last = -1
        """Number of records in the log when the connection was made last."""
        self.received = 0
        """Number of the last record received."""
        self.problem = ""
        """Why there is no connection."""
        self._away_since = math.inf

    def receive(self, seconds: float = TICK) -> None:
        """Wait for an event, not longer than this, and handle all there are."""
        self._members.tick(time.monotonic())
        with suppress(queue.Empty):
            event = self._events.get(timeout=seconds)
            while True:
                self._handle(event)
                event = self._events.get_nowait()

    def seconds_away(self) -> float:
        """Return for how long there has been no connection, at most 0 if there is one."""
        return time.monotonic() - self._away_since

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case LogRecord():
                self.records.append(event)
                self.received = event.sequence
            case Hint() if event.incarnation != self._incarnation:
                self._members.hear(event, now)
            case Asked(_, raw) if raw == LEAVE:
                logger.info("this island was asked to leave the run")
                self.leaving = True
            case Asked(sender, raw):
                with suppress(msgspec.DecodeError):  # garbage
                    self.messages.append((sender, msgspec.msgpack.decode(raw, type=Message)))
            case Connected(last):
                if self.problem:
                    logger.info("the server of the islands is there again")
                self.last, self.problem, self._away_since = last, "", math.inf
                self._members.connect(now)
            case Disconnected(reason):
                self.problem, self._away_since = reason, min(self._away_since, now)
                self._members.connected = False
                logger.warning(f"no connection to the server of the islands: {reason}")
