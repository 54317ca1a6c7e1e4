"""The clock of an island, which learning rates follow."""

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.islands.rules.clock import Clock


class Steps(NamedTuple):
    tokens: int
    is_decided: bool


class Version(NamedTuple):
    merged: int
    latest_tokens: int
    """Expected tokens that it does not contain."""
    islands: int


STEPS = st.builds(Steps, st.integers(0, 100), st.booleans())
VERSIONS = st.builds(Version, st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 4))


def begun(merged: int) -> Clock:
    clock = Clock()
    clock.stand_at(merged)
    clock.begin(2)
    return clock


def change(clock: Clock, event: Steps | Version) -> None:
    if isinstance(event, Steps):
        clock.advance(event.tokens, is_decided=event.is_decided)
    else:
        expected = max(0, clock.expected_tokens - event.latest_tokens)
        clock.apply(event.merged, expected, event.islands)


@given(st.integers(0, 1000), st.lists(STEPS | VERSIONS, max_size=20))
def test_it_never_goes_back_and_reading_it_changes_nothing(
    merged: int, events: list[Steps | Version]
) -> None:
    clock = begun(merged)
    shown = [clock.tokens]
    for event in events:
        change(clock, event)
        shown.append(clock.tokens)
    assert all(before <= after for before, after in pairwise(shown))
    unread = begun(merged)
    for event in events:
        change(unread, event)
    assert unread.tokens == shown[-1]


def test_before_the_island_trains_it_shows_the_merged_tokens_even_if_they_are_fewer() -> None:
    clock = Clock()
    for merged in (0, 50, 20):
        clock.stand_at(merged)
        assert clock.tokens == merged
