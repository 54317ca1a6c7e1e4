"""Units: parse, format, refuse."""

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.planner.units import parse_bandwidth, parse_duration, parse_share, quantity

BANDWIDTHS = {
    "2 Gbit/s": 2e9,
    "2gbps": 2e9,
    "2Gb/s": 2e9,
    "25MB/s": 200e6,
    "25 Mbytes": 200e6,
    "1.5e3kbit": 1.5e6,
    "1_000Mbit": 1e9,
    "1MiB/s": 8 * 2**20,
    ".5Gbit": 0.5e9,
}


@pytest.mark.parametrize("text", BANDWIDTHS)
def test_bits_and_bytes(text: str) -> None:
    assert parse_bandwidth(text) == pytest.approx(BANDWIDTHS[text])


@given(st.floats(1e3, 1e13), st.floats(1e-9, 999.0))
def test_formatted_values_come_back(rate: float, seconds: float) -> None:
    assert parse_bandwidth(quantity(rate, "bit/s")) == pytest.approx(rate, rel=1e-3)
    assert parse_bandwidth(quantity(rate, "B/s")) / 8 == pytest.approx(rate, rel=1e-3)
    assert parse_duration(quantity(seconds, "s")) == pytest.approx(seconds, rel=1e-3)


def test_durations_and_shares() -> None:
    assert parse_duration("250 us") == parse_duration("250µs") == pytest.approx(250e-6)
    assert parse_duration("0") == 0
    assert parse_duration("0.3", default_unit="s") == 0.3
    assert parse_share("95%") == parse_share("0.95") == 0.95


@pytest.mark.parametrize(
    "text", ["2", "2Gfoo", "Gbit", "", "-2Gbit", "2 Gbit per hour", "1bit", "0Gbit", "1e30Gbit"]
)
def test_unclear_bandwidths_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f'"{text}".*200Mbit'):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["30", "30mbit", "ms", "", "-30ms", "1e999s"])
def test_unclear_times_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="30ms"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["90 percent", "x", "5ms", "300%"])
def test_unclear_shares_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="90%"):
        parse_share(text)
