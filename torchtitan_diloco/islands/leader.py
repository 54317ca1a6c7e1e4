"""First rank of an island: it reads the log, keeps the shared copies up to date, and decides.

`join` takes a slot. From then on a thread handles what comes in, in order.
"""

import threading
import time
from functools import partial

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.islands.connection import ClosedError, Connection
from torchtitan_diloco.islands.copies import Advance, Collect, Copies, Save, Stop
from torchtitan_diloco.islands.inbox import Inbox, LogRecord, Snapshot, SnapshotWanted
from torchtitan_diloco.islands.joining import Joining, Saved
from torchtitan_diloco.islands.log import Entry, Outcome, State
from torchtitan_diloco.islands.members import Hint, IslandFencedError, Members, name_of
from torchtitan_diloco.islands.parts import Parts, as_buffer
from torchtitan_diloco.islands.records import (
    Close,
    Facts,
    Part,
    Record,
    Take,
    VoidError,
    attempt_of,
    decode,
    encode,
)
from torchtitan_diloco.islands.rules import Island, Timing
from torchtitan_diloco.utils import logger

BEAT, RETRY, REPORT = 0.5, 0.5, 10.0
"""Seconds between heartbeats, attempts to append a record, and lines about waiting."""
EXPIRY = 5.0
"""Seconds of silence after which an island counts as gone."""
AWAY = 10.0
"""Seconds without a connection after which an island that leaves does not wait for it."""


