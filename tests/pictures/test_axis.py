"""Marks of an axis are round, lie on it, are neither few nor many, and are told apart by their texts."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.pictures.axis import Axis, log_ticks, short, spanned, ticks

VALUES = st.floats(-1e9, 1e9)
SPANS = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)
LOG_SPANS = st.tuples(st.floats(-9, 12), st.floats(0.01, 12)).map(
    lambda pair: (10 ** pair[0], 10 ** (pair[0] + pair[1]))
)
COUNTS = st.integers(3, 10)


@given(SPANS, COUNTS)
def test_ticks_are_even_steps_of_1_2_or_5(span: tuple[float, float], count: int) -> None:
    low, high = span
    found = ticks(low, high, count)
    room = 1e-6 * (high - low)
    assert 1 <= len(found) <= count + 1
    assert low - room <= found[0]
    assert found[-1] <= high + room
    steps = [after - before for before, after in pairwise(found)]
    for step in steps:
        assert step == pytest.approx(steps[0], rel=1e-3)
        leading = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(leading - wanted) for wanted in (1, 2, 5)) < 1e-2


@given(LOG_SPANS, COUNTS)
def test_logarithmic_ticks_lie_within_and_rise(span: tuple[float, float], count: int) -> None:
    low, high = span
    found = log_ticks(low, high, count)
    assert 1 <= len(found) <= 10
    assert all(low * (1 - 1e-6) <= value <= high * (1 + 1e-6) for value in found)
    assert all(before < after for before, after in pairwise(found))


@given(st.one_of(SPANS.map(lambda span: (*span, False)), LOG_SPANS.map(lambda span: (*span, True))))
def test_no_two_marks_have_the_same_text(axis: tuple[float, float, bool]) -> None:
    low, high, log = axis
    marks = Axis(low, high, 0, 100, log).marks()
    assert len({text for _, text in marks}) == len(marks), marks


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0, 1, "0"),
        (1200, 200, "1.2k"),
        (800_000, 200_000, "800k"),
        (1_000_000, 200_000, "1M"),
        (0.25, 0.05, "0.25"),
        (5e-5, 1e-5, "5e-5"),
        (-3e9, 1e9, "-3G"),
        (1.234567, 0, "1.23"),
        (999, 1, "999"),
    ],
)
def test_short_texts(value: float, step: float, text: str) -> None:
    assert short(value, step) == text


@given(st.floats(1e-8, 1e14))
def test_a_short_text_says_the_number(value: float) -> None:
    text = short(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMGT")) * scale == pytest.approx(value, rel=6e-3)


@given(st.lists(st.one_of(VALUES, st.sampled_from([math.nan, math.inf, -math.inf]))), st.booleans())
def test_a_stretch_is_never_empty_and_holds_what_is_finite(values: list[float], log: bool) -> None:
    low, high = spanned(values, log=log, margin=0.05)
    assert low < high
    assert not log or low > 0
    for value in values:
        if math.isfinite(value) and (value > 0 or not log):
            assert low * (1 - 1e-9) - 1e-9 <= value <= high * (
                1 + 1e-9
            ) + 1e-9 or value == pytest.approx(low)


@given(LOG_SPANS, st.booleans())
def test_the_ends_lie_at_the_ends(span: tuple[float, float], log: bool) -> None:
    axis = Axis(*span, start=50, end=10, log=log)
    assert axis.place(span[0]) == pytest.approx(50)
    assert axis.place(span[1]) == pytest.approx(10)
