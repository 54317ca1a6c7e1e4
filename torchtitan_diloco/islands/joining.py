"""How an island gets the newest shared copies: from its checkpoint, or as snapshots from another.

An island that joins needs the state of the log and the copies. A checkpoint contains both. Without
a checkpoint, the state is one that another island has stored, and the copies are snapshots that it
creates on request, each at its own version. The records since then lead to the present state.
"""

import math
import time
from collections.abc import Iterator

import msgspec

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.diloco.agreement import find_differences
from torchtitan_diloco.islands.bulk import ChunkError
from torchtitan_diloco.islands.changes import CHANGEABLE, settings_of
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.machine import RETRY
from torchtitan_diloco.islands.members import IslandFailedError
from torchtitan_diloco.islands.parts import as_buffer, as_tensor
from torchtitan_diloco.islands.records import (
    AnyRecord,
    Facts,
    Snapshot,
    SnapshotWanted,
    VoidError,
    decode,
    encode,
    name_of,
)

STATE_EVERY = 1000
"""Number of records between two states that an island stores for readers of the log."""
ASK_SECONDS, SNAPSHOT_SECONDS = 10.0, 3600.0
"""Seconds after which an island is asked for a snapshot again, because a request or an answer may
be lost, and after which another island is asked. The wait for a silent island ends earlier."""
HEAR_SECONDS = 3.0
"""Seconds within which each running island sends a heartbeat."""


class StaleError(IslandFailedError):
    """The run cannot be continued with the copies in the checkpoint, but with those of another
    island."""


