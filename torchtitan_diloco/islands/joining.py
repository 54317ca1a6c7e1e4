"""How an island begins: it reads the log, agrees on the facts, and gets the shared copies."""

import math
import queue
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from torchtitan_diloco.islands.connection import Connection, CorruptError, GoneError
from torchtitan_diloco.islands.copies import Copies, Declare, Load
from torchtitan_diloco.islands.events import LEAVE, Asked, Connected, Disconnected, Heard, LogRecord
from torchtitan_diloco.islands.log import checksums_before
from torchtitan_diloco.islands.members import IslandFailedError, Members, name_of
from torchtitan_diloco.islands.parts import join_bytes
from torchtitan_diloco.islands.records import (
    AnyRecord,
    Chunk,
    Close,
    Facts,
    Take,
    VoidError,
    decode,
    digest,
    encode,
    subject_of,
)
from torchtitan_diloco.islands.restart import Saved
from torchtitan_diloco.utils import find_differences, logger

TICK = 0.1
"""Seconds between two looks at the clock."""
ASK_AGAIN = 0.5
SNAPSHOT_SECONDS = 3600.0
"""Seconds without an answer after which another island is asked for a snapshot. One that is gone is
not waited for."""
HEAR_SECONDS = 3.0
"""Seconds in which every island that is alive has sent a heartbeat."""


class SnapshotWanted(msgspec.Struct, frozen=True, tag="snapshot wanted"):
    fragment: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    fragment: int
    version: int
    head: str
    """Hash of the entry that made the version."""
    rounds: int
    chunks: tuple[Chunk, ...]


Message: TypeAlias = SnapshotWanted | Snapshot


class Inbox:
    """Events of the connection: records wait to be read, all others are handled as they come."""

    def __init__(self, connection: Connection, members: Members, incarnation: str) -> None:
        self._connection, self._members, self._incarnation = connection, members, incarnation
        self.records: deque[LogRecord] = deque()
        self.messages: deque[tuple[str, Message]] = deque()
        """Messages of other islands, with their senders."""
        self.leaving = False
        """This island was asked to leave the run."""
        self.last = -1
        """Number of records in the log when the connection was made last."""
        self._away_since = math.inf
        self.received = 0
        """Number of the last record received."""

    def receive(self, seconds: float = TICK) -> None:
        """Wait for an event, not longer than this, and handle all there are."""
        self._members.tick(time.monotonic())
        with suppress(queue.Empty):
            event = self._connection.events.get(timeout=seconds)
            while True:
                self._handle(event)
                event = self._connection.events.get_nowait()

    def seconds_away(self) -> float:
        """Return for how long there has been no connection, at most 0 if there is one."""
        return time.monotonic() - self._away_since

    def _handle(self, event: object) -> None:
        now = time.monotonic()
        match event:
            case LogRecord():
                self.records.append(event)
                self.received = event.sequence
            case Heard(hint) if hint.incarnation != self._incarnation:
                self._members.hear(hint.incarnation, hint.step, hint.caught_up, now)
            case Asked(_, raw) if raw == LEAVE:
                logger.info("this island was asked to leave the run")
                self.leaving = True
            case Asked(sender, raw):
                with suppress(msgspec.DecodeError):  # garbage
                    self.messages.append((sender, msgspec.msgpack.decode(raw, type=Message)))
            case Connected(last):
                if self.last >= 0:
                    logger.info("the server of the islands is there again")
                self.last = last
                self._away_since = math.inf
                self._members.connect(now)
            case Disconnected(reason):
                self._members.connected = False
                self._away_since = min(self._away_since, now)
                logger.warning(f"no connection to the server of the islands: {reason}")


