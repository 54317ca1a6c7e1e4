"""Fragments take turns: once in H steps each, in one order, from any step on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diloco.schedule import Schedule, is_dropped, is_measured


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    every = draw(st.integers(1, 40))
    return Schedule(every, draw(st.integers(1, 50)), draw(st.integers(0, every - 1)))


@given(schedules(), st.integers(1, 120))
def test_a_walk_through_the_steps(schedule: Schedule, last: int) -> None:
    """Fragments come back in the order of sending, before they are sent again; the rounds counted
    on the way are what the schedule says of the step alone."""
    in_flight: list[int] = []
    rounds = [0] * schedule.fragments
    for step in range(1, last + 1):
        applied = schedule.applied_at(step) if schedule.delay else []
        assert applied == (schedule.sent_at(step - schedule.delay) if schedule.delay else [])
        assert in_flight[: len(applied)] == applied
        del in_flight[: len(applied)]
        for fragment in schedule.sent_at(step):
            assert step >= schedule.sync_every, "the first send waits for a whole cycle"
            assert fragment not in in_flight
            rounds[fragment] += 1
            in_flight += [fragment] * bool(schedule.delay)
    assert rounds == [schedule.outer_round(p, last) for p in range(schedule.fragments)]


def test_the_papers_example() -> None:
    schedule = Schedule(sync_every=100, fragments=2, delay=1)
    sent = {step: schedule.sent_at(step) for step in range(1, 351) if schedule.sent_at(step)}
    assert sent == {100: [0], 150: [1], 200: [0], 250: [1], 300: [0], 350: [1]}
    assert schedule.applied_at(151) == [1]


@pytest.mark.parametrize(
    ("every", "rounds"), [(0, []), (1, [1, 2, 3, 4]), (3, [1, 3, 6]), (10, [1, 10, 20])]
)
def test_measured_rounds(every: int, rounds: list[int]) -> None:
    found = [outer_round for outer_round in range(1, 22) if is_measured(outer_round, every)]
    assert found[: len(rounds)] == rounds
    assert bool(found) == bool(rounds)


def test_drops_are_drawn_at_the_given_rate() -> None:
    draws = [is_dropped(0.3, 1, m, p, r) for m in range(4) for p in range(5) for r in range(100)]
    assert sum(draws) / len(draws) == pytest.approx(0.3, abs=0.03)
    assert not any(is_dropped(0.0, 1, worker, 0, 1) for worker in range(9))
