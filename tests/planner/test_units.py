"""Units: parse, format, refuse."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.planner.units import parse_bandwidth, parse_duration, quantity


def test_units_that_people_write() -> None:
    for text, bits in {
        "2 Gbit/s": 2e9,
        "2gbps": 2e9,
        "2Gb/s": 2e9,
        "25MB/s": 200e6,
        "25 Mbytes": 200e6,
        ".5Gbit": 0.5e9,
    }.items():
        assert parse_bandwidth(text) == pytest.approx(bits)
    assert parse_duration("250 us") == pytest.approx(250e-6)
    assert parse_duration("0.3", default_unit="s") == 0.3


@given(st.floats(1e3, 1e13), st.floats(1e-6, 999.0))
def test_formatted_values_come_back(rate: float, seconds: float) -> None:
    assert parse_bandwidth(quantity(rate, "bit/s")) == pytest.approx(rate, rel=1e-3)
    assert parse_bandwidth(quantity(rate, "B/s")) / 8 == pytest.approx(rate, rel=1e-3)
    assert parse_duration(quantity(seconds, "s")) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("parse", "texts", "remedy"),
    [
        (parse_bandwidth, "2;2Gfoo;Gbit;;-2Gbit;2 Gbit per hour", "200Mbit"),
        (parse_duration, "30;30mbit;ms;;-30ms", "30ms"),
    ],
)
def test_unclear_values_are_refused(parse: Callable[[str], float], texts: str, remedy: str) -> None:
    for text in texts.split(";"):
        with pytest.raises(ArgumentTypeError, match=f'"{text}".*{remedy}'):
            parse(text)
