"""A simulated process of an island: it drives the shipped machine, with toy tensors."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from tests.islands.rules import toy
from tests.islands.rules.toy import Account, Vector
from tests.islands.rules.world import Process, Thread
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.islands.rules.checkpoint import Saved
from torchtitan_diloco.islands.rules.commit import CallFailedError, Get, Reader
from torchtitan_diloco.islands.rules.decision import Decision, decode_decision
from torchtitan_diloco.islands.rules.founding import Founding, WentBackError, encode_founding
from torchtitan_diloco.islands.rules.fragment import Apply
from torchtitan_diloco.islands.rules.island import REJOIN, Island
from torchtitan_diloco.islands.rules.names import COPY, ISLAND, founding_name, part_name
from torchtitan_diloco.islands.rules.note import NotedGauges, Part

if TYPE_CHECKING:
    from tests.islands.rules.simulation import Simulation

NOTE_SECONDS = 0.3
READ_SECONDS = 0.2
LOOK = 0.06
SHAPES = [(100, 10)]


@lru_cache(maxsize=64)
def decode(raw: bytes, number: int) -> Decision:
    """Islands only read what they decode, so they share it."""
    return decode_decision(raw, number)


@dataclass
class Nature:
    """Properties of an island."""

    step: float = 0.3
    jitter: float = 0.0
    upload: float = 0.05
    download: float = 0.05
    not_finite_at: int = -1
    """Step after which its parameters are not finite."""
    sick_at: int = -1
    """Step from which its deltas are a hundred times too long, for one part."""
    overflows_at: int = -1
    """Step from which an outer step with its part is not finite, for one part."""
    is_mute: bool = False
    """It makes steps and never delivers."""


@dataclass
class Payload:
    delta: Vector
    norm: float


@dataclass
class Checkpoint:
    saved: Saved
    published: list[Vector]


@dataclass
class Waited:
    """How long training has stood still at a boundary."""

    seconds: float = 0.0
    longest: float = 0.0


@dataclass
class Tensors:
    theta: list[Vector] = field(default_factory=list)
    published: list[Vector] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)


class IslandProcess(Process):
    def __init__(
        self,
        simulation: "Simulation",
        login: str,
        nature: Nature,
        checkpoint: Checkpoint | None = None,
        *,
        is_founder: bool = True,
    ) -> None:
        super().__init__(simulation.world, login)
        self.simulation = simulation
        self.nature = nature
        self.is_founder = is_founder
        self.checkpoint: Checkpoint | None = None  # of this process
        self.ending = ""
        self.waited = Waited()
        self.poisoned = set[int]()
        self.is_flipped = False
        self.begin(checkpoint)
        for thread in (self.read(), self.write_notes(), self.download(), self.found()):
            self.spawn(self.until_end(thread))
        self.spawn(self.live())

    @property
    def is_over(self) -> bool:
        return bool(self.ending)

    def fail(self, error: WentBackError) -> None:
        """The store was put back: end, and be started again."""
        assert self.simulation.restores, error
        self.ending = "went back"
        self.simulation.went_back += 1
        self.simulation.start(self.name, self.nature, self.checkpoint, after=1.0)

    def live(self) -> Thread:
        yield from self.train()
        self.ending = self.ending or self.machine.ending
        if self.ending == REJOIN:
            self.simulation.start(self.name, self.nature, self.checkpoint, after=1.0)

    def begin(self, checkpoint: Checkpoint | None) -> None:
        plan = self.world.plan
        nonce = f"{self.simulation.next_nonce():08x}"
        saved = None
        self.tensors = Tensors([toy.START] * plan.fragments, [toy.START] * plan.fragments)
        if checkpoint is not None:
            self.checkpoint = checkpoint
            published = list(checkpoint.published)
            self.tensors = Tensors([toy.ZERO] * plan.fragments, published)
            saved = checkpoint.saved
            if saved.fragments:
                saved = saved.with_checksums([toy.checksum(values) for values in published])
        self.founding = Founding(
            run=f"run-{nonce}",
            settings=self.simulation.settings,
            shapes=[SHAPES] * plan.fragments,
            checksums=[toy.checksum(values) for values in self.tensors.published],
        )
        if saved is not None:
            self.founding = saved.found(self.founding)
        self.incarnation = f"{self.name}/{nonce}"
        self.hands: dict[str, Vector] = {}
        self.machine = Island(
            self.incarnation,
            facts=self.founding.settings.facts,
            shapes=self.founding.shapes,
            founds=self.founding if self.is_founder else None,
            saved=saved,
        )
        self.is_note_due = True

    def until_end(self, thread: Thread) -> Thread:
        for seconds in thread:
            yield seconds
            if self.machine.ending or self.is_over:
                return

    # --- threads of the store ---------------------------------------------------------------------

    def found(self) -> Thread:
        while not self.machine.may_found:
            yield READ_SECONDS
        yield from self.put(founding_name(self.incarnation), encode_founding(self.founding))
        while not self.machine.is_founder:
            yield READ_SECONDS
        for fragment in range(self.world.plan.fragments):
            yield self.nature.upload
            copy = self.tensors.published[fragment]
            yield from self.put(founding_name(self.incarnation, fragment), copy)

    def read(self) -> Thread:
        reader = Reader()
        while True:
            try:
                raw = yield from self.drive(reader.read(self.now))
            except CallFailedError:
                yield READ_SECONDS
                continue
            if reader.number is None:
                self.machine.on_empty()
            elif raw is not None:
                self.machine.on_decision(decode(raw, reader.number), self.now)
                self.is_note_due = True
            yield READ_SECONDS

    def write_notes(self) -> Thread:
        last = -1.0
        while True:
            if self.is_note_due or self.world.now - last >= NOTE_SECONDS:
                last = self.world.now
                self.is_note_due = False
                merged = max(self.simulation.clocks.get(self.incarnation, 0), 0)
                raw = self.machine.note(NotedGauges(loss=2.5, validated=(merged, 3.0), says=1))
                self.simulation.note_bytes = max(self.simulation.note_bytes, len(raw))
                name = ISLAND + self.incarnation
                try:
                    yield from self.world.store.write(name, raw, self, replaces=True)
                except CallFailedError:
                    self.is_note_due = True
                for name in self.machine.take_garbage():
                    self.world.store.delete(name)
            yield LOOK * 2

    def download(self) -> Thread:
        while True:
            wanted = self.machine.wanted()
            if not wanted:
                yield LOOK * 2
                continue
            stored = wanted[0]
            try:
                yield self.nature.download * (4 if stored.kind == COPY else 1)
                content = yield from self.call(Get(stored.name))
            except CallFailedError:
                continue
            if content is None:  # not visible yet, or old: look at the next decision
                self.machine.on_missing(stored)
                yield 0.3
                continue
            self.hands[stored.name] = content
            self.machine.on_held(stored, self.now)

    def send(self, part: Part) -> None:
        """Take the delta of a part, and upload it in a thread of its own."""
        tensors = self.tensors
        fragment = part.fragment
        published = tensors.published[fragment]
        assert toy.checksum(published) == part.checksum or self.is_flipped, "another base"
        delta = toy.encode_delta(tensors.theta[fragment], published)
        assert self.machine.slot is not None
        is_finite = fragment not in self.poisoned
        tensors.accounts[fragment].send(self.machine.slot, part.start, part.end, delta.linear)
        assert part.weight == toy.TOKENS * (part.end - part.start), "weight is tokens trained"
        norm = 1.0 + (part.end - part.start) / 100
        if 0 <= self.nature.sick_at <= self.machine.step:
            norm = 100 * norm
            self.nature.sick_at = -1
        if 0 <= self.nature.overflows_at <= self.machine.step:
            self.simulation.overflowing.add((self.incarnation, fragment, part.number))
            self.nature.overflows_at = -1
        payload = Payload(delta, norm)
        self.spawn(self.until_end(self.upload(part, payload, is_finite)))

    def upload(self, part: Part, payload: Payload, is_finite: bool) -> Thread:
        if self.nature.is_mute:
            return
        machine = self.machine
        if is_finite:
            yield self.nature.upload
            yield from self.put(part_name(self.incarnation, part.fragment, part.number), payload)
        machine.on_stored(part, 100, self.now, is_finite=is_finite)
        if is_finite:
            sent = machine.fragments[part.fragment].sent
            assert sent is not None
            self.simulation.parts[self.incarnation, part.fragment, part.number] = sent.part
        self.is_note_due = True

    # --- train ------------------------------------------------------------------------------------

    def train(self) -> Thread:
        machine = self.machine
        while not self._has_ended(machine):
            began = self.world.now
            while True:  # a boundary
                due = machine.boundary(self.now)
                self.check_clock(due.clock)
                for apply in due.applies:
                    self.apply(apply)
                if machine.is_training and not self.tensors.accounts:
                    self.open_accounts()
                for send in due.sends:
                    self.send(send.part)
                while len(machine.entered) < due.phases:
                    ahead = self.world.random.randint(0, 3)
                    machine.enter_phase(machine.position + ahead)
                    self.is_note_due = True
                if due.applies or due.sends:
                    self.is_note_due = True
                elif machine.ending or due.waits_until is None:
                    break
                else:
                    yield LOOK
            idle = self.world.now - began
            self.waited.seconds += idle
            if not self.paused_until:
                self.waited.longest = max(self.waited.longest, idle * self.rate)
            if not due.is_training or machine.ending:
                self.is_note_due = True
                yield LOOK * 2
                continue
            jitter = self.nature.jitter
            yield self.nature.step + self.world.random.uniform(-jitter, jitter)
            if not self._has_ended(machine):
                self.step()

    @staticmethod
    def _has_ended(machine: Island) -> bool:
        return bool(machine.ending)  # other threads end it

    def check_clock(self, clock: int) -> None:
        known = self.simulation.clocks.get(self.incarnation, 0)
        assert clock >= known, "the clock of the learning rate goes back"
        self.simulation.clocks[self.incarnation] = clock

    def open_accounts(self) -> None:
        at = self.machine.position
        self.tensors.accounts = [Account(at, at) for _ in self.tensors.theta]

    def step(self) -> None:
        machine = self.machine
        batch = self.world.plan.batch
        assert machine.slot is not None
        for sample in range(machine.position, machine.position + batch):
            toy.train(self.tensors.theta, machine.slot, sample)
            phase = sum(position <= sample for position in machine.entered)
            self.simulation.phases[self.incarnation, sample] = phase
        machine.finish_step(batch, batch * toy.TOKENS, self.nature.step)
        if machine.step == self.nature.not_finite_at:
            self.poisoned = set(range(self.world.plan.fragments))
        every = self.simulation.save_every
        if every and machine.step % every == 0:
            self.save()

    def save(self) -> None:
        saved = self.machine.save()
        if saved is not None:
            self.checkpoint = Checkpoint(saved, list(self.tensors.published))

    def apply(self, apply: Apply) -> None:
        tensors = self.tensors
        fragment = apply.fragment
        before = tensors.published[fragment]
        after = before
        if apply.source is not None:
            content = self.hands.pop(apply.source.name)
            after = content if apply.source.kind == COPY else toy.add(before, content)
        tensors.published[fragment] = after
        theta = tensors.theta[fragment]
        change = toy.subtract(after, before)
        machine = self.machine
        account = tensors.accounts[fragment] if tensors.accounts else None
        match apply.mode:
            case Mode.MIX:
                tensors.theta[fragment] = toy.mix(apply.share, theta, after)
                assert account is not None
                assert machine.slot is not None
                slot = machine.slot
                position = machine.position
                account.apply(apply.share, slot, position, change.linear)
            case Mode.ADD:
                tensors.theta[fragment] = toy.add(theta, change)
            case Mode.TAKE | Mode.RESET:
                tensors.theta[fragment] = after
                self.poisoned.discard(fragment)
                if account is not None:
                    account.lose(machine.position)
        if fragment == 0 and apply.source is not None and apply.source.kind == COPY:
            self.is_flipped = False
        checksum = toy.checksum(after)
        machine.on_checksum(fragment, apply.version, checksum)
        if not machine.fragments[fragment].is_wrong and not (self.is_flipped and fragment == 0):
            self.simulation.agree(machine, fragment, apply.version, checksum)

    def flip(self) -> None:
        """Change a bit of the copy of fragment 0 in memory."""
        published = self.tensors.published[0]
        self.tensors.published[0] = toy.add(published, Vector(0, 1))
        self.is_flipped = True
