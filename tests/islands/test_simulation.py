"""Promises of islands (docs/islands-reference.md), in simulated networks with faults."""

import os
import random
from itertools import product
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.islands import toy
from tests.islands.plan import Nature, Plan
from tests.islands.process import Process
from tests.islands.simulation import World, check
from torchtitan_diloco.islands import actions, ledger
from torchtitan_diloco.islands.ledger import Entry
from torchtitan_diloco.islands.records import Change, Evict, Part

PHASES = [Phase.explicit, Phase.generate]
"""Shrinking a failure would take minutes. All is drawn from a seed that the failure names."""


# --- lockstep -------------------------------------------------------------------------------------


@settings(max_examples=15, phases=PHASES)
@given(
    plan=st.builds(
        Plan,
        begin=st.sampled_from([2, 3]),
        delay=st.sampled_from([0, 1, 5]),
        alpha=st.sampled_from([0.0, 0.5]),
        fragments=st.integers(1, 3),
        doubled=st.sampled_from([0.0, 0.5]),
        latency=st.sampled_from([(0.002, 0.02), (0.15, 0.2)]),
        steps=st.just(60),
        floor=st.just(1.0),
    ),
    jitter=st.sampled_from([0.0, 0.04]),
    seed=st.integers(0, 999),
)
def test_lockstep_is_one_world(plan: Plan, jitter: float, seed: int) -> None:
    """A latency of two steps must not make each opening later than the one before."""
    world = World(plan, seed)
    islands = [world.start(f"i{number}", Nature(jitter=jitter)) for number in range(plan.begin)]
    world.run()
    check(world)
    expected = toy.one_world(plan.schedule, plan.begin, plan.steps, plan.alpha, plan.batch)
    for island in islands:
        assert [island.copies.newest(p) for p in range(plan.fragments)] == expected
        assert island.machine.step == plan.steps


@pytest.mark.parametrize("later", [0.15, 0.35, 1.75, 2.55])
def test_islands_that_begin_apart_do_not_wait_for_each_other_in_every_round(later: float) -> None:
    """The turns of one are some steps after the openings of the other."""
    world = World(Plan(slots=2, begin=1, floor=5.0, steps=300))
    islands = [world.start("i0"), world.start("i1", at=later)]
    world.run()
    check(world)
    assert sum(island.idle for island in islands) <= 2 * world.plan.floor


# --- faults ---------------------------------------------------------------------------------------


FAULTS = ("kill", "pause", "cut", "away", "leave", "twin", "change", "flip", "garbage", "votes")
SIMULATIONS = int(os.environ.get("SIMULATIONS", "25"))
"""Runs with any faults. Thousands: SIMULATIONS=5000 ./run_tests.sh -k any_faults --timeout 0"""


def inject(world: World, fault: str, rng: random.Random) -> None:
    living = [one for one in world.processes if one.alive and not one.finished]
    if not living:
        return
    victim = rng.choice(living)
    number = len(world.processes)
    if fault == "kill":
        victim.alive = False
        world.start(f"again{number}", victim.nature, at=rng.uniform(0.1, 3))
    elif fault == "pause":
        victim.pause(rng.uniform(0.5, 6))
    elif fault == "cut":
        victim.cut(rng.uniform(0.5, 6))
    elif fault == "away":
        for process in living:
            process.cut(3.0)
    elif fault == "leave":
        victim.leaving = True
        world.start(f"after{number}", victim.nature, at=rng.uniform(1, 4))
    elif fault == "flip" and victim.training and not victim.is_flipped:
        victim.flip()
    elif fault == "change":
        every, slots = str(rng.choice([3, 4, 9])), str(rng.choice([4, 5]))
        key, value = rng.choice([("diloco.sync_every", every), ("slots", slots)])
        world.append(Change(run="r1", key=key, value=value))
    elif fault == "votes":
        owners = next(iter(living)).state.owners()
        for (slot, voter), target in product(owners.items(), owners.values()):
            vote = Evict(run="r1", slot=slot, incarnation=voter, target=target, reason="is sick")
            world.append(vote)
    elif fault == "twin":
        world.start(victim.incarnation.split("/")[0], victim.nature)
    else:
        world.append_raw(rng.choice([b"", b"\xff", b"{}", world.log[-1]]))


