"""Parse and format quantities with units: "2Gbit", "25MB/s", "30ms", "90%"."""

import math
import re
from argparse import ArgumentTypeError

_NUMBER = r"\s*([\d_]*\.?\d+(?:e[+-]?\d+)?)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([kmgt]?)(i?)(bits?|bytes?|b)(?:ps|/s)?\s*", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"([a-zµμ]*)\s*", re.IGNORECASE)
_SHARE = re.compile(_NUMBER + r"(%?)\s*", re.IGNORECASE)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
BANDWIDTHS = "2Gbit, 200Mbit/s or 25MB/s"


def parse_bandwidth(text: str) -> float:
    """Return bits per second. A unit is required: `b` or `bit`, `B` or `byte`."""
    if match := _BANDWIDTH.fullmatch(text):
        number, prefix, binary, kind = match.groups()
        is_bytes = kind == "B" or kind.lower().startswith("byte")
        scale = (1024.0 if binary else 1000.0) ** " kmgt".index(prefix.lower() or " ")
        bits: float = float(number) * scale * (8 if is_bytes else 1)
        if 1e3 <= bits <= 1e14:
            return bits
    reason = "no bandwidth from 1 kbit/s to 100 Tbit/s: write number and unit, as in"
    raise ArgumentTypeError(f'"{text}" is {reason} {BANDWIDTHS}')


def parse_duration(text: str, default_unit: str = "") -> float:
    """Return seconds. A unit is required, except for 0 and with a default."""
    if match := _DURATION.fullmatch(text):
        number, unit = float(match[1]), match[2].lower() or default_unit
        if math.isfinite(number) and (unit in _SECONDS or (number == 0 and not unit)):
            return number * _SECONDS.get(unit, 0.0)
    raise ArgumentTypeError(f'"{text}" is no time: write number and unit, as in 30ms or 0.5s')


def parse_share(text: str) -> float:
    """Return a share of one, such as 0.9 for "0.9" or "90%"."""
    if match := _SHARE.fullmatch(text):
        share = float(match[1]) / (100 if match[2] else 1)
        if share <= 1:
            return share
    raise ArgumentTypeError(f'"{text}" is no share of one: write 0.9 or 90%')


def quantity(value: float, unit: str) -> str:
    """Return four digits with a prefix: `2 Gbit/s`, `30 ms`."""
    for prefix, size in _PREFIXES.items():
        if 0.99995 * size <= value < math.inf:  # four digits would round up
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
