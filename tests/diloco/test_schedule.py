"""Fragments take turns: once in H steps each, in one order, from any step on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diloco.schedule import Schedule, is_dropped, is_measured


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    every = draw(st.integers(1, 40))
    beginning = draw(st.integers(0, 60)), draw(st.integers(1, 9))
    return Schedule(every, draw(st.integers(1, 50)), draw(st.integers(0, every - 1)), *beginning)


@given(schedules(), st.integers(1, 120))
def test_a_walk_through_the_steps(schedule: Schedule, last: int) -> None:
    """Fragments come back in the order of sending, before they are sent again; the rounds counted
    on the way are what the schedule says of the step alone."""
    in_flight: list[tuple[int, int]] = []
    rounds = [0] * schedule.fragments
    for step in range(1, last + 1):
        sent = schedule.sent_at(step)
        applied = schedule.applied_at(step)
        early = schedule.is_average(step)
        delay = 0 if early else schedule.delay
        for fragment in sent:
            cycle = schedule.beginning_every if early else schedule.sync_every
            assert step >= cycle, "the first send waits for a whole cycle"
            assert fragment not in [one for _, one in in_flight] or not delay
            rounds[fragment] += 1
            in_flight.append((step, fragment))
        due = [one for one in in_flight if one[0] == step - delay]
        assert applied == [fragment for _, fragment in due]
        assert in_flight[: len(due)] == due
        del in_flight[: len(due)]
        assert not (early and in_flight), "nothing is in flight when the beginning ends"
    assert rounds == [schedule.outer_round(p, last) for p in range(schedule.fragments)]


@given(schedules())
def test_a_beginning_changes_no_later_turn(schedule: Schedule) -> None:
    plain = replace(schedule, beginning_steps=0)
    first = schedule.beginning_steps + 1
    for step in range(first, first + 2 * schedule.sync_every):
        assert schedule.sent_at(step) == plain.sent_at(step)


def test_the_papers_example() -> None:
    schedule = Schedule(sync_every=100, fragments=2, delay=1)
    sent = {step: schedule.sent_at(step) for step in range(1, 351) if schedule.sent_at(step)}
    assert sent == {100: [0], 150: [1], 200: [0], 250: [1], 300: [0], 350: [1]}
    assert schedule.applied_at(151) == [1]


def test_measured_rounds() -> None:
    for every, rounds in {0: [], 1: [*range(1, 10)], 3: [1, 3, 6, 9], 10: [1]}.items():
        assert [number for number in range(1, 10) if is_measured(number, every)] == rounds


def test_drops_are_drawn_at_the_given_rate() -> None:
    draws = [is_dropped(0.3, 1, m, p, r) for m in range(4) for p in range(5) for r in range(100)]
    assert sum(draws) / len(draws) == pytest.approx(0.3, abs=0.03)
    assert not any(is_dropped(0.0, 1, worker, 0, 1) for worker in range(9))
