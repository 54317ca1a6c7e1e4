"""Exact arithmetic in place of tensors: two numbers modulo a prime.

The first is linear: each sample of a slot adds a number of its own, so it tells which samples a
vector contains, and how often. The second is not: it shows any other order of steps, sends and
applies.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from torchtitan_diloco.diloco.schedule import Schedule

PRIME = 2**61 - 1
TOKENS = 7
"""Tokens of a sample."""
LR = 3
MOMENTUM = 5
ROUGH = 8
"""A rough codec rounds down to multiples of this."""


class Vector(NamedTuple):
    linear: int = 0
    mixed: int = 0


START = Vector(0, 17)
ZERO = Vector()


def modular(value: Fraction | float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * pow(denominator, -1, PRIME) % PRIME


def combine(*terms: tuple[int, Vector]) -> Vector:
    """Return the sum of factor * vector."""
    linear = sum(factor * vector.linear for factor, vector in terms)
    mixed = sum(factor * vector.mixed for factor, vector in terms)
    return Vector(linear % PRIME, mixed % PRIME)


def subtract(left: Vector, right: Vector) -> Vector:
    return combine((1, left), (-1, right))


def add(left: Vector, right: Vector) -> Vector:
    return combine((1, left), (1, right))


_sums: dict[int, list[int]] = {}


def work(slot: int, start: int, end: int) -> int:
    """Return the linear part of the work of a range of samples."""
    sums = _sums.setdefault(slot, [0])
    while len(sums) <= end:
        name = (slot + 1) * 1_000_003 + len(sums)
        sums.append((sums[-1] + name * name * name + 12345 * name) % PRIME)
    return (sums[end] - sums[start]) % PRIME


def train(theta: list[Vector], slot: int, sample: int) -> None:
    """Change all fragments in place by a sample. They depend on each other."""
    total = sum(vector.mixed for vector in theta)
    change = total * total + 1000 * sample + slot
    linear = work(slot, sample, sample + 1)
    for fragment, vector in enumerate(theta):
        theta[fragment] = add(vector, Vector(linear, change + fragment))


def encode_delta(theta: Vector, published: Vector) -> Vector:
    """Return the decoded delta: its second number is rounded."""
    delta = subtract(theta, published)
    return Vector(delta.linear, delta.mixed // ROUGH * ROUGH)


def encode_update(change: Vector, is_rough: bool) -> Vector:
    if not is_rough:
        return change
    return Vector(change.linear // ROUGH * ROUGH, change.mixed // ROUGH * ROUGH)


def checksum(vector: Vector) -> str:
    return hashlib.sha256(repr(tuple(vector)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Outer:
    """What the syncer has of a fragment."""

    version: int
    published: Vector
    theta: Vector
    momentum: Vector = ZERO

    def step(self, deltas: Sequence[Vector], weights: Sequence[int], weight_of_all: int) -> "Outer":
        """Make an outer step. The copy stays as it is until an update is published."""
        total = sum(weights)
        if not total:
            return replace(self, version=self.version + 1)
        share = modular(Fraction(total, weight_of_all))
        each = modular(Fraction(1, total))
        mean = combine(*((w * each, delta) for w, delta in zip(weights, deltas, strict=True)))
        momentum = combine((MOMENTUM, self.momentum), (1, mean))
        theta = combine((1, self.theta), (LR * share, mean), (LR * MOMENTUM * share, momentum))
        return Outer(self.version + 1, self.published, theta, momentum)

    def publish(self, is_rough: bool) -> tuple["Outer", Vector]:
        """Return the state with the next copy, and the update that makes it."""
        update = encode_update(subtract(self.theta, self.published), is_rough)
        return replace(self, published=add(self.published, update)), update


def mix(share: float, theta: Vector, published: Vector) -> Vector:
    factor = modular(share)
    return combine((factor, theta), (1 - factor, published))


@dataclass
class Account:
    """What theta - P of a fragment should contain, by the rules in prose.

    After a version with the own part, it contains the share that the local parameters keep of
    (part - change of P + work since the send), and all later work. Other versions do not change it.
    """

    start: int
    """First sample that is in no merged part and not lost. The next part has to begin there."""
    position: int
    """First sample whose work is not in `left`."""
    left: int = 0
    sent: int = 0
    sent_end: int = 0

    def send(self, slot: int, start: int, end: int, linear: int) -> None:
        assert start == self.start, f"the part begins at {start}, and theta at {self.start}"
        expected = (self.left + work(slot, self.position, end)) % PRIME
        assert linear == expected, "the delta does not contain its range"
        self.sent = linear
        self.sent_end = end

    def apply(self, share: float, slot: int, now: int, change: int) -> None:
        """Account for a version with the own part. `change`: of P."""
        kept = modular(share)
        self.left = kept * (self.sent - change + work(slot, self.sent_end, now)) % PRIME
        self.start = self.sent_end
        self.position = now

    def lose(self, now: int) -> None:
        self.start = now
        self.position = now
        self.left = 0


def one_job(
    schedule: Schedule, workers: int, steps: int, alpha: float, batch: int
) -> list[list[Vector]]:
    """Return the versions of each fragment of one job, whose workers are in lockstep."""
    fragments = range(schedule.fragments)
    outer = [Outer(0, START, START) for _ in fragments]
    versions = [[START] for _ in fragments]
    theta = [[START for _ in fragments] for _ in range(workers)]
    in_flight: dict[int, list[Vector]] = {}

    def merge(fragment: int) -> None:
        if fragment not in in_flight:
            return
        stepped = outer[fragment].step(in_flight.pop(fragment), [1] * workers, workers)
        outer[fragment], _ = stepped.publish(is_rough=False)
        versions[fragment].append(outer[fragment].published)
        for worker in theta:
            worker[fragment] = mix(alpha, worker[fragment], outer[fragment].published)

    for step in range(1, steps + 1):
        for slot, worker in enumerate(theta):
            for sample in range(batch * (step - 1), batch * step):
                train(worker, slot, sample)
        for fragment in schedule.applied_at(step) if schedule.delay else ():
            merge(fragment)
        for fragment in schedule.sent_at(step):
            base = outer[fragment].published
            in_flight[fragment] = [encode_delta(worker[fragment], base) for worker in theta]
        for fragment in schedule.applied_at(step) if not schedule.delay else ():
            merge(fragment)
    return versions
