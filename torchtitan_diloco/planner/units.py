"""Units as people write them: "2Gbit", "25MB/s", "30ms", "90%"."""

import math
import re
from argparse import ArgumentTypeError

_NUMBER = re.compile(r"\s*([\d_,]*\.?\d+(?:e[+-]?\d+)?)\s*([A-Za-zµμ/%]*)\s*", re.IGNORECASE)
_RATE = re.compile(r"([kmgt]?)(i?)(bits?|bytes?|b)(ps|/s)?", re.IGNORECASE)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BANDWIDTHS, DURATIONS = "2Gbit, 200Mbit/s, 25MB/s", "30ms, 0.5s, 250us"


def parse_bandwidth(text: str) -> float:
    """Return bits a second. A bit is `b` or `bit`, a byte `B` or `byte`; a unit is required."""
    number, unit = _split(text, BANDWIDTHS)
    match = _RATE.fullmatch(unit)
    if match is None:
        problem = f'the unit "{unit}" is no bandwidth' if unit else "a bandwidth needs a unit"
        raise ArgumentTypeError(f'"{text}": {problem}; write bits or bytes, as in {BANDWIDTHS}')
    prefix, binary, kind, _ = match.groups()
    is_bytes = kind == "B" or kind.lower().startswith("byte")
    scale = (1024.0 if binary else 1000.0) ** " kmgt".index(prefix.lower() or " ")
    bits = number * scale * (8 if is_bytes else 1)
    if not 1e3 <= bits <= 1e14:
        raise ArgumentTypeError(
            f'"{text}" is not from 1 kbit/s to 100 Tbit/s: check number and unit ({BANDWIDTHS})'
        )
    return bits


def parse_duration(text: str) -> float:
    """Return seconds. A unit is required except for 0."""
    number, unit = _split(text, DURATIONS)
    if number == 0 and not unit:
        return 0.0
    if unit.lower() not in _SECONDS:
        problem = f'the unit "{unit}" is no time' if unit else "a time needs a unit"
        raise ArgumentTypeError(f'"{text}": {problem}; write {DURATIONS}')
    return number * _SECONDS[unit.lower()]


def parse_share(text: str) -> float:
    """Return a share of one, from "0.9" or "90%"."""
    number, unit = _split(text, "0.9, 90%")
    share = number / 100 if unit else number
    if unit not in ("", "%") or share > 1:
        raise ArgumentTypeError(f'"{text}" is no share of one: write 0.9 or 90%')
    return share


def _split(text: str, examples: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    number = float(match[1].replace("_", "").replace(",", "")) if match else math.inf
    if match is None or not math.isfinite(number):
        raise ArgumentTypeError(f'"{text}" is not a number with a unit: write {examples}')
    return number, match[2]


def format_bandwidth(bits_per_second: float) -> str:
    return f"{_with_prefix(bits_per_second)}bit/s"


def format_bytes(count: float) -> str:
    return f"{_with_prefix(count)}B"


def format_duration(seconds: float) -> str:
    """Return four digits with the unit that fits."""
    units = {"days": 86400.0, "h": 3600.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
    for unit, size in units.items():
        least = 2 * size if size > 1 else size
        if least <= seconds < math.inf:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns" if 0 < seconds < math.inf else f"{seconds:g} s"


def _with_prefix(value: float) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if 0.99995 * size <= value < math.inf:  # four digits would round up
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g} "
