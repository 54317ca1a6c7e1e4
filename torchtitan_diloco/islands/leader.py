"""First rank of an island: threads around its `Machine`.

After `join` has taken a slot, a thread handles incoming records in order and appends what is due.
Between two steps, the training thread asks for what to send and apply.
"""

import threading
import time

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.islands.connection import ClosedError, Connection
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.giver import Giver
from torchtitan_diloco.islands.inbox import Snapshot, SnapshotWanted
from torchtitan_diloco.islands.machine import Boundary
from torchtitan_diloco.islands.records import Facts, Part, decode, encode
from torchtitan_diloco.islands.replay import Replay, Saved, as_buffer
from torchtitan_diloco.islands.rounds import Timing
from torchtitan_diloco.log import logger

BEAT, REPORT = 0.5, 10.0
"""Seconds between heartbeats, and between log messages about waiting."""
LOOK = 0.1
"""Longest single wait of training, as the connection may be lost meanwhile."""


class Seat(msgspec.Struct, frozen=True):
    """The place of an island in the run."""

    slot: int
    slots: int
    block: int
    position: int
    """First sample of the slot for this island."""
    total_tokens: int
    """Length of the run, as set by its first island."""
    clock: int
    versions: list[int]
    """Versions of the fragments with which the island begins."""


class Leader(Replay):
    """A `Replay` that joins the run, and writes to the log.

    After `join`, its thread reads records and computes new versions (`_work`). The upload thread
    calls `store`, and the training thread all other public methods. All three hold the lock of
    `changed` to use the machine. A version is computed before the state has its entry, without the
    lock, so that training can continue meanwhile.
    """

    def __init__(
        self, connection: Connection, copies: Copies, facts: Facts, timing: Timing, name: str
    ) -> None:
        """`facts`: facts of the run if this island is the first. `name`: the incarnation."""
        super().__init__(connection, copies, facts, timing, name)
        self._reported = 0.0
        self._failure: Exception | None = None
        self._giver = Giver(connection)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="islands", daemon=True)
        self._beats = threading.Thread(target=self._beat, name="islands-beat", daemon=True)

    # --- join -------------------------------------------------------------------------------------

    def join(self, saved: Saved | None) -> Seat:
        """Catch up with the log, take a slot, and wait for the run to begin."""
        self._beats.start()
        facts, machine = self.replay(saved), self.machine
        while machine.island is None:
            self._work()
            if machine.island is None and (text := machine.waits_for(time.monotonic())):
                self._report(text)
        island = machine.island
        versions = [rounds.applied for rounds in island.rounds]
        place = island.slot, facts.slots, facts.block, island.position
        self._thread.start()
        return Seat(*place, facts.total_tokens, island.clock, versions)

    def _report(self, line: str) -> None:
        if time.monotonic() - self._reported > REPORT:
            say = logger.warning if self._reported else logger.info  # shown without logging set-up
            self._reported = time.monotonic()
            say(line)

    # --- the training thread ----------------------------------------------------------------------

    def finish_step(self, samples: int, weight: int, seconds: float) -> None:
        with self.changed:
            leaving = self._connection.leaving
            self.machine.finish_step(samples, weight, seconds, leaving=leaving)

    def stop(self) -> None:
        with self.changed:
            if self.machine.island is not None:
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
                self.check()
                waited = True
                self.changed.wait(min(due.waits_until - now, LOOK))
            self._react()  # at once, as the step of an opening counts
        if waited and due.applied:
            first = msgspec.structs.replace(due.applied[0], waited=now - started)
            due = msgspec.structs.replace(due, applied=[first, *due.applied[1:]])
        ranks = self._copies.ranks.size
        sent = [msgspec.structs.replace(part, ranks=ranks) for part in due.sent]
        return msgspec.structs.replace(due, sent=sent)

    def store(self, part: Part, payload: Tensor) -> int:
        """Store the chunks of an own part and append the part. Return the bytes sent."""
        if part.finite:
            chunks = self._connection.store(as_buffer(payload), "parts")
            part = msgspec.structs.replace(part, chunks=chunks)
        self._own[part.fragment] = part, payload
        with self.changed:  # not in the reading thread: it may wait for another island's part
            self.machine.stored[part.fragment] = part
            self._react()
        return payload.numel() if part.finite else 0

    def check(self) -> None:
        """Raise an error of the reading thread."""
        if self._failure is not None:
            raise self._failure

    def to_save(self) -> Saved:
        """Return the position in the log for a checkpoint of the newest copies."""
        assert self.state.facts is not None
        versions = [one.newest for one in self._copies.fragments]
        place = self.state.sequence, self.state.digest
        return Saved(self.state.facts.run, *place, list(self.state.heads), versions)

    def close(self) -> None:
        self._closed.set()
        self._connection.close()
        if self._thread.is_alive():
            self._thread.join()
        self._copies.run(self._copies.stop)
        self._fetcher.close(timeout=1.0)
        self._giver.close()

    # --- the reading thread -----------------------------------------------------------------------

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
        """Wait briefly for records and messages, handle them, and append what is due."""
        if self._closed.is_set():
            raise ClosedError("the island was closed")
        self._connection.receive()
        records = self._connection.records
        while records and not ((island := self.machine.island) and island.left):
            self._read(records.popleft())
        while self._connection.messages:
            message = self._connection.messages.popleft()
            if isinstance(message, SnapshotWanted) and message.fragment < len(self.state.fragments):
                self._give_snapshot(message)
        while not self._copies.saves.empty():
            self._copies.run(self._copies.save)
        with self.changed:
            self._react()

    def _react(self) -> None:
        """Append what is due. The caller holds the lock."""
        for record in self.machine.records(self._checked(), time.monotonic()):
            raw = encode(record)
            decode(raw)  # raises if the record would always be void
            self._connection.append(raw)
        for say, lines in (logger.warning, self.machine.notices), (logger.info, self.machine.news):
            while lines:
                say(lines.pop(0))

    def _beat(self) -> None:
        """Send heartbeats, in a thread of their own as the reading thread may be busy."""
        while not self._closed.wait(BEAT):
            caught_up = 0 <= self._connection.last <= self.state.sequence
            self._connection.beat(self.machine.hint(caught_up=caught_up))

    def _give_snapshot(self, wanted: SnapshotWanted) -> None:
        fragment, copy = wanted.fragment, self._copies.fragments[wanted.fragment]
        if not self._giver.is_new(wanted):
            return
        whole = self._copies.run(self._copies.collect, fragment)
        snapshot = Snapshot(
            sender=self.machine.incarnation,
            fragment=fragment,
            version=copy.newest,
            head=self.state.fragments[fragment].head,
        )
        self._giver.give(wanted, snapshot, whole)