class Joining:
    """Reads the log as it is now, and prepares the copies to begin with."""

    def __init__(
        self, connection: Connection, inbox: Inbox, members: Members, copies: Copies, facts: Facts
    ) -> None:
        """`facts`: those of the run, if this island is the first."""
        self._connection, self._inbox, self._members = connection, inbox, members
        self._copies, self._mine = copies, facts
        self.checksums: list[dict[int, str]] = [{} for _ in copies.fragments]
        """Checksums of each fragment, by version."""
        self._loaded = False
        """Snapshots were loaded: version 0 is not there any more."""

    def read_facts(self, saved: Saved | None) -> Facts:
        """Return the facts of the run, written by this island if there are none."""
        while self._inbox.last < 0 or self._inbox.received < self._inbox.last:
            self._inbox.receive()
        if saved is not None and saved.run == self._mine.run and self._inbox.last < saved.sequence:
            raise ValueError(
                f"the log of the run has {self._inbox.last} records, and the checkpoint of this "
                f"island knows {saved.sequence}: it was truncated or made anew; restore the "
                "server's folder, or begin a new run with `serve` in an empty folder"
            )
        raw, asked_at = encode(self._mine), -ASK_AGAIN
        while (facts := self._first_facts()) is None:
            if time.monotonic() - asked_at > ASK_AGAIN:
                self._connection.append(subject_of(self._mine), raw)
                asked_at = time.monotonic()
            self._inbox.receive()
        if facts.total_tokens != self._mine.total_tokens:
            logger.warning(
                f"the run has {facts.total_tokens:,} tokens, as its first island says, and not "
                f"{self._mine.total_tokens:,}, as the settings of this one do"
            )
        differences = find_differences([_flat(facts), _flat(self._mine)], "side")
        if differences:
            raise ValueError(
                "this island (side 1) does not fit the run that it joins (side 0): start it with "
                "the same settings, code, data and model:\n  " + "\n  ".join(differences)
            )
        return facts

    def begin(self, facts: Facts, saved: Saved | None) -> tuple[int, str] | None:
        """Begin with saved copies, with version 0, or with snapshots of another island.

        Return what `State` has to know of the log.
        """
        fits = self._mine.checksums == facts.checksums
        if saved is not None and saved.run == facts.run:
            for fragment, head in enumerate(saved.heads):
                version = saved.versions[fragment]
                job = Declare(fragment=fragment, version=version, rounds=saved.rounds[fragment])
                self._start_at(fragment, version, head, self._copies.run(job))
            return saved.sequence, saved.digest
        records = self._records()
        begun = any(isinstance(record, Close) for record in records)
        if begun or not fits:
            if self._take_snapshots(records):
                return None
            if self._loaded:
                raise IslandFailedError("the islands that gave their shared copies are gone")
            if not fits:
                raise ValueError(
                    "the parameters of this island are others than those that the run began with, "
                    "and no island has answered with its own: start it with the same run.seed and "
                    "model.weights, or while another island is running"
                )
        for fragment, checksum in enumerate(facts.checksums):
            self._copies.run(Declare(fragment=fragment, fresh=True))
            self.checksums[fragment][0] = checksum
        return None

    def _first_facts(self) -> Facts | None:
        return next((one for one in self._records() if isinstance(one, Facts)), None)

    def _records(self) -> list[AnyRecord | None]:
        found = list[AnyRecord | None]()
        for record in self._inbox.records:
            with suppress(VoidError):
                found.append(decode(record.raw))
        return found

    def _start_at(self, fragment: int, version: int, head: str, checksum: str) -> None:
        self.checksums[fragment].update(checksums_before(self._records(), fragment, head))
        self.checksums[fragment][version] = checksum

    # --- snapshots --------------------------------------------------------------------------------

    def _take_snapshots(self, records: Sequence[AnyRecord | None]) -> bool:
        """Load all fragments from an island that is running; return whether there is one."""
        until = time.monotonic() + HEAR_SECONDS
        takes = [record.incarnation for record in records if isinstance(record, Take)]
        while time.monotonic() < until and not self._donors(takes):
            self._inbox.receive()
        for donor in self._donors(takes):
            logger.info(f"taking the shared copies from island {name_of(donor)}")
            if all(self._take_snapshot(donor, one) for one in range(len(self.checksums))):
                return True
        return False

    def _donors(self, takes: list[str]) -> list[str]:
        return [name for name in takes[::-1] if self._members.has_caught_up(name)]

    def _take_snapshot(self, donor: str, fragment: int) -> bool:
        self._connection.ask(donor, msgspec.msgpack.encode(SnapshotWanted(fragment)))
        answer = self._wait_for_answer(donor, fragment)
        if answer is None:
            logger.warning(f"island {name_of(donor)} does not answer with a snapshot")
            return False
        try:
            content = join_bytes(self._connection.fetch(answer.chunks, "snapshots"))
        except (GoneError, CorruptError) as error:
            logger.warning(f"the snapshot of island {name_of(donor)} cannot be used: {error}")
            return False
        if content.numel() != self._copies.snapshot_bytes(fragment):
            logger.warning(f"the snapshot of island {name_of(donor)} has another size")
            return False
        self._loaded = True
        job = Load(fragment=fragment, version=answer.version, rounds=answer.rounds)
        self._start_at(fragment, answer.version, answer.head, self._copies.run(job, content))
        return True

    def _wait_for_answer(self, donor: str, fragment: int) -> Snapshot | None:
        """Return the answer once the log has been received up to the entry that it is of."""
        until, answer = time.monotonic() + SNAPSHOT_SECONDS, None
        while time.monotonic() < until:
            self._inbox.receive()
            while self._inbox.messages:
                sender, message = self._inbox.messages.popleft()
                mine = isinstance(message, Snapshot) and message.fragment == fragment
                answer = message if mine and sender == donor else answer
            if isinstance(answer, Snapshot) and (not answer.version or self._has(answer.head)):
                return answer
            if answer is None and self._members.is_gone(donor, time.monotonic()):
                break
        return None

    def _has(self, head: str) -> bool:
        closes = [one for one in self._records() if isinstance(one, Close)]
        return any(digest(encode(close)) == head for close in closes)


def _flat(facts: Facts) -> dict[str, str]:
    numbers = {name: str(getattr(facts, name)) for name in ("slots", "begin")}
    return dict(facts.fingerprints) | numbers
