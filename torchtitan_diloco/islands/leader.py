"""First rank of an island: it reads the log, updates the shared copies, and decides.

After `join` has taken a slot, a thread handles incoming records in order and appends what is due.
Between two steps, the training thread asks for what to send and apply.
"""

import threading
import time
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.islands.connection import ClosedError, Connection
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.giver import Giver
from torchtitan_diloco.islands.log import Entry, Outcome
from torchtitan_diloco.islands.members import Hint, IslandFencedError, name_of
from torchtitan_diloco.islands.records import (
    Facts,
    Part,
    Record,
    Take,
    attempt_of,
    decode,
    encode,
)
from torchtitan_diloco.islands.replay import RETRY, Replay, Saved, as_buffer
from torchtitan_diloco.islands.rounds import Mode, Rounds, Timing
from torchtitan_diloco.islands.rules import Island
from torchtitan_diloco.islands.session import Snapshot, SnapshotWanted
from torchtitan_diloco.log import UserError, logger

BEAT, REPORT = 0.5, 10.0
"""Seconds between heartbeats, and between log messages about waiting."""
AWAY = 10.0
"""Seconds without a connection after which a leaving island gives up sending its work."""
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


class Due(msgspec.Struct, frozen=True):
    """Apply the next version of a fragment to the parameters."""

    fragment: int
    version: int
    mode: Mode
    own: bool
    """Whether the version contains a part of this island."""
    weight: int
    participants: int
    received: int
    """Bytes of the parts of other islands."""
    waited: float
    """Seconds for which training has waited."""


class Boundary(msgspec.Struct, frozen=True):
    """Decisions of the first rank for all ranks, between two steps."""

    clock: int
    stopped: bool = False
    may_train_on: bool = False
    """Stopped until it is known whether the run has merged its tokens."""
    leaving: bool = False
    """Before the end of the run."""
    over: bool = False
    """Nothing is left to send or apply."""
    applied: list[Due] = []
    sent: list[Part] = []
    """Parts whose deltas are taken now, after the applies."""


