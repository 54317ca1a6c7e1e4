"""First rank of an island: threads around its `Machine`.

After `join` has taken a slot, a thread reads incoming records in order, computes the new versions,
and appends what is due. Between two steps, the training thread asks for what to send and apply.
"""

import math
import threading
import time

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.base.background import ENCODING_THREADS
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.diloco.vitals import STUCK, Action, Report
from torchtitan_diloco.diloco.witness import STILL_RATIO, STILL_SECONDS
from torchtitan_diloco.islands.bulk import CHUNK_BYTES, UNDER_WAY, ClosedError
from torchtitan_diloco.islands.connection import Connection, LogRecord
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.joining import STATE_EVERY, Giver, Joiner, StaleError
from torchtitan_diloco.islands.ledger import Boundary
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.machine import Machine
from torchtitan_diloco.islands.members import Gauges, IslandFailedError
from torchtitan_diloco.islands.parts import PartGoneError, Parts, as_buffer
from torchtitan_diloco.islands.records import (
    Close,
    Facts,
    Part,
    SnapshotWanted,
    VoidError,
    decode,
    encode,
    name_of,
)
from torchtitan_diloco.islands.rounds import Timing

BEAT, REPORT = 0.5, 10.0
"""Seconds between heartbeats, and between log messages about waiting."""
LOOK = 0.1
"""Longest single wait of training, because the connection may be lost in the meantime."""


class Seat(msgspec.Struct, frozen=True):
    """Position of an island in the run."""

    slot: int
    slots: int
    streams: int
    block: int
    position: int
    """First sample of the slot for this island."""
    total_tokens: int
    """Length of the run, as set by its first island."""
    clock: int
    versions: list[int]
    """Versions of the fragments from which the island starts."""


