"""A simulated process of the syncer: it drives the shipped machine, with toy tensors."""

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.islands.rules.toy import Outer, Vector, add, checksum
from tests.islands.rules.world import Process, Thread
from torchtitan_diloco.islands.rules.commit import (
    CallFailedError,
    Get,
    List,
    Outcome,
    StandBy,
    commit,
)
from torchtitan_diloco.islands.rules.decision import Fate
from torchtitan_diloco.islands.rules.founding import StrayDecisionError, WentBackError
from torchtitan_diloco.islands.rules.jobs import (
    Adopt,
    Commit,
    DeleteObjects,
    Fetch,
    Job,
    Load,
    MergeParts,
    Record,
    Settle,
    Snapshot,
    Upload,
)
from torchtitan_diloco.islands.rules.names import (
    CHANGE,
    COPY,
    FOUND,
    ISLAND,
    PART,
    RUN,
    VERSION,
    Object,
    founding_name,
    history_name,
    incarnation_of,
    part_name,
    run_name,
)
from torchtitan_diloco.islands.rules.note import MOST_NOTE, Part
from torchtitan_diloco.islands.rules.syncer import Syncer

if TYPE_CHECKING:
    from tests.islands.rules.simulation import Simulation

POLL, TICK, SWEEP = 0.2, 0.15, 5.0
"""The sweep of real syncers comes once a minute."""