class Leader(Replay):
    """A `Replay` that owns a slot, decides, and writes to the log.

    After `join`, its thread reads records and computes new versions (`_work`). The upload thread
    calls `store`, and the training thread all other public methods. All three hold the lock of
    `changed` to decide. A version is computed before the state has its entry, without the lock, so
    that training can continue meanwhile.
    """

    def __init__(
        self, connection: Connection, copies: Copies, facts: Facts, timing: Timing, name: str
    ) -> None:
        """`facts`: facts of the run if this island is the first. `name`: the incarnation."""
        super().__init__(connection, copies, facts, name)
        self._timing = timing
        self._attempts: dict[tuple[object, ...], float] = {}
        """Time at which each record was last appended."""
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
        facts = self.replay(saved)
        slot = self._take_slot(facts)
        while not self.state.begun:
            here = ", ".join(map(name_of, self.state.owners().values()))
            self._report(f"waiting until {facts.begin} islands are there; here are {here}")
            self._work()
        now = time.monotonic()
        self.island = island = Island(self.state, self._members, slot, self._timing, now=now)
        versions = [rounds.applied for rounds in island.rounds]
        place = slot, facts.slots, facts.block, island.position
        self._thread.start()
        return Seat(*place, facts.total_tokens, island.clock, versions)

    def _take_slot(self, facts: Facts) -> int:
        """Take a free slot, or the one of an earlier start of this island."""
        while True:
            now = time.monotonic()
            for slot, owner in self.state.owners().items():
                if owner == self.incarnation:
                    return slot
            if self.state.ended:
                raise UserError(
                    "the run has ended: its model is in the folders of its islands; for another "
                    "run, `serve` a new folder"
                )
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
            say = logger.warning if self._reported else logger.info  # shown without logging set-up
            self._reported = time.monotonic()
            say(line)

    # --- the training thread ----------------------------------------------------------------------

    @property
    def joined(self) -> Island:
        assert self.island is not None, "join() comes first"
        return self.island

    def finish_step(self, samples: int, weight: int, seconds: float) -> None:
        with self.changed:
            island = self.joined
            island.finish_step(samples, weight, seconds)
            island.leaving = self._connection.leaving

    def stop(self) -> None:
        """Take no more steps. Before the end of the run, leave it."""
        with self.changed:
            island = self.joined
            island.leaving = island.leaving or not island.stopped or island.may_train_on
            island.stopped = True

    def decide(self, applies: bool, sends: bool) -> Boundary:
        """Return what is due between two steps, after waiting for entries if the rules say so."""
        island = self.joined
        with self.changed:
            island.look_at_end(time.monotonic())
        applied = list(self._due_applies()) if applies else []
        with self.changed:
            sent = list(self._due_sends()) if sends else []
            return Boundary(
                clock=island.clock,
                stopped=island.stopped,
                may_train_on=island.may_train_on,
                leaving=island.leaving,
                over=island.stopped and self._is_over(),
                applied=applied,
                sent=sent,
            )

    def _due_applies(self) -> Iterator[Due]:
        for fragment, rounds in enumerate(self.joined.rounds):
            started = time.monotonic()
            with self.changed:
                while (mode := self._wait_for_mode(rounds)) is not None:
                    entry = rounds.unapplied[0]
                    own = entry.part_of(self.incarnation)
                    others = [part for part in entry.parts if part is not own]
                    yield Due(
                        fragment,
                        entry.close.version,
                        mode,
                        own=own is not None,
                        weight=0 if own is None else own.weight,
                        participants=sum(weight > 0 for weight in entry.close.weights),
                        received=sum(chunk.size for part in others for chunk in part.chunks),
                        waited=time.monotonic() - started,
                    )
                    started = time.monotonic()
                    rounds.finish_apply(started)

    def _wait_for_mode(self, rounds: Rounds) -> Mode | None:
        while (mode := rounds.next_mode()) is None:
            until, now = rounds.wait_until(), time.monotonic()
            if until is None or now >= until:
                return None
            self.check()
            self.changed.wait(min(until - now, LOOK))
        return mode

    def _due_sends(self) -> Iterator[Part]:
        for fragment, rounds in enumerate(self.joined.rounds):
            now = time.monotonic()
            if rounds.send_is_due(now):
                part = rounds.send(self._checksum(fragment, rounds.applied), now)
                yield msgspec.structs.replace(part, ranks=self._copies.ranks.size)
                # Open at once: the step of an opening counts.
                self._attempt(rounds.open())

    def _is_over(self) -> bool:
        """Return whether a stopped island has nothing left to do."""
        if any(rounds.unapplied for rounds in self.joined.rounds):
            return False
        if self.joined.leaving and self._connection.seconds_away() > AWAY:
            logger.warning(
                "left without a connection: the work since the last part is not sent, and its "
                "samples are read again by the next owner of the slot"
            )
            return True
        return self.state.ended or self.joined.left

    def store(self, part: Part, payload: Tensor) -> int:
        """Store the chunks of an own part and append the part. Return the bytes sent."""
        if part.finite:
            chunks = self._connection.store(as_buffer(payload), "parts")
            part = msgspec.structs.replace(part, chunks=chunks)
        self._own[part.fragment] = part, payload
        with self.changed:  # not in the reading thread: it may wait for another island's part
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
        while records and not (self.island and self.island.left):
            self._notice(self._read(records.popleft()))
        while self._connection.messages:
            message = self._connection.messages.popleft()
            if isinstance(message, SnapshotWanted) and message.fragment < len(self.state.fragments):
                self._give_snapshot(message)
        while not self._copies.saves.empty():
            self._copies.run(self._copies.save)
        with self.changed:
            self._members.tick(time.monotonic())
            self._react()

    def _beat(self) -> None:
        """Send heartbeats, in a thread of their own as the reading thread may be busy."""
        while not self._closed.wait(BEAT):
            island = self.island
            caught_up = 0 <= self._connection.last <= self.state.sequence
            step = (island.step, island.tokens, island.step_seconds) if island else (0, 0, 0.0)
            leaving = island is not None and island.leaving
            self._connection.beat(Hint(self.incarnation, *step, caught_up, leaving))

    def _give_snapshot(self, wanted: SnapshotWanted) -> None:
        fragment, copy = wanted.fragment, self._copies.fragments[wanted.fragment]
        if not self._giver.is_new(wanted):
            return
        whole = self._copies.run(self._copies.collect, fragment)
        snapshot = Snapshot(
            sender=self.incarnation,
            fragment=fragment,
            version=copy.newest,
            head=self.state.fragments[fragment].head,
        )
        self._giver.give(wanted, snapshot, whole)

    def _notice(self, outcome: Outcome) -> None:
        """Log deltas that were left out, and fail if this island has lost its slot."""
        island = self.island
        if island is None:
            return
        if outcome.entry is not None:
            log_left_out(outcome.entry)
        if island.fenced and not island.left:
            self._failure = IslandFencedError(
                f"slot {island.slot} of this island was taken by "
                f"{self.state.slots[island.slot].owner}: it ends; what it has done since its last "
                "part is not in the run"
            )

    # --- decisions --------------------------------------------------------------------------------

    def _react(self) -> None:
        """Append what is due. The caller holds the lock."""
        island, now = self.island, time.monotonic()
        if island is None:
            return
        for text in island.settle_disputes(now):
            logger.warning(f"{text}; another island has those of this one")
        if island.fenced or self.state.ended:
            return
        checked = self._checked()
        for fragment, rounds in enumerate(island.rounds):
            self._attempt(rounds.open())
            self._attempt(rounds.close(checked, self._copies.outer_lr, now))
            if rounds.under_way and rounds.sent and fragment in self._own:
                stored, _ = self._own[fragment]
                self._attempt(stored if stored.number == rounds.sent.number else None)
        self._attempt(island.last_record(now))

    def _attempt(self, record: Record | None) -> None:
        """Append a record, but not again before RETRY: only the log shows whether it is valid."""
        if record is not None:
            now, attempt = time.monotonic(), attempt_of(record)
            self._attempts = {one: at for one, at in self._attempts.items() if now < at + RETRY}
            if attempt not in self._attempts:
                self._attempts[attempt] = now
                raw = encode(record)
                decode(raw)  # raises if the record would always be void
                self._connection.append(raw)


def log_left_out(entry: Entry) -> None:
    where = f"fragment {entry.close.fragment}, version {entry.close.version}"
    for refusal in entry.close.refused:
        logger.warning(f"{where}: record {refusal.part} was left out: {refusal.reason}")
    for part in (*entry.parts, *entry.outliers):
        if entry.is_lost(part):
            reason = "is too large" if part.finite else "is not finite"
            logger.warning(
                f"{where}: the delta of island {name_of(part.incarnation)} {reason}; it is left "
                "out, and the island takes the shared parameters"
            )
