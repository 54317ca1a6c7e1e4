"""Exact arithmetic in place of tensors: vectors modulo a prime.

Component 0 is not linear: it shows any other order of steps, sends and applies. Each sample adds 1
to a component of its own, so a vector tells which samples it contains.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.ledger import Entry, Mode
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.records import AnyRecord, Part, VoidError, decode, digest

PRIME = 2**61 - 1
TOKENS = 7
"""Tokens of a sample."""
LR, MOMENTUM = 3, 5

Vector = dict[int, int]


def inverse(value: int) -> int:
    return pow(value, -1, PRIME)


def modular(fraction: float) -> int:
    """Return a fraction of small numbers, such as an alpha of 0.25, modulo the prime."""
    numerator, denominator = fraction.as_integer_ratio()
    return numerator * inverse(denominator) % PRIME


def combine(*terms: tuple[int, Vector]) -> Vector:
    """Return the sum of factor * vector."""
    total: Vector = {}
    for factor, vector in terms:
        for key, value in vector.items():
            total[key] = (total.get(key, 0) + factor * value) % PRIME
    return {key: value for key, value in total.items() if value}


def component(slot: int, sample: int) -> int:
    return 1 + slot * 1_000_000 + sample


def train(theta: list[Vector], slot: int, sample: int) -> None:
    """Change all fragments in place by a sample. They depend on each other."""
    total = sum(vector.get(0, 0) for vector in theta)
    key = component(slot, sample)
    for fragment, vector in enumerate(theta):
        change = total * total + 1000 * sample + slot + fragment
        vector[0] = (vector.get(0, 0) + change) % PRIME
        vector[key] = vector.get(key, 0) + 1


def encode_delta(theta: Vector, shared: Vector) -> Vector:
    """Return the decoded delta: component 0 loses its last bits."""
    delta = combine((1, theta), (-1, shared))
    return {**delta, 0: delta.get(0, 0) // 8 * 8}


@dataclass
class Shared:
    """Shared copy of a fragment and its momentum."""

    version: int = 0
    theta: Vector = field(default_factory=lambda: {0: 17})
    momentum: Vector = field(default_factory=dict)

    def advance(self, deltas: Sequence[Vector], weights: Sequence[int]) -> "Shared":
        total = sum(weights)
        if not total:
            return Shared(self.version + 1, self.theta, self.momentum)
        terms = [(w * inverse(total), delta) for w, delta in zip(weights, deltas, strict=True)]
        mean = combine(*terms)
        momentum = combine((MOMENTUM, self.momentum), (1, mean))
        theta = combine((1, self.theta), (LR, mean), (LR * MOMENTUM, momentum))
        return Shared(self.version + 1, theta, momentum)

    @property
    def checksum(self) -> str:
        return digest(repr((self.version, sorted(self.theta.items()))).encode())[:16]


def apply(mode: Mode, theta: Vector, old: Vector, new: Vector, alpha: float) -> Vector:
    if mode is Mode.ADD:
        return combine((1, theta), (1, new), (-1, old))
    share = 0 if mode is Mode.RESET else modular(mode.share(alpha))
    return combine((share, theta), (1 - share, new))


@dataclass
class Expected:
    """Expected content of the next delta of a fragment, sample by sample.

    After an entry with the own part, it contains the remaining share of the local parameters times
    (part - change of the shared copy + work since the send), and all later work. Other entries do
    not change it. With a share of 0, or an outer step that adopts the part unchanged, it contains
    only work that was in no part.
    """

    left: Vector = field(default_factory=dict)
    """Without the work from `position` on."""
    position: int = 0
    sent: Vector = field(default_factory=dict)
    """The latest part."""
    end: int = 0
    """First sample after that part."""

    def send(self, slot: int, end: int, delta: Vector) -> None:
        """Assert that a delta is as expected. Component 0, which is not linear, is not compared."""
        found = {key: value for key, value in delta.items() if key}
        assert found == combine((1, self.left), (1, work(slot, self.position, end)))
        self.sent, self.end = found, end

    def apply(self, share: float, slot: int, now: int, change: Vector) -> None:
        """Account for an entry with the own part.

        `share`: remaining share of the local parameters. `now`: first sample not trained on yet.
        `change`: change of the shared copy.
        """
        kept = modular(share)
        terms = (kept, self.sent), (-kept, change), (kept, work(slot, self.end, now))
        self.left = {key: value for key, value in combine(*terms).items() if key}
        self.position = now


def work(slot: int, start: int, end: int) -> Vector:
    """Return the change from training on a range of samples, without component 0."""
    return {component(slot, sample): 1 for sample in range(start, end)}


class Copies:
    """Shared copies of all versions, as computed from entries by one process."""

    def __init__(self, snapshots: Sequence[Shared]) -> None:
        self.shared = [{one.version: one} for one in snapshots]

    def newest(self, fragment: int) -> Shared:
        return self.shared[fragment][max(self.shared[fragment])]

    def advance(self, state: State, entry: Entry, fetch: Callable[[Part], Vector]) -> None:
        """Compute the version of an entry, unless it is before the snapshot."""
        fragment, version = entry.close.fragment, entry.close.version
        if version > min(self.shared[fragment]):
            deltas = [fetch(part) for part in entry.parts]
            made = self.shared[fragment][version - 1].advance(deltas, entry.close.weights)
            self.shared[fragment][version] = made
            state.learn(fragment, version, made.checksum)


def replay(
    log: Sequence[bytes], copies: Copies, fetch: Callable[[Part], Vector], state: State
) -> list[Entry]:
    """Read the rest of a log with its own copies. Return the entries."""
    entries = list[Entry]()
    for sequence, raw in enumerate(log[state.sequence :], start=state.sequence + 1):
        outcome = state.read(sequence, raw)
        if outcome.entry is not None:
            copies.advance(state, outcome.entry, fetch)
            entries.append(outcome.entry)
    return entries


def fingerprint(state: State) -> str:
    """Hash a state, without the checksums of versions that it has not read yet."""
    read = State.decode(state.encode())
    for one in read.fragments:
        one.checksums = {key: found for key, found in one.checksums.items() if key <= one.version}
    return hashlib.sha256(read.encode()).hexdigest()


def one_world(
    schedule: Schedule, workers: int, steps: int, alpha: float, batch: int
) -> list[Shared]:
    """Return the final shared copies of workers in lockstep, as in `tests/diloco/reference.py`."""
    fragments = range(schedule.fragments)
    shared = [Shared() for _ in fragments]
    theta = [[dict(shared[p].theta) for p in fragments] for _ in range(workers)]
    in_flight: dict[int, list[Vector]] = {}
    weights = [0] * schedule.fragments
    in_flight_weights = dict[int, int]()

    def merge(fragment: int) -> None:
        if fragment not in in_flight:
            return
        weight = in_flight_weights[fragment]
        new = shared[fragment].advance(in_flight.pop(fragment), [weight] * workers)
        for worker in theta:
            old = shared[fragment].theta
            worker[fragment] = apply(Mode.MIX, worker[fragment], old, new.theta, alpha)
        shared[fragment] = new

    for step in range(1, steps + 1):
        for slot, worker in enumerate(theta):
            for sample in range(batch * (step - 1), batch * step):
                train(worker, slot, sample)
        weights = [weight + batch * TOKENS for weight in weights]
        if schedule.delay:
            for fragment in schedule.applied_at(step):
                merge(fragment)
        for fragment in schedule.sent_at(step):
            base = shared[fragment].theta
            in_flight[fragment] = [encode_delta(worker[fragment], base) for worker in theta]
            in_flight_weights[fragment], weights[fragment] = weights[fragment], 0
        if not schedule.delay:
            for fragment in schedule.applied_at(step):
                merge(fragment)
    for fragment in list(in_flight):
        merge(fragment)
    return shared


def records_of(log: list[bytes]) -> list[AnyRecord]:
    found = []
    for raw in log:
        with suppress(VoidError):
            found.append(decode(raw))
    return found
