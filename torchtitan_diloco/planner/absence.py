"""What the absence of an island costs, as the rules of the islands decide.

Some islands train in simulated time. Each is a `Machine`, the one that makes all decisions of a
real run: when rounds open and close, how long the others wait, and from where the island goes on.
Here are only a log, a network and steps that take time.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import count

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.connection import EXPIRY
from torchtitan_diloco.islands.leader import BEAT
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.machine import Machine
from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import Facts, Part, Record, encode
from torchtitan_diloco.islands.rounds import Checked, Timing
from torchtitan_diloco.log import UserError

ABSENCES = 6
"""Simulated ones, at as many points of a cycle."""
LEAST_STEP, LONGEST_STEP = 0.01, 60.0
"""Seconds. With others, the simulation would take minutes."""
SLOT_SECONDS = 60.0
CHECKSUM = "equal"
MESSAGE_SECONDS = 0.02
UPLOAD = 0.5
"""Time of an upload as a share of the delay of an exchange, which hides it."""


@dataclass(frozen=True)
class Rules:
    """Settings of the islands of a run."""

    islands: int
    schedule: Schedule
    step_seconds: float
    quorum: int = 1
    grace_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not LEAST_STEP <= self.step_seconds <= LONGEST_STEP:
            limits = f"{LEAST_STEP:g}s to {LONGEST_STEP:g}s"
            raise UserError(f"--step-time {self.step_seconds:g}s: give {limits}")
        if not 0 < self.grace_seconds <= 3600:
            raise UserError(f"--grace {self.grace_seconds:g}s: give more than 0, up to 1h")


@dataclass(frozen=True)
class Absence:
    """Means of some absences."""

    others_wait: float
    """Seconds that each of the other islands does not train."""
    rejoins: float
    """Seconds from the return of the island until it trains."""
    lost_steps: float
    """Steps whose work is in no shared copy, of all islands together."""


@cache
def absence(rules: Rules, seconds: float, *, dies: bool) -> Absence:
    """Simulate absences of an island. `dies`: it returns from the log, otherwise it is paused."""
    cycle = rules.schedule.sync_every * rules.step_seconds
    rest = 2 * cycle + 4 * EXPIRY  # its sends are regular again
    world = World(rules)
    world.run(cycle + rest)
    before, steps_before = world.others()
    rejoins = 0.0
    for number in range(ABSENCES):
        world.run(cycle * number / ABSENCES)
        world.leave(-1, dies=dies)
        world.run(seconds)
        world.come_back(-1)
        world.run(rest)
        rejoins += world.processes[-1].rejoin_seconds()
    waited, steps = world.others()
    usual = before * steps / steps_before
    return Absence(
        others_wait=max(0.0, waited - usual) / ABSENCES / (rules.islands - 1),
        rejoins=rejoins / ABSENCES,
        lost_steps=world.lost_steps() / ABSENCES,
    )


class World:
    def __init__(self, rules: Rules) -> None:
        self.rules, self.now = rules, 0.0
        facts = Facts(
            run="simulated",
            slots=rules.islands,
            begin=rules.islands,
            total_tokens=2**40,
            cycle=rules.islands * rules.schedule.sync_every,
            outer_lr=1.0,
            checksums=(CHECKSUM,) * rules.schedule.fragments,
            fingerprints={},
            quorum=rules.quorum,
        )
        self.log = [encode(facts)]
        self._queue = list[tuple[float, int, Process, Callable[[], None]]]()
        self._number, self.steps = count(), 0
        self.processes = [Process(self, f"island-{one}") for one in range(rules.islands)]
        for process in self.processes:
            process.connect()

    def after(self, seconds: float, process: "Process", action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), process, action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue[0][0] <= end:
            self.now, _, process, action = heapq.heappop(self._queue)
            if process.is_paused:
                process.delayed.append(action)
            elif process.is_alive:
                action()
        self.now = end

    def append(self, record: Record) -> None:
        self.log.append(encode(record))
        for process in self.processes:
            self.after(MESSAGE_SECONDS, process, process.receive)

    def leave(self, number: int, *, dies: bool) -> None:
        process = self.processes[number]
        process.is_alive, process.is_paused = not dies, not dies

    def come_back(self, number: int) -> None:
        process = self.processes[number]
        process.returned, process.stepped = self.now, 0.0
        if not process.is_alive:
            self.processes[number] = process = Process(self, process.name)
            process.connect()
        process.is_paused = False
        while process.delayed:
            self.after(0.0, process, process.delayed.pop(0))

    def others(self) -> tuple[float, int]:
        """Return the seconds waited and the steps of all but the last island."""
        others = self.processes[:-1]
        return sum(one.waited for one in others), sum(one.steps for one in others)

    def lost_steps(self) -> float:
        """Return steps that are in no entry and will be in none, as mean over fragments."""
        state, lost = self.processes[0].machine.state, float(self.steps)
        for process in self.processes:
            island = process.machine
            ledgers = state.slots[island.slot].ledgers
            kept = sum(one.merged + island.position - one.taken_to for one in ledgers)
            lost -= kept / len(ledgers)
        return lost


class Process:
    """One start of an island."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.rules, self.name = world, world.rules, name
        self.members = Members(EXPIRY, SLOT_SECONDS)
        timing = Timing(self.rules.schedule, self.rules.grace_seconds)
        self.machine = Machine(f"{name}/{len(world.log)}", self.members, timing)
        self.is_alive, self.is_paused = True, False
        self.delayed = list[Callable[[], None]]()
        """What happened while it was paused."""
        self.steps, self.waited = 0, 0.0
        self.returned, self.stepped = world.now, 0.0
        """When it started or came back, and made its first step since then."""
        self._checked = dict[int, Checked]()
        self._trains, self._waits_since = False, -1.0
        self._is_woken = False

    def rejoin_seconds(self) -> float:
        assert self.stepped, "the island trains again"
        return max(0.0, self.stepped - self.rules.step_seconds - self.returned)

    def connect(self) -> None:
        self.members.connect(self.world.now)
        for _ in self.world.log:
            self._read()
        for fragment in self.machine.state.fragments:
            self._checked |= dict.fromkeys(fragment.waiting, Checked())
        self.beat()

    def _read(self) -> Outcome:
        """Read the next record. Instead of parameters, all copies have the same checksum."""
        state = self.machine.state
        raw = self.world.log[state.sequence]
        outcome = self.machine.read(state.sequence + 1, raw, self.world.now)
        if outcome.entry is not None:
            close = outcome.entry.close
            state.learn(close.fragment, close.version, CHECKSUM)
        return outcome

    def receive(self) -> None:
        state = self.machine.state
        if state.sequence == len(self.world.log):
            return  # it was read at the start
        outcome = self._read()
        if isinstance(outcome.record, Part) and not outcome.void:
            self.world.after(MESSAGE_SECONDS, self, partial(self._check, state.sequence))
        self._wake()

    def _check(self, sequence: int) -> None:
        self._checked[sequence] = Checked()
        self._wake()

    def _wake(self) -> None:
        """React once to all that happens at a time."""
        if not self._is_woken:
            self._is_woken = True
            self.world.after(0.0, self, self.react)

    def beat(self) -> None:
        self.react()
        hint = self.machine.hint(caught_up=True)
        for other in self.world.processes:
            if other is not self:
                self.world.after(MESSAGE_SECONDS, other, partial(other.hear, hint))
        self.world.after(BEAT, self, self.beat)

    def hear(self, hint: Hint) -> None:
        self.members.hear(hint, self.world.now)

    def react(self) -> None:
        self._is_woken = False
        for record in self.machine.records(self._checked, self.world.now):
            self.world.append(record)
        if self.machine.joined and not self._trains:
            self._trains = True
            self.world.after(self.rules.step_seconds, self, self._step)
        elif self._waits_since >= 0:
            self._boundary()

    def _step(self) -> None:
        self.steps += 1
        self.world.steps += 1
        self.stepped = self.stepped or self.world.now
        self.machine.finish_step(1, 1, self.rules.step_seconds, leaving=False)
        self._boundary()

    def _boundary(self) -> None:
        now = self.world.now
        if self._waits_since < 0:
            self._waits_since = now
        due = self.machine.boundary(now)
        for part in due.sent:
            delay = max(1, self.rules.schedule.delay) * self.rules.step_seconds
            self.world.after(UPLOAD * delay, self, partial(self._store, part))
        if due.waits_until is not None and not (due.applied or due.sent):
            self.world.after(max(1e-3, due.waits_until - now), self, self.react)
            return
        self.waited += now - self._waits_since
        self._waits_since = -1.0
        self.world.after(self.rules.step_seconds, self, self._step)
        self.react()

    def _store(self, part: Part) -> None:
        self.machine.store(part)
        self.react()
