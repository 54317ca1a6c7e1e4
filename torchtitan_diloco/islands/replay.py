"""Shared copies from the log: agree on the facts, get the copies, and compute each new version."""

import math
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.meeting import find_differences
from torchtitan_diloco.islands.connection import (
    Connection,
    CorruptError,
    GivenUpError,
    GoneError,
)
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.inbox import LogRecord, Snapshot, SnapshotWanted
from torchtitan_diloco.islands.log import Outcome, State
from torchtitan_diloco.islands.machine import RETRY, Machine
from torchtitan_diloco.islands.members import IslandFailedError, name_of
from torchtitan_diloco.islands.records import (
    LARGEST_NORM,
    AnotherLogError,
    AnyRecord,
    Close,
    Facts,
    Part,
    Take,
    VoidError,
    checksums_before,
    decode,
    encode,
)
from torchtitan_diloco.islands.rounds import Checked, Timing
from torchtitan_diloco.log import UserError, logger

NOTHING = torch.empty(0, dtype=torch.uint8)
ASK_SECONDS, SNAPSHOT_SECONDS = 10.0, 3600.0
"""Seconds after which an island is asked for a snapshot again, as a question or an answer may be
lost, and after which another island is asked. The wait for one that is gone ends earlier."""
HEAR_SECONDS = 3.0
"""Seconds in which every running island sends a heartbeat."""


@dataclass
class Saved:
    """Position in the log of a checkpoint, whose copies are already loaded."""

    run: str
    sequence: int
    digest: str
    heads: list[str]
    versions: list[int]


