"""Virtual time, threads and a store of a simulation. Everything is drawn from one seed."""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from torchtitan_diloco.islands.rules.commit import (
    Call,
    CallFailedError,
    Create,
    Delete,
    Get,
    List,
    Sleep,
)
from torchtitan_diloco.islands.rules.founding import WentBackError

Thread: TypeAlias = Generator[float, None, Any]
"""Yields the seconds that it sleeps."""


class Process:
    """Something that is killed or paused with all its threads, and has a clock of its own."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.paused_until = 0.0
        self.cut_until = 0.0
        self.rate = world.random.choice(world.plan.rates)
        self.offset = world.random.uniform(0, 1e5)
        self.calls = 0
        """Calls of the store so far."""
        self.dies_at = -1.0
        """It dies before its n-th call, or after it for n + 0.5."""

    @property
    def now(self) -> float:
        return self.offset + self.rate * self.world.now

    def spawn(self, thread: Thread, after: float = 0.0) -> None:
        self.world.schedule(after, self, lambda: self._resume(thread))

    def _resume(self, thread: Thread) -> None:
        try:
            seconds = next(thread)
        except StopIteration:
            return
        except WentBackError as error:
            self.fail(error)
            return
        self.world.schedule(seconds, self, lambda: self._resume(thread))

    def fail(self, error: WentBackError) -> None:
        """End with an error for people."""
        raise error

    def call(self, call: Call) -> Generator[float, None, Any]:
        """Do a call of the store."""
        if isinstance(call, Sleep):
            yield call.seconds
            return None
        self.calls += 1
        if self.calls == self.dies_at:
            self.is_alive = False
            yield 0.0
        result = yield from self.world.store.do(call, self)
        if self.calls + 0.5 == self.dies_at:
            self.is_alive = False
            yield 0.0
        return result

    def drive(self, calls: Generator[Call, Any, Any]) -> Generator[float, None, Any]:
        """Do what a generator of the shipped code yields."""
        try:
            call = next(calls)
            while True:
                try:
                    result = yield from self.call(call)
                except CallFailedError as error:
                    call = calls.throw(error)
                else:
                    call = calls.send(result)
        except StopIteration as end:
            return end.value

    def put(self, name: str, content: object) -> Generator[float, None, bool]:
        """Create an object of tensors, as often as it takes. Return whether it has this content."""
        while True:
            self.calls += 1
            try:
                return (yield from self.world.store.write(name, content, self, replaces=False))
            except CallFailedError:
                yield 0.5

    def patient(self, call: Call) -> Generator[float, None, Any]:
        """Repeat a call until it succeeds."""
        while True:
            try:
                result = yield from self.call(call)
            except CallFailedError:
                yield 0.5
            else:
                return result


@dataclass
class Plan:
    """Settings of a simulation."""

    sync_every: int = 6
    fragments: int = 2
    delay: int = 1
    alpha: float = 0.0
    batch: int = 2
    steps: int = 40
    """Length of the run if `start_with` islands train in lockstep."""
    slots: int = 4
    start_with: int = 2
    grace: float = 0.5
    slot_seconds: float = 8.0
    norm_limit: float = 20.0
    is_rough: bool = True
    copies_every: int = 8
    step: float = 0.3
    latency: tuple[float, float] = (0.002, 0.02)
    rates: tuple[float, ...] = (1.0,)
    failing: float = 0.0
    """Probability that a call fails. A third of those has its effect, a third has it later."""
    lag: float = 0.0
    """Probability that an object is visible up to a second late."""
    upload: float = 0.02
    """Seconds of an object of the syncer."""
    commit_seconds: float = 0.05
    phases: tuple[float, ...] = ()
    bin_seconds: float = 5.0


@dataclass
class Entry:
    content: Any
    visible_at: float
    before: Any = None
    """Content that is visible until then."""


class Store:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.entries: dict[str, Entry] = {}
        self.away_until = 0.0
        self.age = 0
        """How often it was put back. What is under way then is lost."""
        self.most = 0
        """Largest number of objects."""
        self.on_create: Callable[[str, Any], None] = lambda *_: None
        self.on_delete: Callable[[str], None] = lambda _: None

    def put(self, name: str, content: Any, *, replaces: bool) -> bool:
        """Return whether the object holds this content now."""
        known = self.entries.get(name)
        if known is not None and not replaces:
            return bool(known.content == content)
        world = self.world
        lag = world.random.uniform(0, 1) if world.random.random() < world.plan.lag else 0.0
        before = None if known is None else known.content
        self.entries[name] = Entry(content, world.now + lag, before)
        self.most = max(self.most, len(self.entries))
        return True

    def look(self, name: str) -> Any:
        entry = self.entries.get(name)
        if entry is None:
            return None
        return entry.content if entry.visible_at <= self.world.now else entry.before

    def names(self, prefix: str, after: str = "") -> list[str]:
        names = (name for name in self.entries if name.startswith(prefix) and name > after)
        return sorted(name for name in names if self.look(name) is not None)

    def delete(self, name: str) -> None:
        if self.entries.pop(name, None) is not None:
            self.on_delete(name)

    def _write(self, name: str, content: Any, replaces: bool) -> bool:
        is_new = name not in self.entries
        is_done = self.put(name, content, replaces=replaces)
        if is_new:
            self.on_create(name, content)
        return is_done

    def write(
        self, name: str, content: Any, process: Process, *, replaces: bool
    ) -> Generator[float, None, bool]:
        """Create or replace. A call may fail without an effect, with it, or before it."""
        world = self.world
        yield from self._travel(process)
        if world.random.random() < world.plan.failing:
            how = world.random.choice(["no", "done", "later"])
            if how == "done":
                self._write(name, content, replaces)
            elif how == "later":
                age = self.age

                def land() -> None:
                    if self.age == age:
                        self._write(name, content, replaces)

                world.schedule(world.random.uniform(0, 3), None, land)
            raise CallFailedError(f"the write of {name} failed")
        done = self._write(name, content, replaces)
        yield world.latency()
        return done

    def do(
        self, call: Create | Get | List | Delete, process: Process
    ) -> Generator[float, None, Any]:
        if isinstance(call, Create):
            return (yield from self.write(call.name, call.content, process, replaces=False))
        yield from self._travel(process)
        if self.world.random.random() < self.world.plan.failing:
            raise CallFailedError("a call failed")
        result: Any = None
        if isinstance(call, Delete):
            self.delete(call.name)
        elif isinstance(call, Get):
            result = self.look(call.name)
        else:
            result = self.names(call.prefix, call.after)
        yield self.world.latency()
        return result

    def _travel(self, process: Process) -> Generator[float, None, None]:
        yield self.world.latency()
        if self.world.now < max(self.away_until, process.cut_until):
            yield 0.3
            raise CallFailedError("no connection")


class World:
    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.random = random.Random(seed)
        self.now = 0.0
        self.store = Store(self)
        self.events = 0
        self._queue: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._number = count()

    def latency(self) -> float:
        return self.random.uniform(*self.plan.latency)

    def schedule(self, seconds: float, process: Process | None, action: Callable[[], None]) -> None:
        """`process`: the actor. A dead one does nothing, and a paused one acts later."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), process, action))

    def run(self, is_over: Callable[[], bool], until: float) -> bool:
        """Run until it is over, and return whether it is."""
        while self._queue and self.now < until:
            at, _, process, action = heapq.heappop(self._queue)
            self.now = at
            self.events += 1
            if process is not None and not process.is_alive:
                continue
            if process is not None and at < process.paused_until:
                self.schedule(process.paused_until - at, process, action)
                continue
            action()
            if self.events % 16 == 0 and is_over():
                return True
        return is_over()