class SyncerProcess(Process):
    def __init__(self, simulation: "Simulation", name: str) -> None:
        super().__init__(simulation.world, name)
        self.simulation = simulation
        self.machine: Syncer | None = None
        self.begun_at = 0
        self.term = 0
        """How often it has led. Threads of earlier terms end."""
        self.outers: dict[int, Outer] = {}
        self.merged: dict[int, Outer] = {}
        """States of versions that do not count yet, beside the ones before them."""
        self.fetched: dict[tuple[str, Part], Any] = {}
        self.prepared: dict[tuple[str, int, int], Any] = {}
        self.fragment_jobs: dict[int, deque[Thread]] = {}
        self.spawn(self.stand_by())

    def fail(self, error: WentBackError) -> None:
        """The store was put back: end, and be started again."""
        assert self.simulation.restores, error
        self.is_alive = False
        if isinstance(error, StrayDecisionError):
            self.world.store.delete(error.name)
        self.simulation.went_back += 1
        self.simulation.start_syncer(after=1.0)

    def stand_by(self) -> Thread:
        stand_by = StandBy()
        while True:
            try:
                if (yield from self.drive(stand_by.watch(self.now))):
                    break
            except CallFailedError:
                pass
            yield POLL * 2
        decision = stand_by.newest
        self.term += 1
        self.outers = {}
        self.merged = {}
        self.prepared = {}
        self.fragment_jobs = {}
        self.fetched = {}
        session = f"{self.world.random.getrandbits(64):016x}"
        self.machine = Syncer(decision, session, self.now, self.world.now)
        self.begun_at = 0 if decision is None else decision.number
        self.simulation.terms += 1
        for thread in (self.poll(), self.ticks(), self.sweeps()):
            self.spawn(self.in_term(thread))

    def in_term(self, thread: Thread) -> Thread:
        """End a thread when its term ends."""
        term = self.term
        for seconds in thread:
            yield seconds
            if self.term != term or self.machine is None:
                return

    def resign(self) -> None:
        """Drop all that is known, and stand by."""
        self.machine = None
        self.term += 1
        self.simulation.superseded += 1
        self.spawn(self.stand_by())

    # --- threads ----------------------------------------------------------------------------------

    def poll(self) -> Thread:
        while self.machine is not None:
            try:
                names = yield from self.call(List(ISLAND))
                for name in self.machine.choose_notes(names):
                    raw = self.world.store.look(name)  # all at once, in the same round trip
                    incarnation = incarnation_of(name)
                    if raw is not None and incarnation is not None:
                        self.machine.on_note(incarnation, raw[: MOST_NOTE + 1])
                if self.machine.state is None or not self.machine.state.is_founded:
                    yield from self.read_foundings()
                self.machine.on_poll(self.now)
                for name in self.machine.choose_changes((yield from self.call(List(CHANGE)))):
                    raw = yield from self.call(Get(name))
                    if raw is not None:
                        self.machine.on_change(name, raw)
            except CallFailedError:
                pass
            yield POLL

    def read_foundings(self) -> Thread:
        for name in (yield from self.call(List(FOUND))):
            incarnation = incarnation_of(name)
            if incarnation is None or name != founding_name(incarnation):
                continue
            raw = yield from self.call(Get(name))
            if raw is not None and self.machine is not None:
                self.machine.on_founding(incarnation, raw)

    def ticks(self) -> Thread:
        while self.machine is not None:
            for job in self.machine.tick(self.now):
                self.begin(job)
            yield TICK

    def sweeps(self) -> Thread:
        while self.machine is not None:
            try:
                names = list[str]()
                for prefix in ("version/", "copy/", "outer/", PART, ISLAND, FOUND, RUN):
                    names += yield from self.call(List(prefix))
            except CallFailedError:
                yield 1.0
                continue
            for name in self.machine.garbage(names):
                self.simulation.check_garbage(name)
                self.world.store.delete(name)
            yield SWEEP

    # --- jobs -------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        match job:
            case Commit():
                self.spawn(self.in_term(self.commit(job)))
            case Adopt():
                self.spawn(self.in_term(self.adopt(job)))
            case Fetch():
                self.spawn(self.in_term(self.fetch(job)))
            case Upload():
                self.spawn(self.in_term(self.upload(job.stored)))
            case Record():
                self.spawn(self.in_term(self.record(job)))
            case Settle():
                self.settle(job)
            case DeleteObjects():
                if self.simulation.kills_after.intersection(job.names):
                    self.simulation.kills_after.difference_update(job.names)
                    self.is_alive = False
                    self.simulation.start_syncer(after=1.0)
                    return
                for name in job.names:
                    self.simulation.check_garbage(name)
                    self.world.store.delete(name)
            case Load():
                self.enqueue(job.fragment, self.load(job))
            case MergeParts():
                self.enqueue(job.fragment, self.merge(job))
            case Snapshot():
                self.enqueue(job.fragment, self.snapshot(job))

    def enqueue(self, fragment: int, thread: Thread) -> None:
        """Do the jobs of a fragment in order."""
        jobs = self.fragment_jobs.setdefault(fragment, deque())
        jobs.append(thread)
        if len(jobs) == 1:
            self.spawn(self.in_term(self.work(jobs)))

    def work(self, jobs: "deque[Thread]") -> Thread:
        while jobs:
            yield from jobs[0]
            jobs.popleft()

    def commit(self, job: Commit) -> Thread:
        outcome: Outcome = yield from self.drive(commit(job.number, job.content))
        if self.machine is None:
            return
        if outcome is Outcome.SUPERSEDED:
            self.resign()
            return
        self.machine.on_committed()
        if self.machine.has_stopped:
            self.is_alive = False

    def record(self, job: Record) -> Thread:
        yield from self.put(history_name(job.number), job.content)
        assert self.machine is not None
        self.machine.on_recorded(job.number)

    def settle(self, job: Settle) -> None:
        """The newest version counts. One that did not would have to be computed again."""
        state = self.merged.pop(job.fragment, None)
        assert state is not None
        assert state.version == job.version
        self.outers[job.fragment] = state

    def adopt(self, job: Adopt) -> Thread:
        yield self.world.plan.upload
        copies = list[Vector]()
        for fragment in range(len(job.founding.shapes)):
            name = founding_name(job.incarnation, fragment)
            content = yield from self.patient(Get(name))
            copies += [] if content is None else [content]
        assert self.machine is not None
        is_whole = [checksum(copy) for copy in copies] == job.founding.checksums
        if is_whole:
            self.outers = {f: Outer(0, copy, copy) for f, copy in enumerate(copies)}
            for fragment, copy in enumerate(copies):
                self.prepared[COPY, fragment, 0] = copy
        self.machine.on_adopted(job.incarnation, job.founding, is_whole)

    def load(self, job: Load) -> Thread:
        yield self.world.plan.upload
        objects = dict[Object, Any]()
        for stored in (job.copy, *job.versions, *([job.outer] if job.outer else [])):
            objects[stored] = yield from self.read(stored)
            if objects[stored] is None:
                # A syncer was killed before it could withdraw a decision: somebody deletes it.
                assert self.simulation.restores, f"{stored.name} is named and gone"
                self.world.store.delete(run_name(self.begun_at))
                raise WentBackError(f"{stored.name} is gone")
        published: Vector = objects[job.copy]
        for stored in job.versions:
            published = add(published, objects[stored])
        assert checksum(published) == job.checksum, "a takeover makes another copy"
        version = job.versions[-1].version if job.versions else job.copy.version
        outer = Outer(version, published, published)
        if job.outer is not None:
            saved = objects[job.outer]
            is_newest = saved.version == version
            theta = saved.theta if is_newest else published
            outer = Outer(version, published, theta, saved.momentum)
            self.simulation.is_exact &= is_newest
        else:
            self.simulation.is_exact &= version == 0
        self.outers[job.fragment] = outer
        assert self.machine is not None
        self.machine.on_loaded(job.fragment)

    def read(self, stored: Object) -> Generator[float, None, Any]:
        for _ in range(6):
            content = yield from self.patient(Get(stored.name))
            if content is not None:
                return content
            yield 0.5  # not visible yet
        return None

    def fetch(self, job: Fetch) -> Thread:
        part = job.part
        yield self.world.plan.upload
        name = part_name(job.incarnation, part.fragment, part.number)
        fate = Fate.UNREADABLE
        for _ in range(10):
            payload = yield from self.patient(Get(name))
            if payload is not None:
                fate = Fate.NONE
                self.fetched[job.incarnation, part] = payload
                break
            yield 0.3  # not visible yet
        assert self.machine is not None
        self.machine.on_part(job.incarnation, part, fate)

    def merge(self, job: MergeParts) -> Thread:
        yield self.world.random.uniform(0, 0.05)
        assert self.machine is not None
        payloads = [
            self.fetched[waiting_part.incarnation, waiting_part.part] for waiting_part in job.parts
        ]
        if not self.machine.on_norms(job.fragment, [payload.norm for payload in payloads]):
            return
        for waiting_part in job.parts:
            del self.fetched[waiting_part.incarnation, waiting_part.part]
        if any(self.simulation.overflows(waiting_part.part) for waiting_part in job.parts):
            self.machine.on_merged(job.fragment, job.version, None)
            return
        weights = [waiting_part.part.weight for waiting_part in job.parts]
        before = self.outers[job.fragment]
        assert before.version == job.version - 1
        stepped = before.step([payload.delta for payload in payloads], weights, job.weight_of_all)
        outer, update = stepped.publish(self.world.plan.is_rough)
        assert job.fragment not in self.merged, "two versions beside the one that counts"
        self.merged[job.fragment] = outer
        self.prepared[VERSION, job.fragment, job.version] = update
        self.simulation.merges[self.machine.session, job.fragment, job.version] = job
        self.machine.on_merged(job.fragment, job.version, checksum(outer.published))

    def snapshot(self, job: Snapshot) -> Thread:
        yield 0.01
        outer = self.merged.get(job.fragment, self.outers[job.fragment])
        assert outer.version == job.version
        self.prepared[COPY, job.fragment, job.version] = outer.published
        self.prepared["outer", job.fragment, job.version] = outer
        assert self.machine is not None
        self.machine.on_snapshot(job.fragment, job.version)

    def upload(self, stored: Object) -> Thread:
        assert self.machine is not None
        content = self.prepared.pop((stored.kind, stored.fragment, stored.version))
        self.simulation.check_upload(stored, self.machine.session)
        factor = 1 if stored.kind == VERSION else 4
        yield self.simulation.upload_seconds * factor
        if (yield from self.put(stored.name, content)):
            self.machine.on_uploaded(stored)
        else:
            assert self.simulation.restores, f"{stored.name} has another content"
            self.resign()