class Leader:
    """Reads and writes the log for an island.

    After `join`, its thread reads records and computes new versions (`_work`). The upload thread
    calls `store`, and the training thread all other public methods. All three hold the lock of
    `changed` to use the machine. A version is computed before the state has its entry, without the
    lock, so that training can continue.
    """

    def __init__(
        self,
        connection: Connection,
        copies: Copies,
        facts: Facts,
        timing: Timing,
        name: str,
        gauges: Gauges,
    ) -> None:
        """`facts`: facts of the run if this island is the first. `name`: the incarnation."""
        self._connection, self._copies = connection, copies
        self._joiner = Joiner(connection, copies, facts, name)
        self._parts = Parts(connection, copies, gauges)
        self.changed = threading.Condition()
        """Guards the machine, and is notified after every change."""
        self.machine = Machine(name, connection.members, timing, ranks=copies.ranks.size)
        self._giver, self._gauges = Giver(connection, copies, name), gauges
        self._reported = 0.0
        self._uploads = math.inf, 0
        """Start time, and number of bytes."""
        self._is_reading = False
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="islands", daemon=True)
        self._beats = threading.Thread(target=self._beat, name="islands-beat", daemon=True)

    @property
    def state(self) -> State:
        return self.machine.state

    # --- join -------------------------------------------------------------------------------------

    def join(self, saved: State | None) -> Seat:
        """Get the newest copies, take a slot, and wait for the run to start.

        `saved`: state of the log in this island's checkpoint, whose copies are loaded. Raises a
        StaleError if they are too old, or if their bits differ from most islands.
        """
        machine = self.machine
        try:
            self.catch_up(saved)
            # Before its first record: the others call an owner silent that they have not heard.
            self._connection.beat(machine.hint(caught_up=False))
            self._beats.start()
            while not machine.joined:
                self._work()
                if machine.others.disputes.is_outvoted(time.monotonic()):
                    raise StaleError("its checkpoint has different bits than most islands")
                self._say_what_it_waits_for()
        except PartGoneError as error:
            raise StaleError(
                f"the server no longer has the parts since its checkpoint: {error}"
            ) from error
        facts = machine.facts
        self._thread.start()
        return Seat(
            slot=machine.slot,
            slots=facts.slots,
            streams=facts.streams or facts.slots,
            block=facts.block,
            position=machine.position,
            total_tokens=facts.total_tokens,
            clock=machine.clock,
            versions=[rounds.applied for rounds in machine.rounds],
        )

    def catch_up(self, saved: State | None) -> None:
        """Get the newest copies, without taking part in the run."""
        self.machine.begin(self._joiner.begin(saved))
        self._parts.fetch_waiting(self.state)  # the first record may merge them
        while self._connection.records:
            self._read(self._connection.records.popleft())

    def _say_what_it_waits_for(self) -> None:
        machine, now = self.machine, time.monotonic()
        text = machine.members.waits_for(machine.state, machine.incarnation, now)
        if text and not machine.joined and now - self._reported > REPORT:
            # A warning is shown without logging set-up.
            (logger.warning if self._reported else logger.info)(text)
            self._reported = now

    # --- the training thread ----------------------------------------------------------------------

    def finish_step(self, samples: int, weight: int, seconds: float) -> None:
        with self.changed:
            leaving = self._connection.leaving
            self.machine.finish_step(samples, weight, seconds, leaving=leaving)
            self._gauges.finish_step(self.machine.tokens, time.monotonic())

    def stop(self) -> None:
        with self.changed:
            if self.machine.joined:
                self.machine.stop()

    def decide(self) -> Boundary:
        """Return what is due between two steps, after waiting for entries if the rules say so."""
        started, waited = time.monotonic(), False
        with self.changed:
            while True:
                now = time.monotonic()
                due = self.machine.boundary(now, self._connection.seconds_away())
                if due.applied or due.sent or due.waits_until is None:
                    break
                if now - started > STILL_SECONDS:  # the caller says who is missing, and asks again
                    break
                self.check()
                waited = True
                self.changed.wait(min(due.waits_until - now, LOOK))
            self._react()  # at once, as the step of an opening counts
        self._gauges.waited += waited * (now - started)
        if waited and due.applied:
            due.applied[0].waited = now - started
        return due

    def describe_wait(self) -> str:
        """Describe what training waits for."""
        unread, rate = len(self._connection.records), self._gauges.download_bytes_per_second
        if not unread and not self._is_reading:
            return "a round: `islands status` shows which islands have not sent a part yet"
        speed = f", whose parts arrive at {1e-06 * rate:.3g} MB/s" if rate else ""
        return f"{unread + self._is_reading} records of the log{speed}; the others continue"

    def store(self, part: Part, payload: Tensor) -> int:
        """Store the chunks of a part of this island and append the part. Return the bytes sent."""
        if part.finite:
            started = time.monotonic()
            self._uploads = started, payload.numel()
            chunks = self._connection.store(as_buffer(payload), "parts")
            self._uploads = math.inf, 0
            self._gauges.bytes_per_second = payload.numel() / (time.monotonic() - started)
            sent = self._gauges.sent_bytes = self._copies.cycle_bytes(part.codec)
            with self.changed:
                self._gauges.received_bytes = sent * (len(self.state.owners()) - 1)
            part = msgspec.structs.replace(part, chunks=chunks)
        self._parts.keep(part, payload)
        with self.changed:  # not in the reading thread: it may wait for another island's part
            self.machine.store(part)
            self._react()
        return payload.numel() if part.finite else 0

    def reports(self) -> dict[str, Report]:
        """Return the reports of all islands, by name."""
        with self.changed:
            owners = list(self.state.owners().values())
        return {name_of(owner): self._report_of(owner, time.monotonic()) for owner in owners}

    def _report_of(self, owner: str, now: float) -> Report:
        members, gauges = self._connection.members, self._gauges
        flags = self.machine.others.flags.get(owner, 0)
        if owner != self.machine.incarnation:
            report, member = members.report(owner, now), members.heard.get(owner)
            says = () if member is None or report.absent else member.hint.numbers.says
            is_stuck = f"{name_of(owner)}: {STUCK}" in says
            if is_stuck:
                return report._replace(absent=STUCK, evidence="it says so")
            return report._replace(flags=flags)
        (since, size), rate = self._uploads, gauges.bytes_per_second or 0.0
        still = now - max(since, self._connection.streams.stored)
        usual = min(size, UNDER_WAY * CHUNK_BYTES) / rate if rate else math.inf
        if still < max(STILL_SECONDS, STILL_RATIO * usual) or members.is_new(now):
            return Report(gauges.read_vitals(), flags)
        text = f"its upload has made no progress for {still:.0f} s"
        return Report(gauges.read_vitals(), absent=STUCK, evidence=text)

    def take_actions(self) -> list[Action]:
        """Return the actions about others that began or ended since the last call."""
        with self.changed:
            taken, self.machine.actions = self.machine.actions, []
        return taken

    def check(self) -> None:
        """Raise an error of the reading thread."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed.set()
        self._connection.close()
        if self._thread.is_alive():
            self._thread.join()
        self._parts.close()
        self._giver.close()

    # --- the reading thread -----------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(ENCODING_THREADS)
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
        """Wait briefly for records and messages, handle them, and append what is due."""
        if self._closed.is_set():
            raise ClosedError("the island was closed")
        self._connection.receive()
        records = self._connection.records
        while records and not self.machine.left:
            self._is_reading = True  # maybe for long, as it waits for parts
            self._read(records.popleft())
            self._is_reading = False
        while self._connection.messages:
            message = self._connection.messages.popleft()
            if isinstance(message, SnapshotWanted) and message.fragment < len(self.state.fragments):
                self._giver.give(message, self.state)
        while not self._copies.saves.empty():
            self._copies.run(self._copies.save)
        with self.changed:
            self._react()

    def _read(self, record: LogRecord) -> None:
        self._advance(record)
        with self.changed:
            self.machine.read(record.sequence, record.raw, time.monotonic())
            self._parts.fetch_waiting(self.state)
            self.changed.notify_all()
        for fragment, rounds in enumerate(self.machine.rounds):
            while rounds.skipped:
                self._copies.run(self._copies.drop, fragment, rounds.skipped.pop())
        if record.sequence % STATE_EVERY == 0 and self.machine.joined:
            self._giver.store_state(self.state.encode())

    def _advance(self, record: LogRecord) -> None:
        """Compute the version of a valid close before the state reads it.

        The training thread then sees an entry only once its copy exists.
        """
        try:
            close = decode(record.raw)
        except VoidError:
            return
        entry = self.state.preview(close) if isinstance(close, Close) else None
        if entry is None:
            return
        close = entry.close
        if close.version != self._copies.fragments[close.fragment].newest + 1:
            return
        named = zip(close.parts, entry.parts, strict=True)
        try:
            counted = [(part, self._parts.payload(number)) for number, part in named if part.weight]
        except PartGoneError as error:
            if not self.machine.joined:
                raise
            raise IslandFailedError(
                f"{error}; when the island is restarted, it takes the shared copies "
                "of another one, if one is running"
            ) from error
        checksum = self._copies.run(
            self._copies.advance,
            close.fragment,
            close.version,
            close.lr,
            [part.weight for part, _ in counted],
            [part.ranks for part, _ in counted],
            [part.codec for part, _ in counted],
            not self.machine.joined,  # older versions will not be applied
            content=[
                self._copies.shards(close.fragment, payload, part.ranks, part.codec)
                for part, payload in counted
            ],
        )
        with self.changed:
            self.state.learn(close.fragment, close.version, checksum)

    def _react(self) -> None:
        """Append what is due. The caller holds the lock."""
        try:
            records = self.machine.records(self._parts.checked(), time.monotonic())
        except IslandFailedError:
            self._send_hint()  # others may not have seen its bits yet
            raise
        for record in records:
            raw = encode(record)
            decode(raw)  # raises if the record would always be void
            self._connection.append(raw)
        for say, lines in (logger.warning, self.machine.notices), (logger.info, self.machine.news):
            while lines:
                say(lines.pop(0))

    def _beat(self) -> None:
        """Send heartbeats, in a separate thread because the reading thread may be busy."""
        while not self._closed.wait(BEAT):
            self._send_hint()

    def _send_hint(self) -> None:
        unread = next(iter(self._connection.records.copy()), None)
        lag = 0.0 if unread is None else time.monotonic() - unread.at
        # Also after a connection is made, as there is more to read then.
        is_soon = lag <= self._connection.members.expiry
        caught_up = is_soon and 0 <= self._connection.last <= self.state.sequence
        hint = self.machine.hint(caught_up=caught_up)
        numbers = self._gauges.read(self._connection.site, self._connection.round_trip)
        says = (*self.machine.others.standing(), *numbers.says)
        numbers = msgspec.structs.replace(numbers, says=says)
        self._connection.beat(msgspec.structs.replace(hint, numbers=numbers))