class Leader:
    def __init__(
        self,
        connection: Connection,
        copies: Copies,
        facts: Facts,
        timing: Timing,
        *,
        incarnation: str,
    ) -> None:
        """`facts`: those of the run, if this island is the first."""
        self._connection, self._copies = connection, copies
        self._timing, self.incarnation = timing, incarnation
        self._members = Members(EXPIRY)
        self._inbox = Inbox(connection.events, self._members, incarnation)
        self._joining = Joining(connection, self._inbox, self._members, copies, facts)
        self._checksums = self._joining.checksums
        self.changed = threading.Condition()
        """Guards the state; it is notified after every change."""
        self.state = State(self._checksum)
        self.island: Island | None = None
        self._parts = Parts(connection, copies, self._react_to_parts)
        self._attempts: dict[tuple[object, ...], float] = {}
        """When each record was appended last."""
        self._reported = 0.0
        self._failure: Exception | None = None
        self._giver = BackgroundThread("islands-snapshots")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="islands", daemon=True)
        self._beats = threading.Thread(target=self._beat, name="islands-beat", daemon=True)

    # --- join -------------------------------------------------------------------------------------

    def replay(self, saved: Saved | None) -> Facts:
        """Connect, and read the log as it is. Return the facts of the run."""
        self._connection.start(after=0, known=saved is not None)
        self._beats.start()
        facts = self._joining.read_facts(saved)
        self.state = State(self._checksum, self._joining.begin(facts, saved))
        self._read_records()
        return facts

    def join(self, saved: Saved | None) -> None:
        """Catch up with the log, take a slot, and wait until the run has begun."""
        facts = self.replay(saved)
        slot = self._take_slot(facts)
        while not self.state.begun:
            here = ", ".join(map(name_of, self.state.owners().values()))
            self._report(f"waiting until {facts.begin} islands are there; here are {here}")
            self._work()
        now = time.monotonic()
        self.island = Island(self.state, self._members, slot, self._timing, now=now)
        self._thread.start()

    def _take_slot(self, facts: Facts) -> int:
        """Take a free slot, or that of an earlier start of this island."""
        while True:
            now = time.monotonic()
            for slot, owner in self.state.owners().items():
                if owner == self.incarnation:
                    return slot
            if self.state.ended:
                raise ValueError("the run has ended: there is nothing to join")
            found = self._members.slot_to_take(self.state, self.incarnation, now)
            if found is not None:
                slot, replaces = found
                who = {"run": facts.run, "incarnation": self.incarnation}
                self._attempt(Take(**who, slot=slot, replaces=replaces))
            elif not self._members.is_new(now):
                self._report(f"waiting for a free slot: all {facts.slots} have an owner")
            self._work()

    def _report(self, line: str) -> None:
        if time.monotonic() - self._reported > REPORT:
            self._reported = time.monotonic()
            logger.info(line)

    # --- the training thread ----------------------------------------------------------------------

    @property
    def joined(self) -> Island:
        assert self.island is not None, "join() comes first"
        return self.island

    def begin_part(self, fragment: int) -> Part:
        """Return the part to send now. The lock is held."""
        rounds = self.joined.rounds[fragment]
        checksum = self._checksum(fragment, rounds.applied)
        part = rounds.send(checksum, time.monotonic())
        # At once: an opening counts from the step at which it is made.
        self._attempt(rounds.open())
        return part

    def store(self, part: Part, payload: Tensor) -> int:
        """Store the chunks of an own part, and have it appended. Return the bytes sent."""
        self._parts.store(part, payload)
        self._react_to_parts()
        return payload.numel() if part.finite else 0

    @property
    def leaving(self) -> bool:
        """Whether this island was asked to leave the run."""
        return self._inbox.leaving

    def is_over(self) -> bool:
        """Return whether a stopped island has nothing more to do. The lock is held."""
        if any(rounds.unapplied for rounds in self.joined.rounds):
            return False
        if self.joined.leaving and self._inbox.seconds_away() > AWAY:
            logger.warning(
                "left without a connection: the work since the last part is not sent, and its "
                "samples are read again by the next owner of the slot"
            )
            return True
        return self.state.ended or self.joined.left

    def check(self) -> None:
        """Raise what has failed in the thread."""
        if self._failure is not None:
            raise self._failure

    def to_save(self) -> Saved:
        """Return what a checkpoint with the newest copies needs to know of the log."""
        assert self.state.facts is not None
        heads = [one.head for one in self.state.fragments]
        versions = [one.newest for one in self._copies.fragments]
        place = self.state.sequence, self.state.digest
        return Saved(self.state.facts.run, *place, heads, versions)

    def close(self) -> None:
        self._closed.set()
        self._connection.close()
        if self._thread.is_alive():
            self._thread.join()
        self._copies.run(Stop())
        self._parts.close()
        self._giver.close(timeout=1.0)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._copies.threads)
        try:
            while not self._closed.is_set():
                self._work()
        except ClosedError:
            pass
        except Exception as error:  # raised again in the training thread
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    def _work(self) -> None:
        """Handle what has come in, or wait for a moment, and do what is due."""
        if self._closed.is_set():
            raise ClosedError("the island was closed")
        self._inbox.receive()
        self._read_records()
        while self._inbox.messages:
            self._answer(*self._inbox.messages.popleft())
        while not self._copies.saves.empty():
            self._copies.run(Save())
        with self.changed:
            now = time.monotonic()
            self._members.tick(now)
            for text in [] if self.island is None else self.island.settle_disputes(now):
                logger.warning(f"{text}; another island has those of this one")
            self._react()

    def _beat(self) -> None:
        """Tell the others of this island, in a thread of its own: the other one may be busy."""
        while not self._closed.wait(BEAT):
            island = self.island
            self._connection.beat(
                Hint(
                    self.incarnation,
                    island.step if island else 0,
                    island.tokens if island else 0,
                    island.step_seconds if island else 0.0,
                    caught_up=self.state.sequence >= self._inbox.last,
                    leaving=island.leaving if island else False,
                )
            )

    def _answer(self, sender: str, message: object) -> None:
        if isinstance(message, SnapshotWanted) and message.fragment < len(self._checksums):
            fragment = message.fragment
            self._copies.run(Collect(fragment=fragment))
            copy, head = self._copies.fragments[fragment], self.state.fragments[fragment].head
            snapshot = Snapshot(fragment, copy.newest, head, ())
            whole, self._copies.collected = self._copies.collected, torch.empty(0)
            self._giver.submit(partial(self._give, sender, snapshot, whole))

    def _give(self, to: str, snapshot: Snapshot, content: Tensor) -> None:
        chunks = self._connection.store(as_buffer(content), "snapshots")
        snapshot = msgspec.structs.replace(snapshot, chunks=chunks)
        self._connection.ask(to, msgspec.msgpack.encode(snapshot))

    # --- records ----------------------------------------------------------------------------------

    def _checksum(self, fragment: int, version: int) -> str:
        return self._checksums[fragment][version]

    def _read_records(self) -> None:
        while self._inbox.records:
            self._read(self._inbox.records.popleft())

    def _read(self, record: LogRecord) -> None:
        if self.island is not None and self.island.left:
            return  # nothing that follows concerns it
        self._advance(record)
        now, island = time.monotonic(), self.island
        with self.changed:
            self._members.tick(now)
            read = self.state.read if island is None else partial(island.read, now=now)
            outcome: Outcome = read(record.sequence, record.raw)
            if island is not None:
                self._notice(island, outcome)
            self._fetch_waiting()
            self.changed.notify_all()

    def _notice(self, island: Island, outcome: Outcome) -> None:
        """Log what concerns people, and notice that this island has lost its slot."""
        if outcome.entry is not None:
            log_left_out(outcome.entry)
        if island.fenced and not island.left:
            self._failure = IslandFencedError(
                f"slot {island.slot} of this island was taken by "
                f"{self.state.slots[island.slot].owner}: it ends; what it has done since its last "
                "part is not in the run"
            )

    def _fetch_waiting(self) -> None:
        """Fetch the parts that wait, but no parts of rounds that the copies contain already."""
        waiting = dict[int, Part]()
        for fragment, copy in zip(self.state.fragments, self._copies.fragments, strict=False):
            if fragment.version >= copy.newest:
                waiting |= fragment.waiting
        self._parts.fetch(waiting)

    def _advance(self, record: LogRecord) -> None:
        """Make the version of a close that is valid, before the state knows of it.

        So the training thread sees an entry only when its copy is there.
        """
        try:
            close = decode(record.raw)
        except VoidError:
            return
        entry = self.state.preview(close) if isinstance(close, Close) else None
        if entry is None:
            return
        close, copy = entry.close, self._copies.fragments[entry.close.fragment]
        if close.version != copy.newest + 1:
            return
        named = zip(close.parts, entry.parts, strict=True)
        counted = [(part, self._parts.payload(number)) for number, part in named if part.weight]
        job = Advance(
            fragment=close.fragment,
            version=close.version,
            lr=close.lr,
            weights=[part.weight for part, _ in counted],
            ranks=[part.ranks for part, _ in counted],
            only_newest=self.island is None,
        )
        content = torch.cat([torch.empty(0, dtype=torch.uint8), *(one for _, one in counted)])
        self._checksums[close.fragment][close.version] = self._copies.run(job, content)

    # --- decisions --------------------------------------------------------------------------------

    def _react_to_parts(self) -> None:
        with self.changed:
            self._react()

    def _react(self) -> None:
        """Append what is due. The lock is held."""
        island, now = self.island, time.monotonic()
        if island is None or island.fenced or self.state.ended:
            return
        checked = self._parts.checked()
        for fragment, rounds in enumerate(island.rounds):
            self._attempt(rounds.open())
            self._attempt(rounds.close(checked, self._copies.outer_lr, now))
            if fragment in self._parts.stored and rounds.under_way:
                self._attempt(self._parts.stored[fragment][0])
        self._attempt(island.last_record(now))

    def _attempt(self, record: Record | None) -> None:
        """Append a record, and not again for a while: whether it counts shows in the log."""
        if record is not None:
            now, attempt = time.monotonic(), attempt_of(record)
            self._attempts = {one: at for one, at in self._attempts.items() if now < at + RETRY}
            if attempt not in self._attempts:
                self._attempts[attempt] = now
                self._connection.append(encode(record))


def log_left_out(entry: Entry) -> None:
    where = f"fragment {entry.close.fragment}, version {entry.close.version}"
    for refusal in entry.close.refused:
        logger.warning(f"{where}: record {refusal.part} was left out: {refusal.reason}")
    for part in entry.parts:
        if not part.finite:
            logger.warning(
                f"{where}: the delta of island {name_of(part.incarnation)} is not finite or far "
                "beyond its usual norm; it is left out, and the island takes the shared parameters"
            )
