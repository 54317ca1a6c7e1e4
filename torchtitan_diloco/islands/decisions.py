"""What an island does between two steps: its first rank decides, and all ranks follow."""

import time
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from torchtitan_diloco.islands.leader import Leader
from torchtitan_diloco.islands.records import Part
from torchtitan_diloco.islands.rules import Mode

LOOK = 0.1
"""Seconds after which a wait is thought over: the connection may be gone."""


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """The place of an island in the run."""

    slot: int
    slots: int
    block: int
    position: int
    total_tokens: int
    """Length of the run, as its first island has set it."""
    clock: int
    versions: list[int]
    """Of the fragments, with which the island begins."""


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Take the delta of a fragment, for this part."""

    part: Part


class Apply(msgspec.Struct, frozen=True, array_like=True, tag="apply"):
    """Change the parameters by the next version of a fragment."""

    fragment: int
    version: int
    mode: Mode
    number: int
    """Number of the own part in it, 0 if there is none."""
    weight: int
    participants: int
    received: int
    """Bytes of the others' parts."""


class Boundary(msgspec.Struct, frozen=True, array_like=True, tag="boundary"):
    """All that is due at this boundary has been done."""

    clock: int
    stopped: bool
    over: bool
    """The island has nothing more to send or to apply."""


Decision: TypeAlias = Send | Apply | Boundary


def decide(leader: Leader, delay: int, ranks: int) -> Iterator[Decision]:
    """Yield what is due at this boundary, one after the other. Each is done before the next."""
    fragments = range(len(leader.joined.syncs))
    if delay:
        yield from _due_applies(leader, fragments)
    for fragment in fragments:
        with leader.changed:
            due = leader.joined.send_is_due(fragment, time.monotonic())
            part = leader.begin_part(fragment) if due else None
        if part is not None:
            yield Send(msgspec.structs.replace(part, ranks=ranks))
    if not delay:
        yield from _due_applies(leader, fragments)
    with leader.changed:
        island = leader.joined
        boundary = Boundary(island.clock, island.stopped, island.stopped and leader.is_over())
    yield boundary


def _due_applies(leader: Leader, fragments: range) -> Iterator[Decision]:
    for fragment in fragments:
        while (decision := _due_apply(leader, fragment)) is not None:
            yield decision
            with leader.changed:
                leader.joined.finish_apply(fragment, time.monotonic())


def _due_apply(leader: Leader, fragment: int) -> Apply | None:
    """Return the next entry to apply, or wait for it as long as the rules say."""
    with leader.changed:
        island = leader.joined
        while (mode := island.next_mode(fragment)) is None:
            until, now = island.wait_until(fragment), time.monotonic()
            if until is None or now >= until:
                return None
            leader.check()
            leader.changed.wait(min(until - now, LOOK))
        entry = island.syncs[fragment].unapplied[0]
        own = entry.part_of(leader.incarnation)
        return Apply(
            fragment,
            entry.close.version,
            mode,
            number=0 if own is None else own.number,
            weight=0 if own is None else own.weight,
            participants=sum(weight > 0 for weight in entry.close.weights),
            received=sum(
                chunk.size for part in entry.parts if part is not own for chunk in part.chunks
            ),
        )