@settings(max_examples=SIMULATIONS, phases=PHASES)
@given(
    faults=st.lists(st.tuples(st.floats(0, 12), st.sampled_from(FAULTS)), max_size=8),
    plan=st.builds(
        Plan,
        delay=st.sampled_from([0, 1, 4]),
        alpha=st.sampled_from([0.0, 0.25, 0.75]),
        loss=st.sampled_from([0.0, 0.2]),
        doubled=st.sampled_from([0.0, 0.2]),
        steps=st.just(60),
        action=st.sampled_from(["note", "wait_less", "evict"]),
    ),
    without_work=st.sampled_from([2, 16]),
    seed=st.integers(0, 999),
)
def test_any_faults(
    faults: list[tuple[float, str]], plan: Plan, without_work: int, seed: int
) -> None:
    """`without_work`: versions until an island may be evicted, also a healthy one if all vote."""
    world = World(plan, seed)
    rng = random.Random(seed)
    for number in range(3):
        nature = Nature(
            step=rng.choice([0.1, 0.1, 0.3]),
            jitter=rng.choice([0, 0.09]),
            upload=rng.choice([0.02, 0.5]),
            bad=rng.choice([0, 0.1]),
            not_finite_at=rng.choice([-1, 15]),
            never_finite_from=rng.choice([-1, -1, 30]) if number == 0 else -1,
        )
        world.start(f"i{number}", nature, at=rng.uniform(0, 1))
    for at, fault in faults:
        world.after(at, lambda fault=fault: inject(world, fault, rng))  # type: ignore[misc]
    with (
        patch.object(actions, "WITHOUT_WORK", without_work),
        patch.object(ledger, "WITHOUT_WORK", without_work),
    ):
        world.run()
        check(world)


