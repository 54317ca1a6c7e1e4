"""Server and network of a simulation, in virtual time. Everything is drawn from one seed."""

import heapq
import random
from collections.abc import Callable
from itertools import count, pairwise

from tests.islands import toy
from tests.islands.plan import Nature, Plan
from tests.islands.process import Process
from tests.islands.toy import Copies, Shared, Vector, records_of
from torchtitan_diloco.islands.ledger import Entry, Outcome
from torchtitan_diloco.islands.log import VERSIONS_LATE, State
from torchtitan_diloco.islands.records import Part, Record, digest, encode


class World:
    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan, self.random, self.now = plan, random.Random(seed), 0.0
        self.log: list[bytes] = []
        self.payloads: dict[int, Vector] = {}
        self.norms: dict[int, float] = {}
        """Norm of each payload."""
        self.corrupt: set[int] = set()
        self.processes: list[Process] = []
        self.void: list[Outcome] = []
        """Void records, as seen by the first reader."""
        self.entries: list[tuple[float, Entry]] = []
        """Entries, and the time at which each was first read."""
        self.late: list[int] = []
        """For each merged part, the number of entries that left it out."""
        self.states: list[bytes] = []
        """Some states, as islands store them for joiners."""
        self._seen: dict[object, str] = {}
        self._queue: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._number = count()
        self.append(plan.facts)

    def after(
        self, seconds: float, action: Callable[[], None], process: Process | None = None
    ) -> None:
        """`process`: the actor. A dead one does nothing, and a paused one acts later."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), process, action))

    def start(self, name: str, nature: Nature | None = None, at: float = 0.0) -> Process:
        process = Process(self, name, nature or Nature())
        self.processes.append(process)
        self.after(at, process.connect, process)
        return process

    def run(self, until: float = 400.0) -> None:
        """Run until all living islands have read the end."""
        while self._queue and self.now < until:
            at, _, process, action = heapq.heappop(self._queue)
            self.now = at
            assert len(self.log) < 3000, "the log is flooded"
            if process is not None and not process.alive:
                continue
            if process is not None and at < process.paused_until:
                self.after(process.paused_until - at, action, process)
                continue
            action()
            if all(one.finished for one in self.processes if one.alive):
                return
        raise AssertionError(f"no end after {until} s")

    def append(self, record: Record) -> None:
        self.append_raw(encode(record))

    def append_raw(self, raw: bytes) -> None:
        self.log.append(raw)
        for process in self.processes:
            process.deliver()

    def agree(self, what: object, value: str) -> None:
        """Assert that all processes compute the same."""
        known = self._seen.setdefault(what, value)
        assert known == value, f"{what} differs"

    def note(self, outcome: Outcome, sequence: int) -> None:
        if ("noted", sequence) in self._seen:
            return
        self._seen["noted", sequence] = ""
        if outcome.void:
            self.void.append(outcome)
        if outcome.entry is not None:
            self.entries.append((self.now, outcome.entry))
            version = outcome.entry.close.version
            self.late += [version - 1 - part.base for part in outcome.entry.parts]

    def delay(self) -> float:
        return self.random.uniform(*self.plan.latency)

    def fetch(self, part: Part) -> Vector:
        return self.payloads[part.chunks[0].sequence] if part.chunks else {}


# --- what holds after any run --------------------------------------------------------------------


def check(world: World) -> tuple[State, list[Entry]]:
    """Check what holds after any run: one state and one copy for all, each range merged once.

    While the world ran, it has compared the state of all islands after each record, and the
    checksums of all versions.
    """
    fragments = range(world.plan.fragments)
    copies, state = Copies([Shared() for _ in fragments]), State()
    entries = toy.replay(world.log, copies, world.fetch, state)
    for process in world.processes:
        if process.cursor == len(world.log) and not process.is_flipped:
            assert toy.fingerprint(process.state) == toy.fingerprint(state)
            for fragment in fragments:
                assert process.copies.newest(fragment) == copies.newest(fragment)
    check_ledger(state, entries)
    check_snapshots(world, state, copies, entries)
    assert all(late <= VERSIONS_LATE for late in world.late)
    return state, entries


def check_ledger(state: State, entries: list[Entry]) -> None:
    for number, slot in enumerate(state.slots):
        for fragment, ledger in enumerate(slot.ledgers):
            parts = [
                part
                for entry in entries
                for part in entry.parts
                if (part.slot, part.fragment) == (number, fragment)
            ]
            for before, after in pairwise(parts):
                assert before.end <= after.start, "a range was merged twice"
            assert ledger.merged == sum(part.end - part.start for part in parts if part.finite)
            waiting = state.fragments[fragment].waiting_of(number)
            assert waiting is None or waiting.start == ledger.taken_to


def check_snapshots(world: World, state: State, copies: Copies, entries: list[Entry]) -> None:
    """Replay the log from a state, and from snapshots of each fragment at different versions."""
    rng = random.Random(len(world.log))
    begun = State.decode(rng.choice(world.states)) if world.states else State()
    if begun.facts is None:
        return
    records = records_of(world.log[begun.sequence :])
    chosen = list[Shared]()
    for fragment, shared in enumerate(copies.shared):
        one = shared[
            rng.choice([key for key in shared if key >= begun.fragments[fragment].version])
        ]
        heads = {
            entry.close.version: digest(encode(entry.close))
            for entry in entries
            if entry.close.fragment == fragment
        }
        head = heads.get(one.version, begun.fragments[fragment].head)
        assert begun.adopt(fragment, (one.version, head, one.checksum), records)
        assert not begun.adopt(fragment, (one.version, "other", one.checksum), records)
        chosen.append(one)
    again = Copies(chosen)
    toy.replay(world.log, again, world.fetch, begun)
    assert toy.fingerprint(begun) == toy.fingerprint(state)
    for fragment in range(world.plan.fragments):
        assert again.newest(fragment) == copies.newest(fragment)
