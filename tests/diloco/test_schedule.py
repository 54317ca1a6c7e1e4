"""Fragments take turns: once in H steps each, in one order, from any step on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diloco.schedule import Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    every = draw(st.integers(1, 40))
    return Schedule(every, draw(st.integers(1, 50)), draw(st.integers(0, every - 1)))


@given(schedules(), st.integers(0, 100))
def test_each_fragment_is_sent_once_in_every_cycle(schedule: Schedule, start: int) -> None:
    first = 2 * schedule.sync_every + start
    window = [
        fragment
        for step in range(first, first + schedule.sync_every)
        for fragment in schedule.sent_at(step)
    ]
    assert sorted(window) == list(range(schedule.fragments))


@given(schedules())
def test_the_first_send_waits_for_a_whole_cycle(schedule: Schedule) -> None:
    for step in range(1, schedule.sync_every):
        assert schedule.sent_at(step) == []
    for fragment in range(schedule.fragments):
        first = schedule.first_send(fragment)
        assert schedule.sync_every <= first < 2 * schedule.sync_every
        assert fragment in schedule.sent_at(first)
        assert (first - schedule.offset(fragment)) % schedule.sync_every == 0


@given(schedules(), st.integers(1, 200))
def test_applied_is_what_was_sent_tau_steps_ago(schedule: Schedule, step: int) -> None:
    assert schedule.applied_at(step) == schedule.sent_at(step - schedule.delay)


@given(schedules(), st.integers(1, 120))
def test_a_walk_through_the_steps(schedule: Schedule, step: int) -> None:
    """Fragments come back in the order of sending, before they are sent again; the rounds that a run has counted on its way are
    what the schedule says of the step alone."""
    flying: list[int] = []
    rounds = [0] * schedule.fragments
    for now in range(1, step + 1):
        applied = schedule.applied_at(now) if schedule.delay else []
        assert flying[: len(applied)] == applied, "applied in the order of sending"
        del flying[: len(applied)]
        for fragment in schedule.sent_at(now):
            assert fragment not in flying, "a fragment is back before it is sent again"
            rounds[fragment] += 1
            if schedule.delay:
                flying.append(fragment)
    assert [
        schedule.outer_round(fragment, step) for fragment in range(schedule.fragments)
    ] == rounds


def test_the_papers_example() -> None:
    schedule = Schedule(sync_every=100, fragments=2, delay=1)
    sent = {step: schedule.sent_at(step) for step in range(1, 351) if schedule.sent_at(step)}
    assert sent == {100: [0], 150: [1], 200: [0], 250: [1], 300: [0], 350: [1]}
    assert schedule.applied_at(151) == [1]


def test_several_fragments_in_flight() -> None:
    schedule = Schedule(sync_every=8, fragments=4, delay=5)
    sent = [fragment for step in range(10, 15) for fragment in schedule.sent_at(step)]
    applied = [fragment for step in range(10, 15) for fragment in schedule.applied_at(step)]
    assert (sent, applied) == ([1, 2, 3], [0]), (
        "after step 14 the one of step 8 is back, and three are under way"
    )


@pytest.mark.parametrize("delay", [-1, 10, 11])
def test_a_delay_that_does_not_fit(delay: int) -> None:
    with pytest.raises(ValueError, match=rf"overlap.delay = {delay} .*sync_every = 10"):
        Schedule(10, 2, delay)
