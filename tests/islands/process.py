"""A simulated island."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tests.islands import toy
from tests.islands.plan import Nature
from tests.islands.toy import Copies, Shared, Vector, combine, records_of
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.ledger import Due, Mode
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.machine import RETRY, Machine
from torchtitan_diloco.islands.members import (
    Hint,
    IslandFailedError,
    IslandFencedError,
    Members,
)
from torchtitan_diloco.islands.records import (
    Chunk,
    Close,
    Part,
    Record,
    decode,
    digest,
)
from torchtitan_diloco.islands.rounds import Checked

if TYPE_CHECKING:
    from tests.islands.simulation import World

STATE_EVERY = 10
"""Records between two states that are stored for joiners."""
TICK, BEAT, RECONNECT = 0.1, 0.5, 0.1
"""Seconds between ticks, heartbeats, and attempts to connect."""
HOUR = 3600.0


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
        self.members = Members(self.plan.expiry, self.plan.patience)
        self._begin()
        self.theta: list[Vector] = []
        self.checked: dict[int, Checked] = {}
        self.heads: list[dict[int, str]] = []
        """For each fragment: version -> hash of the entry that made it."""
        self.training = self.blocked = False
        self.expected: list[toy.Expected] = []
        """Accounts of the next delta of each fragment."""
        self.poisoned = set[int]()
        """Fragments whose parameters are not finite."""
        self.idle = self.blocked_since = 0.0
        self.leaving = self.has_begun = False
        self.is_flipped = self.failed = False
        """Whether a copy has a wrong bit, and whether it has ended for that."""

    def _begin(self) -> None:
        self.copies, state = self._first_copies()
        arguments = self.incarnation, self.members, self.plan.timing
        self.machine = Machine(*arguments)
        self.machine.begin(state)
        self.cursor = self.delivered = state.sequence

    @property
    def now(self) -> float:
        return self.world.now + self.offset

    @property
    def state(self) -> State:
        return self.machine.state

    def waits_for(self) -> str:
        return self.members.waits_for(self.state, self.incarnation, self.now)

    # --- faults -----------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        self.paused_until = self.world.now + seconds

    def flip(self) -> None:
        """Change a copy in memory, and with it what this process computes from then on."""
        wrong, self.is_flipped = self.copies.newest(0), True
        wrong = replace(wrong, theta=combine((1, wrong.theta), (1, {0: 1})))
        self.copies.shared[0][wrong.version] = wrong
        self.state.learn(0, wrong.version, wrong.checksum)

    def fail(self) -> None:
        """End, and be started again."""
        self.alive, self.failed = False, True
        self.world.start(self.incarnation.split("/")[0], self.nature, at=1.0)

    def cut(self, seconds: float) -> None:
        """Lose the connection. Messages sent meanwhile are lost, and deliveries are delayed."""
        self.members.disconnect()
        self.world.after(seconds + RECONNECT, self.reconnect, self)

    def reconnect(self) -> None:
        if not self.has_begun:
            return
        self.members.connect(self.now)
        self.delivered = self.cursor
        self.deliver()

    # --- network ----------------------------------------------------------------------------------

    def _first_copies(self) -> tuple[Copies, State]:
        """Return another island's snapshots and a stored state, or the beginning of the run."""
        world, choose = self.world, self.world.random.choice
        healthy = [one for one in world.processes if one.alive and not one.is_flipped]
        donors = [one for one in healthy if one.training]
        donor, states = choose(donors) if donors else None, map(State.decode, world.states)
        stored = [state for state in states if donor and state.sequence <= donor.cursor]
        if donor is None or not stored:
            return Copies([Shared() for _ in range(self.plan.fragments)]), State()
        state = choose(stored)
        records = records_of(world.log[state.sequence : donor.cursor])
        chosen = list[Shared]()
        for fragment, shared in enumerate(donor.copies.shared):
            known = sorted(version for version in shared if version in donor.heads[fragment])[-3:]
            one = shared[choose([key for key in known if key >= state.fragments[fragment].version])]
            head = donor.heads[fragment][one.version]
            assert state.adopt(fragment, (one.version, head, one.checksum), records)
            chosen.append(one)
        return Copies(chosen), state

    def connect(self) -> None:
        self._begin()
        self.has_begun = True
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
        outcome = self.machine.read(self.cursor, raw, self.now)
        if not self.is_flipped:
            self.world.note(outcome, self.cursor)
        if outcome.entry is not None:
            self.copies.advance(self.state, outcome.entry, self.world.fetch)
        self.heads = [
            heads | {one.version: one.head}
            for heads, one in zip(self.heads or [{}] * 99, self.state.fragments, strict=False)
        ]
        if not self.is_flipped:
            self.world.agree(("state", self.cursor), toy.fingerprint(self.state))
            if self.training and self.cursor % STATE_EVERY == 0:
                self.world.states.append(self.state.encode())
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

    def beat(self) -> None:
        if self.members.connected:
            caught_up = self.cursor == len(self.world.log) or self.training
            hint = self.machine.hint(caught_up=caught_up)
            for other in self.world.processes:
                if other is not self and other.alive and other.members.connected:
                    self.world.after(self.world.delay(), partial(other.hear, hint), other)
        if not self.finished:
            self.world.after(BEAT, self.beat, self)

    def hear(self, hint: Hint) -> None:
        self.members.hear(hint, self.now)

    def tick(self) -> None:
        self.react()
        if not self.finished:
            self.world.after(TICK, self.tick, self)

    # --- decisions --------------------------------------------------------------------------------

    def react(self) -> None:
        if self.state.ended and self.cursor == len(self.world.log):
            self.finished = True
        joined = self.machine.joined
        if self.finished or (not self.members.connected and not joined):
            return
        if not joined and (not self.state.facts or self.cursor < len(self.world.log)):
            return
        if self.decide() is None:
            return
        if self.machine.joined and not self.training:
            self.begin_training(self.machine.position)
        elif self.machine.joined and (self.blocked or self.machine.stopped):
            self.boundary()

    def decide(self) -> list[Record] | None:
        """Append what is due, and return it. None: this process cannot go on now."""
        try:
            records = self.machine.records(self.checked, self.now)
        except IslandFencedError:
            self.finished = True
            return None
        except IslandFailedError:
            self.fail()
            return None
        except UserError:  # a start of the same island is running
            return None
        for record in records:
            self.have_effect(partial(self.transmit, record))
        return records

    def begin_training(self, position: int) -> None:
        self.training = True
        self.theta = [dict(self.copies.newest(p).theta) for p in range(self.plan.fragments)]
        self.expected = [toy.Expected(position=position) for _ in self.theta]
        self.next_step()

    # --- training ---------------------------------------------------------------------------------

    def next_step(self) -> None:
        if self.machine.step == self.nature.hangs_at:
            return
        jitter = self.world.random.uniform(-self.nature.jitter, self.nature.jitter)
        self.world.after(max(0.001, self.nature.step + jitter), self.step, self)

    def step(self) -> None:
        island = self.machine
        if self.finished:
            return
        for sample in range(island.position, island.position + self.plan.batch):
            toy.train(self.theta, island.slot, sample)
        weight, seconds = self.plan.batch * toy.TOKENS, self.nature.step
        island.finish_step(self.plan.batch, weight, seconds, leaving=self.leaving)
        sick = 0 <= self.nature.never_finite_from <= island.step
        if sick or island.step == self.nature.not_finite_at:
            self.poisoned = set(range(self.plan.fragments))
        self.boundary()

    def boundary(self) -> None:
        """Do what is due between two steps. While blocked, this is called again at each event."""
        island, began = self.machine, self.world.now
        if not self.blocked:
            self.blocked_since = began
        self.blocked = True
        while self.blocked:
            before = [rounds.applied for rounds in island.rounds]
            sent = [rounds.sent_step for rounds in island.rounds]
            due = island.boundary(self.now)
            for one in due.applied:
                late = island.step - sent[one.fragment] - self.plan.delay
                self.apply(one, before[one.fragment], late)
                before[one.fragment] = one.version
            for part in due.sent:
                self.send(part)
            if self.decide() is None:
                return
            self.blocked = due.waits_until is not None
            if due.waits_until is not None and not (due.applied or due.sent):
                later = max(0.001, due.waits_until - self.now)
                self.world.after(later, self.react, self)
                return
        self.idle += self.world.now - self.blocked_since
        if not island.stopped:
            self.next_step()

    def apply(self, due: Due, before: int, late: int) -> None:
        """
        Args:
            before: version in the parameters.
            late: steps since the last part of the fragment should have been applied.
        """
        island, fragment = self.machine, due.fragment
        old, new = (
            self.copies.shared[fragment][version].theta for version in (before, due.version)
        )
        theta = self.theta[fragment]
        self.theta[fragment] = toy.apply(due.mode, theta, old, new, self.plan.alpha)
        if (part := due.own) is not None:
            in_time = late <= 0 and part.base == due.version - 1
            share = self.plan.alpha if in_time else max(self.plan.alpha, 0.5)
            change = toy.combine((1, new), (-1, old))
            place = island.slot, island.position
            self.expected[fragment].apply(share * (not due.is_lost), *place, change)
        if due.mode is Mode.RESET:
            self.poisoned.discard(fragment)

    def send(self, part: Part) -> None:
        shared = self.copies.shared[part.fragment][part.base]
        delta = toy.encode_delta(self.theta[part.fragment], shared.theta)
        self.expected[part.fragment].send(part.slot, part.end, delta)
        if part.fragment in self.poisoned:
            part = msgspec.structs.replace(part, weight=0, finite=False)
        self.world.after(self.nature.upload, partial(self.store, part, delta), self)

    def store(self, part: Part, delta: Vector) -> None:
        """Store the chunk of a part, then append the part."""
        if not self.members.connected:
            self.world.after(RETRY, partial(self.store, part, delta), self)
            return
        number = len(self.world.payloads) + 1
        self.have_effect(partial(self.world.payloads.__setitem__, number, delta))
        sick = 0 <= self.nature.sick_at <= self.machine.step
        self.world.norms[number] = 100.0 if sick else 1.0
        if not self.alive:
            return
        if self.world.random.random() < self.nature.bad:
            self.world.corrupt.add(number)
        chunk = Chunk(number, 1, digest(repr(delta).encode()))
        chunks = (chunk,) if part.finite else ()
        self.machine.store(msgspec.structs.replace(part, chunks=chunks))
        self.react()
