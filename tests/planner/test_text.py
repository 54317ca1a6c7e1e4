"""Units: parse, format, refuse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.planner.text import (
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bandwidth,
    parse_duration,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("2Gbit", 2e9),
        ("2 Gbit/s", 2e9),
        ("2gbps", 2e9),
        ("2Gb/s", 2e9),
        ("200Mbit/s", 200e6),
        ("200Mbps", 200e6),
        ("25MB/s", 200e6),
        ("25MBps", 200e6),
        ("25 megabytes".replace("megabytes", "Mbytes"), 200e6),
        ("1.5e3kbit", 1.5e6),
        ("1_000Mbit", 1e9),
        ("1MiB/s", 8 * 2**20),
        ("1Mibit", 2**20),
        (".5Gbit", 0.5e9),
    ],
)
def test_bits_and_bytes(text: str, bits: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bits)


@given(st.floats(1e3, 9e13))
def test_bandwidths_come_back(bits: float) -> None:
    assert parse_bandwidth(format_bandwidth(bits)) == pytest.approx(bits, rel=1e-3)


@given(st.floats(1e3, 1e13))
def test_byte_rates_come_back(count: float) -> None:
    assert parse_bandwidth(f"{format_bytes(count)}/s") / 8 == pytest.approx(count, rel=1e-3)


@given(st.floats(1e-9, 7000.0))
def test_durations_come_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-3)


def test_long_times() -> None:
    assert format_duration(86400 * 3) == "3 days"
    assert format_duration(10 * 3600) == "10 h"
    assert format_duration(math.inf) == "inf s"


def test_durations_and_shares() -> None:
    assert parse_duration("30ms") == pytest.approx(0.03)
    assert parse_duration("250 us") == parse_duration("250µs") == pytest.approx(250e-6)
    assert parse_duration("0") == 0
    assert parse_share("95%", "x") == parse_share("0.95", "x") == 0.95


@pytest.mark.parametrize(
    "text",
    [
        "200",
        "2Gfoo",
        "2",
        "Gbit",
        "",
        "-2Gbit",
        "2 Gbit per hour",
        "fast",
        "1bit",
        "0Gbit",
        "1e30Gbit",
    ],
)
def test_unclear_bandwidths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="200Mbit") as refused:
        parse_bandwidth(text, "--bandwidth")
    assert f'--bandwidth "{text}"' in str(refused.value)


@pytest.mark.parametrize("text", ["30", "30mbit", "ms", "", "-30ms", "1e999s"])
def test_unclear_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="30ms"):
        parse_duration(text, "--latency")


@pytest.mark.parametrize("text", ["90 percent", "x", "5ms"])
def test_unclear_shares_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90%"):
        parse_share(text, "--jitter")