class Replay:
    """Reads the log and updates the copies to the newest versions."""

    def __init__(
        self, connection: Connection, copies: Copies, facts: Facts, timing: Timing, name: str
    ) -> None:
        """`facts`: facts of the run if this island is the first. `name`: the incarnation."""
        self._connection, self._copies, self._mine = connection, copies, facts
        self._members, lr = connection.members, copies.outer_lr
        self.checksums: list[dict[int, str]] = [{} for _ in copies.fragments]
        """Checksums of each fragment, by version."""
        self.changed = threading.Condition()
        """Guards the machine, and is notified after every change."""
        self.machine = Machine(name, self._members, timing, self._checksum, lr)
        self._fetched: dict[int, Future[tuple[Checked, Tensor]]] = {}
        """Waiting parts by sequence number, and their payloads."""
        self._wanted: Collection[int] = ()
        self._own: dict[int, tuple[Part, Tensor]] = {}
        """Latest own part of each fragment whose chunks are stored, and its payload."""
        self._fetcher = BackgroundThread("islands-fetch")
        self._loaded = False
        """Whether a snapshot has replaced version 0."""

    def replay(self, saved: Saved | None) -> Facts:
        """Connect, and read the whole log. Return the facts of the run."""
        self._connection.start(after=0, known=saved is not None)
        self._connection.receive_log()
        facts = self._read_facts(saved)
        self._begin(facts, saved)
        while self._connection.records:
            self._read(self._connection.records.popleft())
        return facts

    @property
    def state(self) -> State:
        return self.machine.state

    def _checksum(self, fragment: int, version: int) -> str:
        return self.checksums[fragment][version]

    # --- begin ------------------------------------------------------------------------------------

    def _read_facts(self, saved: Saved | None) -> Facts:
        """Return the facts of the run. Write them if there are none."""
        if saved is not None and saved.run == self._mine.run:
            self._check_log(saved)
        asked_at = -RETRY
        while not (found := [one for one in self._unread() if isinstance(one, Facts)]):
            if time.monotonic() - asked_at > RETRY:
                self._connection.append(encode(self._mine))
                asked_at = time.monotonic()
            self._connection.receive()
        facts = found[0]
        both = {"in the run": _flat(facts), "in this island": _flat(self._mine)}
        differences = find_differences(both)
        if differences:
            raise UserError(
                "this island does not fit the run: start it with the same settings, data and "
                "model:\n  " + "\n  ".join(differences)
            )
        for name in ("total_tokens", "slots", "begin", "quorum"):
            theirs, mine = (getattr(one, name) for one in (facts, self._mine))
            if theirs != mine:
                logger.warning(
                    f"the run has {name} = {theirs:,}, as its first island says, and not {mine:,}, "
                    "as the settings of this one do"
                )
        if facts.code != self._mine.code:
            logger.warning(
                "this island runs other code than the first one; it has the same protocol and "
                "arithmetic"
            )
        return facts

    def _check_log(self, saved: Saved) -> None:
        """Raise AnotherLogError if the checkpoint is not of this log.

        This must be known before the replay, which needs the checksums of the checkpoint's entries.
        """
        known, last = saved.sequence, self._connection.last
        if last < known:
            raise AnotherLogError(f"it has {last} records, and the island has read {known}")
        reader = State(None, known=(known, saved.digest))
        for record in islice(self._connection.records.copy(), known):
            reader.read(record.sequence, record.raw)

    def _begin(self, facts: Facts, saved: Saved | None) -> None:
        """Begin with saved copies, with version 0, or with snapshots of another island."""
        declare = partial(self._copies.run, self._copies.declare)
        if saved is not None and saved.run == facts.run:
            places = zip(saved.heads, saved.versions, strict=True)
            for fragment, (head, version) in enumerate(places):
                self._start_at(fragment, version, head, declare(fragment, version))
            return
        fits = self._mine.checksums == facts.checksums
        records = self._unread()
        if not fits or any(isinstance(record, Close) for record in records):
            if self._take_snapshots(records):
                return
            if self._loaded:
                raise IslandFailedError("the islands that gave their shared copies are gone")
            if not fits:
                raise UserError(
                    "the parameters of this island are others than those that the run began with, "
                    "and no island has answered with its own: start it with the same run.seed and "
                    "model.weights, or while another island is running"
                )
        for fragment in range(len(facts.checksums)):  # a loaded checkpoint may be of another run
            self._start_at(fragment, 0, "", declare(fragment, 0, True))

    def _unread(self) -> list[AnyRecord]:
        found = list[AnyRecord]()
        for record in self._connection.records.copy():  # others may arrive meanwhile
            with suppress(VoidError):
                found.append(decode(record.raw))
        return found

    def _start_at(self, fragment: int, version: int, head: str, checksum: str) -> None:
        """Set the checksums up to a version. `head`: hash of the entry that made it."""
        self.checksums[fragment].update(checksums_before(self._unread(), fragment, head))
        self.checksums[fragment][version] = checksum

    def _take_snapshots(self, records: list[AnyRecord]) -> bool:
        """Load all fragments from a running island. Return whether that succeeded."""
        takers = [record.incarnation for record in records if isinstance(record, Take)][::-1]
        until = time.monotonic() + HEAR_SECONDS
        while time.monotonic() < until and not any(map(self._members.has_caught_up, takers)):
            self._connection.receive()
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
        """Load a fragment from another island. Return the problem, or ""."""
        wanted = SnapshotWanted(sender=self.machine.incarnation, fragment=fragment)
        answer = self._wait_for_answer(donor, wanted)
        if answer is None:
            return "it does not answer"
        if answer.problem:
            return answer.problem
        try:
            content = join_bytes(self._connection.fetch(answer.chunks, "snapshots"))
        except (GoneError, CorruptError, GivenUpError) as error:
            return str(error)
        if content.numel() != self._copies.snapshot_bytes(fragment):
            return f"it has {content.numel()} bytes"
        self._loaded = True
        place = fragment, answer.version
        checksum = self._copies.run(self._copies.declare, *place, content=[content])
        self._start_at(fragment, answer.version, answer.head, checksum)
        return ""

    def _wait_for_answer(self, donor: str, wanted: SnapshotWanted) -> Snapshot | None:
        """Ask, and return the answer once the log has been received up to its entry."""
        begin, asked, answer = time.monotonic(), -math.inf, None
        fragment, messages = wanted.fragment, self._connection.messages
        while (now := time.monotonic()) < begin + SNAPSHOT_SECONDS:
            if answer is None and now > asked + ASK_SECONDS:
                if asked > 0:
                    logger.warning(f"waiting for the shared copy of fragment {fragment}")
                self._connection.ask(donor, wanted)
                asked = now
            self._connection.receive()
            while messages:
                message = messages.popleft()
                if isinstance(message, Snapshot) and message.sender == donor:
                    answer = message if message.fragment == fragment else answer
            if answer is not None:
                known = checksums_before(self._unread(), fragment, answer.head)
                if answer.problem or known.keys() == set(range(answer.version)):
                    return answer
            if self._members.is_gone(donor, time.monotonic()):
                break
        return None

    # --- records ----------------------------------------------------------------------------------

    def _read(self, record: LogRecord) -> Outcome:
        self._advance(record)
        with self.changed:
            outcome = self.machine.read(record.sequence, record.raw, time.monotonic())
            self._fetch_waiting()
            self.changed.notify_all()
        return outcome

    def _advance(self, record: LogRecord) -> None:
        """Compute the version of a valid close before the state reads it.

        The training thread then sees an entry only once its copy exists.
        """
        try:
            close = decode(record.raw)
        except VoidError:
            return
        entry = self.state.preview(close) if isinstance(close, Close) else None
        if entry is None or entry.close.version != self._copies.newest(entry.close.fragment) + 1:
            return
        close = entry.close
        named = zip(close.parts, entry.parts, strict=True)
        counted = [(part, self._payload(number)) for number, part in named if part.weight]
        self.checksums[close.fragment][close.version] = self._copies.run(
            self._copies.advance,
            close.fragment,
            close.version,
            close.lr,
            [part.weight for part, _ in counted],
            [part.ranks for part, _ in counted],
            self.machine.island is None,  # older versions will not be applied
            content=[payload for _, payload in counted],
        )

    # --- parts ------------------------------------------------------------------------------------

    def _fetch_waiting(self) -> None:
        """Fetch and check waiting parts in the background, and drop all others."""
        waiting = dict[int, Part]()
        for number, fragment in enumerate(self.state.fragments):
            if fragment.version >= self._copies.newest(number):  # else the copy contains them
                waiting |= fragment.waiting
        self._wanted = waiting.keys()
        for sequence in self._fetched.keys() - waiting.keys():
            del self._fetched[sequence]
        for sequence in waiting.keys() - self._fetched.keys():
            found = self._fetcher.submit(partial(self._fetch, sequence, waiting[sequence]))
            self._fetched[sequence] = found
            found.add_done_callback(lambda _: self._connection.wake())

    def _fetch(self, sequence: int, part: Part) -> tuple[Checked, Tensor]:
        wanted = sum(self._copies.payload_sizes(part.fragment, part.ranks)) if part.finite else 0
        if sum(chunk.size for chunk in part.chunks) != wanted:
            return Checked(f"its chunks do not have {wanted} bytes"), NOTHING
        if sequence not in self._wanted or not part.finite:
            return Checked(), NOTHING
        own, payload = self._own.get(part.fragment, (None, NOTHING))
        if own != part:
            try:
                payload = join_bytes(self._connection.fetch(part.chunks, "parts"))
            except (CorruptError, GoneError) as error:
                return Checked(str(error)), NOTHING
        norm = self._copies.norm(part.fragment, payload, part.ranks)
        if not norm <= LARGEST_NORM:  # or NaN
            return Checked("its values are not finite"), NOTHING
        return Checked(norm=norm), payload

    def _checked(self) -> dict[int, Checked]:
        """Return what was found in each fetched part."""
        done = [(sequence, one) for sequence, one in self._fetched.items() if one.done()]
        return {sequence: one.result()[0] for sequence, one in done if one.exception() is None}

    def _payload(self, sequence: int) -> Tensor:
        """Return the payload of a part in an entry."""
        checked, payload = self._fetched[sequence].result()
        if checked.reason:
            raise IslandFailedError(
                f"a part that the run has merged cannot be read: {checked.reason}; an island that "
                "is started again takes the shared copies of another one, if one is running"
            )
        return payload


def join_bytes(pieces: list[bytes]) -> Tensor:
    """Concatenate bytes into a tensor."""
    content = bytearray().join(pieces)
    return torch.frombuffer(content, dtype=torch.uint8) if content else NOTHING


def as_buffer(content: Tensor) -> memoryview:
    return memoryview(content.numpy().data).cast("B") if content.numel() else memoryview(b"")


def _flat(facts: Facts) -> dict[str, str]:
    return {**facts.fingerprints, "protocol": str(facts.protocol)}
