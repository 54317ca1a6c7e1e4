"""What is done about an island that is late or wrong again and again."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.islands.plan import Nature, Plan
from tests.islands.process import Process
from tests.islands.simulation import World, check
from tests.islands.test_overview import read_log
from torchtitan_diloco.diloco.flags import NOT_FINITE
from torchtitan_diloco.islands.actions import (
    IN_A_ROW,
    Conduct,
    Seen,
)
from torchtitan_diloco.islands.ledger import WITHOUT_WORK, Fragment, Ledger, Slot, count_vote
from torchtitan_diloco.islands.records import Evict, VoidError

ANY = st.lists(
    st.tuples(st.sampled_from(Seen), st.integers(1, 60)).map(lambda pair: [pair[0]] * pair[1]),
    max_size=60,
).map(lambda runs: [seen for run in runs for seen in run])
"""Histories, in which the same happens many times in a row."""


def levels(history: list[Seen]) -> list[str]:
    """Return the level after each version of the only fragment."""
    conduct, found = Conduct(1), list[str]()
    for version, seen in enumerate(history, start=1):
        before = conduct.level
        assert conduct.note(seen, version) == (conduct.level != before)
        found.append(conduct.level)
    return found


@given(history=ANY)
def test_levels_change_ever_more_seldom(history: list[Seen]) -> None:
    found = ["", *levels(history)]
    changes = sum(one != other for one, other in pairwise(found))
    # The k-th time with a level lasts for more than IN_A_ROW * 2**k / 2 versions.
    assert changes <= 2 * (math.log2(2 * len(history) / IN_A_ROW + 1) + 1)


@given(
    history=st.lists(st.sampled_from([Seen.IN_TIME, Seen.LATE, Seen.MISSING, Seen.WRONG])),
)
def test_a_healthy_island_is_only_noted(history: list[Seen]) -> None:
    """It may be late or wrong now and then, with parts in time between."""
    healthy = [one for seen in history for one in ([seen] * (IN_A_ROW - 1) + [Seen.IN_TIME])]
    assert set(levels(healthy)) <= {""}


@given(history=ANY)
def test_who_is_well_again_is_waited_for_again(history: list[Seen]) -> None:
    well = [Seen.IN_TIME] * (6 * len(history) + 2 * IN_A_ROW)
    found = levels(history + well)
    assert found[-1] == ""


def test_all_islands_wait_for_one_again_at_the_same_versions() -> None:
    """Also if they have seen it at other times, so that none makes it late for the others."""
    trials = list[set[int]]()
    for begin in (1, 30, 200):
        conduct, waited = Conduct(1), set[int]()
        for version in range(begin, 5000):
            if conduct.note(Seen.MISSING, version) and not conduct.level:
                waited.add(version)
        trials.append(waited)
    rarest = min(trials, key=len)
    assert max(rarest) > 1000
    for waited in trials:
        common = {version for version in rarest if version > min(waited)} & waited
        assert common, trials


# --- votes ----------------------------------------------------------------------------------------


def slots(*good_in: int) -> list[Slot]:
    """Return slots of the owners "0", "1", ... whose work was last merged in these versions."""
    return [
        Slot([Ledger(merged_in=90, good_in=version)], owner=str(number))
        for number, version in enumerate(good_in)
    ]


def vote(all_slots: list[Slot], voter: int, target: int) -> bool:
    record = Evict(
        run="r", slot=voter, incarnation=str(voter), target=str(target), reason="completes no step"
    )
    return count_vote(record, all_slots, [Fragment("", {}, version=100)])


LONG_AGO = 100 - WITHOUT_WORK


def test_an_eviction_needs_two_votes_and_most_of_those_whose_work_is_merged() -> None:
    found = slots(100, 99, 100 - WITHOUT_WORK + 1, LONG_AGO, LONG_AGO)
    assert not vote(found, 0, 3)
    assert not vote(found, 0, 3), "the same vote again"
    assert vote(found, 1, 3), "two of three, as the last island does not work either"
    assert found[3].owner is None
    two = slots(100, LONG_AGO)
    assert not vote(two, 0, 1), "of two islands, nobody knows who is sick"


def test_nobody_evicts_an_island_whose_work_is_merged_or_that_is_new() -> None:
    found = slots(100, 100, 100, LONG_AGO, LONG_AGO)
    with pytest.raises(VoidError, match="work of 2 was merged lately"):
        vote(found, 0, 2)
    found[3].ledgers[0].since = 95
    with pytest.raises(VoidError, match="work of 3 was merged lately"):
        vote(found, 0, 3)
    with pytest.raises(VoidError, match="no work of its writer"):
        vote(slots(100, LONG_AGO, LONG_AGO), 1, 2)
    with pytest.raises(VoidError, match="cannot be evicted by it"):
        vote(slots(LONG_AGO), 0, 0)
    found[4].done = True
    with pytest.raises(VoidError, match="cannot be evicted by it"):
        vote(found, 0, 4)


# --- in a simulated run ---------------------------------------------------------------------------


def run_with(nature: Nature, **plan: Any) -> tuple[World, Process, list[Process]]:
    """Return the world, before it runs, the sick island, and two others."""
    world = World(Plan(**{"steps": 450, "expiry": 1.0, "patience": 1.0, **plan}))
    others = [world.start(f"i{number}") for number in range(2)]
    return world, world.start("sick", nature), others


@pytest.mark.parametrize("nature", [Nature(hangs_at=60), Nature(never_finite_from=60)])
def test_a_sick_island_is_evicted_and_comes_back_when_it_is_well(nature: Nature) -> None:
    """The others go on meanwhile, without waiting for it."""
    world, sick, others = run_with(nature, action="evict")
    hangs, idle, flags = nature.hangs_at > 0, list[float](), list[int]()

    def heal_if_evicted() -> None:
        if sick.failed:
            nature.hangs_at = nature.never_finite_from = -1
            idle.extend(other.idle for other in others)
            flags.extend(other.machine.others.flags[sick.incarnation] for other in others)
        else:
            world.after(0.1, heal_if_evicted)

    world.after(0.1, heal_if_evicted)
    world.run()
    state, entries = check(world)
    assert state.evicted == [sick.incarnation]
    again = world.processes[-1].incarnation
    assert again.startswith("sick/")
    parts = [part for entry in entries for part in entry.parts if part.incarnation == again]
    assert len(parts) > 20
    assert all(part.finite for part in parts)
    said = [str(one) for one in others[0].machine.actions if one.what == "evicted"]
    reason = "completes no step" if hangs else "has wrong numbers"
    assert said == [f"sick: evicted: it {reason}", "sick: evicted is over"]
    _, history, _ = read_log(world.log)
    assert history.stays[sick.incarnation].ended == "evicted"
    assert "sick is evicted" in [text for _, text in history.news]
    assert max(idle) < 1.0
    assert flags == [0 if hangs else NOT_FINITE] * 2
    assert not any(other.machine.others.flags[again] for other in others)
    assert not any(other.failed for other in others)


def test_who_stays_sick_is_evicted_ever_more_seldom() -> None:
    sick = Nature(never_finite_from=12)
    world, _, _ = run_with(sick, action="evict", fragments=1, steps=600)
    world.run()
    state, _ = check(world)
    names = [one.split("/")[0] for one in state.evicted]
    assert set(names) == {"sick"}
    assert 2 <= len(names) <= 1 + math.log2(world.now / world.plan.patience)


@pytest.mark.parametrize("action", ["note", "wait_less"])
def test_by_default_nobody_is_evicted(action: str) -> None:
    world, sick, others = run_with(Nature(never_finite_from=60), action=action, steps=400)
    world.run()
    state, _ = check(world)
    assert state.evicted == []
    assert not sick.failed
    told = [str(one) for one in others[0].machine.actions]
    assert any("left out: its parts were wrong in 8 versions" in one for one in told) == (
        action == "wait_less"
    )


def test_who_hangs_does_not_keep_the_others_from_the_end() -> None:
    world, sick, others = run_with(Nature(hangs_at=20), steps=60)
    world.run(until=60.0)
    state, _ = check(world)
    assert state.ended
    assert not any(one.failed for one in others)
    assert sick.machine.step == 20


def test_rounds_do_not_wait_again_and_again_for_who_is_late() -> None:
    """Its parts are merged, as without the action."""
    idle, merged = dict[str, float](), dict[str, int]()
    for action in ("note", "wait_less"):
        plan = {"slots": 2, "begin": 2, "floor": 0.5, "action": action, "steps": 400}
        world = World(Plan(**plan))  # type: ignore[arg-type]
        fast, slow = world.start("fast"), world.start("slow", Nature(upload=2.5))
        world.run()
        state, _ = check(world)
        idle[action] = fast.idle
        merged[action] = state.slots[slow.machine.slot].ledgers[0].merged
    assert idle["wait_less"] < 0.7 * idle["note"]
    assert merged["wait_less"] > 0.8 * merged["note"]


def test_nothing_is_said_of_an_island_that_is_gone() -> None:
    world = World(Plan(slots=3, begin=3, floor=0.5, action="wait_less", steps=400))
    one, slow, _ = world.start("one"), world.start("slow", Nature(upload=2.5)), world.start("other")
    said = list[list[str]]()

    def leave() -> None:
        said.append(one.machine.others.standing())
        slow.leaving = True

    world.after(40.0, leave)
    world.run()
    assert said == [["slow: not waited for"]]
    last = [action for action in one.machine.actions if action.culprit == "slow"][-1]
    assert (last.evidence, last.over) == ("it is gone", True)
    assert one.machine.others.standing() == []
