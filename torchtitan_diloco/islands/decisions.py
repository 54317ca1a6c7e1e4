"""What an island does between two steps: its first rank decides, and all ranks follow."""

import time
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from torchtitan_diloco.islands.leader import Leader
from torchtitan_diloco.islands.records import Part
from torchtitan_diloco.islands.rules import Mode, Rounds

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


def take_seat(leader: Leader) -> Seat:
    """Return the place that the leader has taken."""
    island = leader.joined
    facts, versions = island.state.facts, [rounds.applied for rounds in island.rounds]
    assert facts is not None
    place = island.slot, facts.slots, facts.block, island.position
    return Seat(*place, facts.total_tokens, island.clock, versions)


def decide(leader: Leader, delay: int, ranks: int) -> Iterator[Decision]:
    """Yield what is due at this boundary, one after the other. Each is done before the next."""
    island = leader.joined
    if delay:
        yield from _due_applies(leader)
    for fragment, rounds in enumerate(island.rounds):
        with leader.changed:
            due = rounds.send_is_due(time.monotonic())
            part = leader.begin_part(fragment) if due else None
        if part is not None:
            yield Send(msgspec.structs.replace(part, ranks=ranks))
    if not delay:
        yield from _due_applies(leader)
    with leader.changed:
        over = island.stopped and leader.is_over()
        boundary = Boundary(island.clock, island.stopped, over)
    yield boundary


def _due_applies(leader: Leader) -> Iterator[Decision]:
    for fragment, rounds in enumerate(leader.joined.rounds):
        while (decision := _due_apply(leader, fragment, rounds)) is not None:
            yield decision
            with leader.changed:
                rounds.finish_apply(time.monotonic())


def _due_apply(leader: Leader, fragment: int, rounds: Rounds) -> Apply | None:
    """Return the next entry to apply, or wait for it as long as the rules say."""
    with leader.changed:
        while (mode := rounds.next_mode()) is None:
            until, now = rounds.wait_until(), time.monotonic()
            if until is None or now >= until:
                return None
            leader.check()
            leader.changed.wait(min(until - now, LOOK))
        entry = rounds.unapplied[0]
        own = entry.part_of(leader.incarnation)
        others = [part for part in entry.parts if part is not own]
        return Apply(
            fragment,
            entry.close.version,
            mode,
            number=0 if own is None else own.number,
            weight=0 if own is None else own.weight,
            participants=sum(weight > 0 for weight in entry.close.weights),
            received=sum(chunk.size for part in others for chunk in part.chunks),
        )
