"""A simulated island and its settings."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tests.islands import toy
from tests.islands.toy import Copies, Shared, Vector
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import (
    Chunk,
    Close,
    Facts,
    Part,
    Record,
    Take,
    attempt_of,
    decode,
    digest,
)
from torchtitan_diloco.islands.rounds import Checked, Timing
from torchtitan_diloco.islands.rules import Island

if TYPE_CHECKING:
    from tests.islands.simulation import World

RUN_ID = "r1"
TICK, BEAT, RETRY, RECONNECT = 0.1, 0.5, 0.5, 0.1
"""Seconds between ticks, heartbeats, attempts to append, and attempts to connect."""
HOUR = 3600.0
NORM_LIMIT = 20.0


@dataclass
class Plan:
    """Settings that all islands of a simulation share."""

    sync_every: int = 6
    fragments: int = 2
    delay: int = 1
    alpha: float = 0.0
    batch: int = 2
    steps: int = 40
    """Length of the run if `begin` islands train in lockstep."""
    slots: int = 3
    begin: int = 3
    quorum: int = 1
    floor: float = 0.3
    expiry: float = 2.0
    loss: float = 0.0
    """Probability that a message to the server is lost. All acknowledgements are lost."""
    doubled: float = 0.0
    latency: tuple[float, float] = (0.002, 0.02)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.sync_every, self.fragments, self.delay)

    @property
    def timing(self) -> Timing:
        return Timing(self.schedule, self.quorum, self.floor, NORM_LIMIT)

    @property
    def facts(self) -> Facts:
        return Facts(
            run=RUN_ID,
            slots=self.slots,
            begin=self.begin,
            total_tokens=self.steps * self.begin * self.batch * toy.TOKENS,
            cycle=self.sync_every * self.begin * self.batch * toy.TOKENS,
            outer_lr=1.0,
            block=self.batch,
            checksums=(Shared().checksum,) * self.fragments,
            fingerprints={"settings": "same"},
        )


@dataclass
class Nature:
    """Properties of one island."""

    step: float = 0.1
    jitter: float = 0.0
    upload: float = 0.02
    download: float = 0.01
    bad: float = 0.0
    """Probability that a part is corrupt."""
    not_finite_at: int = -1
    """Step after which the parameters are not finite."""
    sick_at: int = -1
    """Step from which its deltas have a hundred times the norm of the others."""
    dies_at: float = -1.0
    """It dies before its n-th message or chunk, or after it for n + 0.5."""


class Process:
    """One start of an island."""

    def __init__(self, world: "World", name: str, nature: Nature) -> None:
        self.world, self.nature, self.plan = world, nature, world.plan
        self.incarnation = f"{name}/{len(world.processes)}"
        self.offset = world.random.uniform(-HOUR, HOUR)
        self.alive, self.finished, self.paused_until = True, False, 0.0
        self.effects = 0
        """Messages and chunks sent so far."""
        self.cursor = self.delivered = 0
        self.members = Members(self.plan.expiry)
        self.copies = self._first_copies()
        self.state = State(self.copies.checksum)
        self.island: Island | None = None
        self.theta: list[Vector] = []
        self.checked: dict[int, Checked] = {}
        self.stored: dict[int, Part] = {}
        self.attempts: dict[tuple[object, ...], float] = {}
        self.heads: list[dict[int, str]] = [{} for _ in range(self.plan.fragments)]
        """For each fragment: version -> hash of the entry that made it."""
        self.training = self.blocked = False
        self.expected: list[toy.Expected] = []
        """Accounts of the next delta of each fragment."""
        self.poisoned = set[int]()
        """Fragments whose parameters are not finite."""
        self.idle = self.blocked_since = 0.0
        self.waits: list[int] = []
        """For each own part: steps from when its entry was due until it was applied."""
        self.leaving = False

    @property
    def now(self) -> float:
        return self.world.now + self.offset

    # --- faults -----------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        self.paused_until = self.world.now + seconds

    def cut(self, seconds: float) -> None:
        """Lose the connection. Messages sent meanwhile are lost, and deliveries are delayed."""
        self.members.disconnect()
        self.world.after(seconds + RECONNECT, self.reconnect, self)

    def reconnect(self) -> None:
        self.members.connect(self.now)
        self.delivered = self.cursor
        self.deliver()

    # --- network ----------------------------------------------------------------------------------

    def _first_copies(self) -> Copies:
        """Return the copies to begin with: another island's snapshots, or version 0."""
        donors = [one for one in self.world.processes if one.alive and one.training]
        if not donors:
            fragments = range(self.plan.fragments)
            return Copies([Shared() for _ in fragments], [{} for _ in fragments])
        donor, choose = self.world.random.choice(donors), self.world.random.choice
        snapshots = [shared[choose(sorted(shared)[-3:])] for shared in donor.copies.shared]
        return toy.begin_with(snapshots, donor.heads, self.world.log[: donor.cursor])

    def connect(self) -> None:
        self.copies = self._first_copies()
        self.state = State(self.copies.checksum)
        self.members.connect(self.now)
        self.deliver()
        self.tick()
        self.beat()

    def deliver(self) -> None:
        """Deliver the rest of the log to this process, in order."""
        if not self.members.connected:
            return
        while self.delivered < len(self.world.log):
            self.delivered += 1
            self.world.after(self.world.delay(), self.receive, self)

    def receive(self) -> None:
        if not self.members.connected or self.cursor >= self.delivered:
            return
        raw = self.world.log[self.cursor]
        self.cursor += 1
        self.members.tick(self.now)
        if self.island is None:
            outcome = self.state.read(self.cursor, raw)
        else:
            outcome = self.island.read(self.cursor, raw, self.now)
        self.world.agree(("state", self.cursor), toy.fingerprint(self.state))
        self.world.note(outcome, self.cursor)
        if outcome.entry is not None:
            close = outcome.entry.close
            self.heads[close.fragment][close.version] = digest(raw)
            self.copies.advance(outcome.entry, self.world.fetch)
            checksum = self.copies.checksum(close.fragment, close.version)
            self.world.agree(("checksum", close.fragment, close.version), checksum)
        if isinstance(outcome.record, Part) and not outcome.void:
            assert self.world.payloads.keys() >= {one.sequence for one in outcome.record.chunks}
            self.world.after(self.nature.download, partial(self.check, self.cursor), self)
        self.react()

    def check(self, sequence: int) -> None:
        """Fetch a part."""
        part = decode(self.world.log[sequence - 1])
        assert isinstance(part, Part)
        corrupt = bool(part.chunks) and part.chunks[0].sequence in self.world.corrupt
        norm = self.world.norms.get(part.chunks[0].sequence, 0.0) if part.chunks else 0.0
        self.checked[sequence] = Checked("its hash differs" if corrupt else "", norm)
        self.react()

    def have_effect(self, action: Callable[[], object]) -> None:
        """Do something visible to others, unless this process dies before it."""
        self.effects += 1
        if self.effects == self.nature.dies_at:
            self.alive = False
            return
        action()
        if self.effects + 0.5 == self.nature.dies_at:
            self.alive = False

    def transmit(self, record: Record) -> None:
        """Send a record to the server. There is no acknowledgement."""
        world = self.world
        if isinstance(record, Close):
            assert self.checked.keys() >= set(record.parts), "its writer has read all parts"
        for _ in range(1 + (world.random.random() < self.plan.doubled)):
            if self.members.connected and world.random.random() >= self.plan.loss:
                world.after(world.delay(), partial(world.append, record))

    def attempt(self, record: Record | None) -> None:
        """Transmit a record, but not again before RETRY: only the log shows whether it is valid."""
        if record is None:
            return
        attempt = attempt_of(record)
        if self.now >= self.attempts.get(attempt, -HOUR * 2) + RETRY:
            self.attempts[attempt] = self.now
            self.have_effect(partial(self.transmit, record))

    def beat(self) -> None:
        if self.members.connected:
            step = self.island.step if self.island else 0
            caught_up = self.cursor == len(self.world.log) or self.training
            hint = Hint(self.incarnation, step, 0, 0.0, caught_up)
            for other in self.world.processes:
                if other is not self and other.alive and other.members.connected:
                    self.world.after(self.world.delay(), partial(other.hear, hint), other)
        if not self.finished:
            self.world.after(BEAT, self.beat, self)

    def hear(self, hint: Hint) -> None:
        self.members.hear(hint, self.now)

    def tick(self) -> None:
        self.members.tick(self.now)
        self.react()
        if not self.finished:
            self.world.after(TICK, self.tick, self)

    # --- decisions --------------------------------------------------------------------------------

    def react(self) -> None:
        if self.state.ended:
            self.finished = True
        if self.finished or (not self.members.connected and self.island is None):
            return
        if self.island is None:
            self.join()
            return
        if self.island.fenced:
            self.finished = True
            return
        if not self.training and self.state.begun:
            self.training = True
            self.next_step()
        if not self.training:
            return
        for fragment in range(self.plan.fragments):
            rounds = self.island.rounds[fragment]
            self.attempt(rounds.open())
            self.attempt(rounds.close(self.checked, 1.0, self.now))
            part = self.stored.get(fragment)
            if part is not None and rounds.under_way:
                self.attempt(part)
        if self.blocked or self.island.stopped:
            self.boundary()
        self.attempt(self.island.last_record(self.now))

    def join(self) -> None:
        if self.state.facts is None or self.cursor < len(self.world.log):
            return
        owned = [slot for slot, name in self.state.owners().items() if name == self.incarnation]
        if owned:
            self.island = Island(self.state, self.members, owned[0], self.plan.timing, now=self.now)
            self.theta = [dict(self.copies.newest(p).theta) for p in range(self.plan.fragments)]
            begin = self.island.position
            self.expected = [toy.Expected(position=begin) for _ in self.theta]
            self.react()
        elif self.incarnation in self.state.incarnations:
            self.finished = True
        elif (free := self.free_slot()) is not None:
            slot, replaces = free
            who = {"slot": slot, "incarnation": self.incarnation}
            self.attempt(Take(run=RUN_ID, **who, replaces=replaces))  # type: ignore[arg-type]

    def free_slot(self) -> tuple[int, str | None] | None:
        with suppress(ValueError):  # a start of the same island is running
            return self.members.slot_to_take(self.state, self.incarnation, self.now)
        return None

    # --- training ---------------------------------------------------------------------------------

    def next_step(self) -> None:
        jitter = self.world.random.uniform(-self.nature.jitter, self.nature.jitter)
        self.world.after(max(0.001, self.nature.step + jitter), self.step, self)

    def step(self) -> None:
        island = self.island
        assert island is not None
        if self.finished:
            return
        for sample in range(island.position, island.position + self.plan.batch):
            toy.train(self.theta, island.slot, sample)
        island.finish_step(self.plan.batch, self.plan.batch * toy.TOKENS, self.nature.step)
        if island.step == self.nature.not_finite_at:
            self.poisoned = set(range(self.plan.fragments))
        island.leaving = self.leaving
        self.boundary()

    def boundary(self) -> None:
        """Do what is due between two steps. While blocked, this is called again at each event."""
        island, began = self.island, self.world.now
        assert island is not None
        if not self.blocked:
            self.blocked_since = began
        self.blocked = False
        island.look_at_end(self.now)
        if self.plan.delay and self._apply():
            return
        for fragment, rounds in enumerate(island.rounds):
            if rounds.send_is_due(self.now):
                self.send(fragment)
            self.attempt(rounds.open())
        if not self.plan.delay and self._apply():
            return
        self.idle += self.world.now - self.blocked_since
        if not island.stopped:
            self.next_step()

    def _apply(self) -> bool:
        """Apply all entries that can be applied. Return whether training waits."""
        island = self.island
        assert island is not None
        for fragment, rounds in enumerate(island.rounds):
            while (mode := rounds.next_mode()) is not None:
                version = rounds.applied
                old, new = (self.copies.shared[fragment][v].theta for v in (version, version + 1))
                theta = self.theta[fragment]
                self.theta[fragment] = toy.apply(mode, theta, old, new, self.plan.alpha)
                part = rounds.unapplied[0].part_of(self.incarnation)
                if part is not None:
                    late = island.step - rounds.sent_step - self.plan.delay
                    self.waits.append(late)
                    in_time = late <= 0 and part.base == version
                    share = self.plan.alpha if in_time else max(self.plan.alpha, 0.5)
                    change = toy.combine((1, new), (-1, old))
                    place = island.slot, island.position
                    lost = rounds.unapplied[0].is_lost(part)
                    self.expected[fragment].apply(share * (not lost), *place, change)
                if mode.value == "reset":
                    self.poisoned.discard(fragment)
                rounds.finish_apply(self.now)
            until = rounds.wait_until()
            if until is not None and self.now < until:
                self.blocked = True
                self.world.after(max(0.001, until - self.now), self.react, self)
        return self.blocked

    def send(self, fragment: int) -> None:
        island, world = self.island, self.world
        assert island is not None
        base = island.rounds[fragment].applied
        shared = self.copies.shared[fragment][base]
        delta = toy.encode_delta(self.theta[fragment], shared.theta)
        checksum = self.copies.checksum(fragment, base)
        part = island.rounds[fragment].send(
            checksum, self.now, finite=fragment not in self.poisoned
        )
        self.expected[fragment].send(island.slot, part.end, delta)
        self.stored.pop(fragment, None)
        world.after(self.nature.upload, partial(self.store, part, delta), self)

    def store(self, part: Part, delta: Vector) -> None:
        """Store the chunk of a part, then append the part."""
        if not self.members.connected:
            self.world.after(RETRY, partial(self.store, part, delta), self)
            return
        number = len(self.world.payloads) + 1
        self.have_effect(partial(self.world.payloads.__setitem__, number, delta))
        sick = 0 <= self.nature.sick_at <= self.island.step if self.island else False
        self.world.norms[number] = 100.0 if sick else 1.0
        if not self.alive:
            return
        if self.world.random.random() < self.nature.bad:
            self.world.corrupt.add(number)
        chunk = Chunk(number, 1, digest(repr(delta).encode()))
        chunks = (chunk,) if part.finite else ()
        self.stored[part.fragment] = msgspec.structs.replace(part, chunks=chunks)
        self.react()