@settings(max_examples=40, phases=PHASES)
@given(
    effect=st.integers(1, 60),
    after=st.sampled_from([0.0, 0.5]),
    delay=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_a_death_before_and_after_everything_it_sends(
    effect: int, after: float, delay: int, seed: int
) -> None:
    """The first ones are a take, chunks, parts, openings and closes of all fragments."""
    world = World(Plan(delay=delay, steps=30, slots=2, begin=2), seed)
    dying = world.start("dying", Nature(dies_at=effect + after))
    world.start("other")
    again: list[Process] = []

    def return_if_dead() -> None:
        if not dying.alive:
            again.append(world.start("dying"))
        else:
            world.after(0.5, return_if_dead)

    world.after(0.5, return_if_dead)
    world.run()
    state, _ = check(world)
    assert state.ended
    assert dying.alive or again[0].finished


@settings(max_examples=30, phases=PHASES)
@given(
    leaves_at=st.floats(0.5, 5.0),
    delay=st.sampled_from([0, 1, 5]),
    upload=st.sampled_from([0.01, 0.3]),
    is_replaced=st.booleans(),
    seed=st.integers(0, 99),
)
def test_an_island_that_leaves_sends_all_its_work(
    leaves_at: float, delay: int, upload: float, is_replaced: bool, seed: int
) -> None:
    """Also what it has trained since a part that waits for the other one's, and also if another
    island takes the slot at once."""
    world = World(Plan(delay=delay, steps=60, slots=2, begin=2), seed)
    leaver = world.start("leaver")
    world.start("other", Nature(upload=upload))
    world.after(leaves_at, lambda: setattr(leaver, "leaving", True))
    if is_replaced:
        world.start("next", at=leaves_at)
    world.run()
    state, entries = check(world)
    slot = state.slots[leaver.machine.slot]
    assert state.ended
    assert is_replaced or slot.owner is None
    for fragment, found in enumerate(slot.ledgers):
        parts = [one for entry in entries for one in entry.parts if one.fragment == fragment]
        ends = [one.end for one in parts if one.incarnation == leaver.incarnation]
        assert max(ends) == leaver.machine.position
        assert not found.lost
        assert is_replaced or found.taken_to == leaver.machine.position


def entries_between(world: World, begin: float, end: float) -> list[Entry]:
    return [entry for at, entry in world.entries if begin <= at < end]


def test_an_outage_longer_than_the_keys_live() -> None:
    """Nobody closes alone because it has not heard of the others yet. Clocks are hours apart."""
    world = World(Plan(steps=150, expiry=2.0))
    islands = [world.start(f"i{number}") for number in range(3)]
    for number, island in enumerate(islands):
        world.after(4.0, lambda i=island, n=number: i.cut(5 + 0.4 * n))  # type: ignore[misc]
    world.run()
    check(world)
    assert entries_between(world, 4.1, 9.1) == []
    after = entries_between(world, 9.1, 12.0)
    assert {entry.close.fragment for entry in after} == {0, 1}
    assert {len(entry.parts) for entry in after} == {3}
    assert all(island.idle < 2.0 for island in islands)


def test_a_paused_island_goes_on_and_the_others_do_not_wait() -> None:
    world = World(Plan(steps=150, slots=2, begin=2, expiry=2.0))
    paused, other = (world.start(f"i{number}") for number in range(2))
    world.after(4.0, lambda: paused.pause(8))
    world.run()
    check(world)
    assert len(entries_between(world, 7.0, 12.0)) > 10
    assert other.idle < 3.0
    assert other.machine.notices == ["island i0 is silent: rounds do not wait for it"]
    assert other.machine.news[-1] == "island i0 sends heartbeats again"
    woken = entries_between(world, 12.0, 14.0)
    assert {len(entry.parts) for entry in woken[2:]} == {2}
    alone = [one for one in woken if len(one.parts) == 1]
    assert all(one.close.incarnation == other.incarnation for one in alone)


@pytest.mark.parametrize("sender_dies", [True, False])
def test_a_waiting_part_whose_sender_or_whose_peers_die(sender_dies: bool) -> None:
    """No round is open when they die: a slow upload has missed it."""
    world = World(Plan(steps=60, slots=2, begin=2))
    slow, fast = world.start("slow", Nature(upload=0.45)), world.start("fast")
    watched = slow if sender_dies else fast

    def strike() -> None:
        waiting = slow.state.fragments and slow.state.fragments[0].waiting
        if not waiting or slow.state.fragments[0].open is not None or world.now < 2:
            world.after(0.01, strike)
            return
        watched.alive = False
        parts.extend(waiting.values())

    parts: list[Part] = []
    world.after(1.0, strike)
    world.run()
    check(world)
    assert not watched.alive
    taken = [part for _, entry in world.entries for part in entry.parts]
    assert parts
    assert all(part in taken for part in parts)


def test_settings_change_and_a_run_grows_after_its_end() -> None:
    """All islands change at the same record, also those that join later with the old settings."""
    plan = Plan(sync_every=12, steps=120, begin=2, fragments=4)
    world = World(plan)
    islands = [world.start(f"i{number}") for number in range(2)]
    world.after(4.0, lambda: world.append(Change(run="r1", key="diloco.sync_every", value="4")))
    late, turns = world.start("i2", at=6.0), set[int]()

    def look() -> None:
        turns.update(rounds.turn for rounds in islands[0].machine.rounds)

    world.after(4.05, look)
    world.run()
    assert len(turns) == plan.fragments, "they take turns in the new cycle, too"
    before = len(entries_between(world, 1.0, 4.0))
    assert before < len(entries_between(world, 7.0, 10.0)) / 2
    first, _ = check(world)
    assert late.machine.timing.schedule.sync_every == 4
    total = str(2 * plan.facts.total_tokens)
    world.append(Change(run="r1", key="total_tokens", value=total))
    for island in (*islands, late):
        world.start(island.incarnation.split("/")[0], at=1.0)
    world.run()
    again, _ = check(world)
    assert first.ended
    assert again.ended
    assert min(again.clocks) > 1.9 * min(first.clocks)