class Joiner:
    """Finds the state and the copies from which an island starts."""

    def __init__(
        self, connection: Connection, copies: Copies, facts: Facts, incarnation: str
    ) -> None:
        """`facts`: facts of the run if this island is the first."""
        self._connection, self._copies = connection, copies
        self._mine, self._incarnation = facts, incarnation

    def begin(self, saved: State | None) -> State:
        """Connect, load the copies, and return the state from which to read the log.

        `saved`: state of the log in this island's checkpoint, whose copies are loaded. Raises a
        StaleError if they are too old.
        """
        connection = self._connection
        if saved is not None and saved.run != self._mine.run:
            saved = None  # of another run: its copies are loaded, but its log is not this one
        connection.connect(known=saved is not None)
        if saved is not None and saved.sequence < connection.first - 1:
            raise StaleError("the log no longer reaches back to its checkpoint")
        state = saved or self._stored_state()
        from_first_record = not state.sequence
        connection.follow(state.sequence, state.newest)
        connection.receive_log()
        ahead = self._read_facts(state)
        assert ahead.facts is not None
        if any(ahead.facts.clocks):
            logger.info(
                f"the log starts at {max(ahead.facts.clocks):,} tokens, where another log ended"
            )
        begins, newest = (max(one.clocks, default=0) for one in (ahead.facts, self._mine))
        if newest > begins:
            logger.warning(
                f"this island's checkpoint has {newest:,} tokens, and the log "
                f"starts at {begins:,}, so the run does not use its model. To "
                "continue from its model, start a new log with this island first"
            )
        if saved is not None:
            self._declare_saved(state)
        elif self._begins_with(ahead.facts) and not any(one.version for one in ahead.fragments):
            self._declare_first(ahead.facts)
        elif not self._take_snapshots(state):
            if not from_first_record or not self._begins_with(ahead.facts):
                raise UserError(
                    "no island has sent the shared copies of the run, and the run "
                    "started with different ones than this island: start it while "
                    "another island is running. If none can be started, start a new "
                    f"log with `{command_line('islands')} serve` in a new folder: "
                    "it continues from the checkpoints"
                )
            self._declare_first(ahead.facts)  # and replay the whole log
        return state

    # --- the log ----------------------------------------------------------------------------------

    def _stored_state(self) -> State:
        """Return the latest state that an island has stored, or the state before the first record
        if the log is complete and short."""
        connection, state = self._connection, State()
        if connection.first <= 1 and connection.last < STATE_EVERY:
            return state
        try:
            state = State.decode(connection.newest_state() or b"{}")
        except msgspec.DecodeError as error:
            logger.warning(f"the stored state of the log cannot be read: {error}")
        if state.sequence >= connection.first - 1:
            return state
        raise UserError(
            "the log no longer reaches back to its first record, and no island has "
            "stored a state since: first start an island that has a checkpoint"
        )

    def _donors(self) -> Iterator[str]:
        """Yield the running islands that have caught up with the log, as their heartbeats
        arrive."""
        members, until = self._connection.members, time.monotonic() + HEAR_SECONDS
        known = set[str]()
        while True:
            found = set(filter(members.has_caught_up, members.heard.copy())) - known
            yield from sorted(found)
            known |= found
            if not found and time.monotonic() > until:
                return
            self._connection.receive()

    def _unread(self) -> list[AnyRecord]:
        found = list[AnyRecord]()
        for record in self._connection.records.copy():  # others may arrive meanwhile
            try:
                found.append(decode(record.raw))
            except VoidError:
                continue
        return found

    def _read_facts(self, state: State) -> State:
        """Return a state that is ahead, with the facts in force. Write the facts if there are
        none."""
        asked_at, void = -RETRY, State().read(1, encode(self._mine)).void
        while (ahead := self._look_ahead(state)).facts is None:
            if void:
                raise UserError(
                    f"no run can start with the settings of this island: {void} "
                    "(total_tokens, or training.steps times the tokens per step of "
                    "all islands that start together)"
                )
            if time.monotonic() - asked_at > RETRY:
                self._connection.append(encode(self._mine))
                asked_at = time.monotonic()
            self._connection.receive()
        check_facts(ahead.facts, self._mine)
        while state.facts is None:
            state.read(*self._connection.records.popleft()[:2])
        return ahead

    def _look_ahead(self, state: State) -> State:
        """Return the state after the records received, without a check of the copies' bits."""
        ahead = State.decode(state.encode())
        ahead.verifies = False
        for record in self._connection.records.copy():
            ahead.read(record.sequence, record.raw)
        return ahead

    def _begins_with(self, facts: Facts) -> bool:
        """Return whether the run starts from the loaded parameters. If it continues from a
        checkpoint, the momentum must be the same too."""
        same = facts.clocks == self._mine.clocks and facts.positions == self._mine.positions
        return same and facts.checksums == self._mine.checksums

    # --- copies -----------------------------------------------------------------------------------

    def _declare_saved(self, state: State) -> None:
        for number, fragment in enumerate(state.fragments):
            version = fragment.version
            checksum = self._copies.run(self._copies.declare, number, version)
            if checksum != fragment.checksums.get(version):
                raise StaleError(
                    f"fragment {number} of its checkpoint has different bits than when it was saved"
                )

    def _declare_first(self, facts: Facts) -> None:
        """Declare the loaded parameters to be version 0. Their momentum counts only if the run
        continues from a checkpoint."""
        for fragment in range(len(facts.checksums)):
            fresh = not any(facts.clocks)
            checksum = self._copies.run(self._copies.declare, fragment, 0, fresh)
            if checksum != facts.checksums[fragment]:
                raise IslandFailedError(
                    f"fragment {fragment} is in a snapshot of an island that is "
                    "gone: restart this island, and it replays the log"
                )

    def _take_snapshots(self, state: State) -> bool:
        """Load all fragments from a running island. Return whether that succeeded."""
        for donor in self._donors():
            logger.info(f"taking the shared copies from island {name_of(donor)}")
            problem = ""
            for fragment in range(len(self._mine.checksums)):
                problem = problem or self._take_snapshot(state, donor, fragment)
            if not problem:
                return True
            logger.warning(f"no snapshot of island {name_of(donor)}: {problem}")
        return False

    def _take_snapshot(self, state: State, donor: str, fragment: int) -> str:
        """Load a fragment from another island. Return the problem, or an empty string."""
        answer = self._ask(donor, fragment)
        if answer is None:
            return "it does not answer"
        if answer.problem:
            return answer.problem
        if answer.version < state.fragments[fragment].version:
            return "it is older than the stored state of the log"
        size = sum(chunk.size for chunk in answer.chunks)
        if size != self._copies.snapshot_bytes(fragment):
            return f"it has {size} bytes"
        try:
            content = as_tensor(self._connection.fetch(answer.chunks, "snapshots"))
        except ChunkError as error:
            return str(error)
        declare = self._copies.declare
        checksum = self._copies.run(declare, fragment, answer.version, content=[[content]])
        snapshot, until = (answer.version, answer.head, checksum), time.monotonic() + ASK_SECONDS
        while not state.adopt(fragment, snapshot, self._unread()):
            if time.monotonic() > until:
                return "it belongs to another log"
            self._connection.receive()  # its entry may arrive later
        return ""

    def _ask(self, donor: str, fragment: int) -> Snapshot | None:
        wanted = SnapshotWanted(sender=self._incarnation, fragment=fragment)
        begin, asked = time.monotonic(), -math.inf
        messages, members = self._connection.messages, self._connection.members
        while (now := time.monotonic()) < begin + SNAPSHOT_SECONDS:
            if now > asked + ASK_SECONDS:
                if asked > 0:
                    logger.warning(f"waiting for the shared copy of fragment {fragment}")
                self._connection.ask(donor, wanted)
                asked = now
            self._connection.receive()
            while messages:
                message = messages.popleft()
                place = message.sender, message.fragment
                if isinstance(message, Snapshot) and place == (donor, fragment):
                    return message
            if members.is_silent(donor, time.monotonic()):
                break
        return None


