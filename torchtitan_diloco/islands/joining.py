"""How an island begins: it reads the log, agrees on the facts, and gets the shared copies."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from torchtitan_diloco.islands.connection import Connection, CorruptError, GoneError
from torchtitan_diloco.islands.copies import Copies, Declare, Load
from torchtitan_diloco.islands.inbox import Inbox, Snapshot, SnapshotWanted
from torchtitan_diloco.islands.log import checksums_before
from torchtitan_diloco.islands.members import IslandFailedError, Members, name_of
from torchtitan_diloco.islands.parts import join_bytes
from torchtitan_diloco.islands.records import (
    AnyRecord,
    Close,
    Facts,
    Take,
    VoidError,
    decode,
    encode,
)
from torchtitan_diloco.utils import find_differences, logger

ASK_AGAIN = 0.5
SNAPSHOT_SECONDS = 3600.0
"""Seconds without an answer after which another island is asked for a snapshot. One that is gone is
not waited for."""
HEAR_SECONDS = 3.0
"""Seconds in which every island that is alive has sent a heartbeat."""


@dataclass
class Saved:
    """Facts of a checkpoint about the log. Its copies are loaded already."""

    run: str
    sequence: int
    digest: str
    heads: list[str]
    versions: list[int]


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
        asked_at = -ASK_AGAIN
        while not (found := [one for one in self._records() if isinstance(one, Facts)]):
            if time.monotonic() - asked_at > ASK_AGAIN:
                self._connection.append(encode(self._mine))
                asked_at = time.monotonic()
            self._inbox.receive()
        facts = found[0]
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
            places = zip(saved.heads, saved.versions, strict=True)
            for fragment, (head, version) in enumerate(places):
                job = Declare(fragment=fragment, version=version)
                self._start_at(fragment, version, head, self._copies.run(job))
            return saved.sequence, saved.digest
        records = self._records()
        if not fits or any(isinstance(record, Close) for record in records):
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

    def _records(self) -> list[AnyRecord]:
        found = list[AnyRecord]()
        for record in self._inbox.records:
            with suppress(VoidError):
                found.append(decode(record.raw))
        return found

    def _start_at(self, fragment: int, version: int, head: str, checksum: str) -> None:
        self.checksums[fragment].update(checksums_before(self._records(), fragment, head))
        self.checksums[fragment][version] = checksum

    # --- snapshots --------------------------------------------------------------------------------

    def _take_snapshots(self, records: Sequence[AnyRecord]) -> bool:
        """Load all fragments from an island that is running; return whether there is one."""
        takers = [record.incarnation for record in records if isinstance(record, Take)][::-1]
        until = time.monotonic() + HEAR_SECONDS
        while time.monotonic() < until and not any(map(self._members.has_caught_up, takers)):
            self._inbox.receive()
        for donor in filter(self._members.has_caught_up, takers):
            logger.info(f"taking the shared copies from island {name_of(donor)}")
            problem = ""
            for fragment in range(len(self.checksums)):
                problem = problem or self._take_snapshot(donor, fragment)
            if not problem:
                return True
            logger.warning(f"no snapshot of island {name_of(donor)}: {problem}")
        return False

    def _take_snapshot(self, donor: str, fragment: int) -> str:
        """Load a fragment from another island; return what is wrong, if anything."""
        self._connection.ask(donor, msgspec.msgpack.encode(SnapshotWanted(fragment)))
        answer = self._wait_for_answer(donor, fragment)
        if answer is None:
            return "it does not answer"
        try:
            content = join_bytes(self._connection.fetch(answer.chunks, "snapshots"))
        except (GoneError, CorruptError) as error:
            return str(error)
        if content.numel() != self._copies.snapshot_bytes(fragment):
            return f"it has {content.numel()} bytes"
        self._loaded = True
        job = Load(fragment=fragment, version=answer.version)
        self._start_at(fragment, answer.version, answer.head, self._copies.run(job, content))
        return ""

    def _wait_for_answer(self, donor: str, fragment: int) -> Snapshot | None:
        """Return the answer once the log has been received up to the entry that it is of."""
        until, answer = time.monotonic() + SNAPSHOT_SECONDS, None
        while time.monotonic() < until:
            self._inbox.receive()
            while self._inbox.messages:
                sender, message = self._inbox.messages.popleft()
                mine = isinstance(message, Snapshot) and message.fragment == fragment
                answer = message if mine and sender == donor else answer
            if isinstance(answer, Snapshot):
                if not answer.version or checksums_before(self._records(), fragment, answer.head):
                    return answer
            elif self._members.is_gone(donor, time.monotonic()):
                break
        return None


def _flat(facts: Facts) -> dict[str, str]:
    return {**facts.fingerprints, "slots": str(facts.slots), "begin": str(facts.begin)}