def check_facts(facts: Facts, mine: Facts) -> None:
    """Raise a UserError if this island does not fit the run. Warn about settings of the run."""
    both = {"in the run": facts, "in this island": mine}
    fixed = {
        who: {key: value for key, value in one.fingerprints.items() if key not in CHANGEABLE}
        | {"protocol": str(one.protocol)}
        for who, one in both.items()
    }
    if differences := find_differences(fixed):
        raise UserError(
            "this island differs from the run: start it with the same settings, data "
            "and model:\n  " + "\n  ".join(differences)
        )
    theirs, own = (settings_of(one) for one in (facts, mine))
    theirs |= {"slots": str(facts.slots), "begin": str(facts.begin)}
    own |= {"slots": str(mine.slots), "begin": str(mine.begin)}
    for key in (key for key in theirs if theirs[key] != own.get(key)):
        logger.warning(
            f"this island uses {key} = {theirs[key]}, as the run does, instead of "
            f"{own.get(key)} in its settings"
        )
    if facts.code != mine.code:
        logger.warning(
            "this island runs different code than the first one, with the same "
            "protocol and arithmetic"
        )


class Giver:
    """Stores states and snapshots in the background, and answers the islands that ask for them."""

    def __init__(self, connection: Connection, copies: Copies, incarnation: str) -> None:
        self._connection, self._copies, self._incarnation = connection, copies, incarnation
        self._answers: dict[SnapshotWanted, Snapshot | None] = {}
        """Answer to each request of the latest islands that join, None until it is known."""
        self._thread = BackgroundThread("islands-snapshots")

    def store_state(self, state: bytes) -> None:
        """Store a state for readers of the log."""

        def store() -> None:
            try:
                self._connection.store_state(state)
            except ChunkError as error:
                logger.warning(f"islands that join have to read more of the log: {error}")

        self._thread.submit(store)

    def give(self, wanted: SnapshotWanted, state: State) -> None:
        """Store a snapshot and answer. Repeat an answer, because it may be lost."""
        if wanted in self._answers:
            if answer := self._answers[wanted]:
                self._connection.ask(wanted.sender, answer)
            return
        members, now = self._connection.members, time.monotonic()
        for known, answer in self._answers.copy().items():
            if answer is not None and members.is_silent(known.sender, now):
                del self._answers[known]
        self._answers[wanted] = None
        content = self._copies.run(self._copies.collect, wanted.fragment)
        snapshot = Snapshot(
            sender=self._incarnation,
            fragment=wanted.fragment,
            version=self._copies.fragments[wanted.fragment].newest,
            head=state.fragments[wanted.fragment].head,
        )

        def store() -> None:
            try:
                chunks = self._connection.store(as_buffer(content), "snapshots")
                answer = msgspec.structs.replace(snapshot, chunks=chunks)
            except ChunkError as error:
                logger.warning(
                    "this island cannot send its shared copy of fragment "
                    f"{wanted.fragment} to island {name_of(wanted.sender)}: "
                    f"{error}"
                )
                answer = msgspec.structs.replace(snapshot, problem=str(error))
            self._answers[wanted] = answer
            self._connection.ask(wanted.sender, answer)

        self._thread.submit(store)

    def close(self) -> None:
        self._thread.close(timeout=1.0)
