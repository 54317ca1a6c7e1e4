"""Parse and format quantities with units: "2Gbit", "25MB/s", "30ms"."""

import re
from argparse import ArgumentTypeError

_BANDWIDTH = re.compile(r"(\d*\.?\d+)\s*([kmgt]?)(bits?|bytes?|b)(?:ps|/s)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d*\.?\d+)\s*(|us|ms|s)", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def parse_bandwidth(text: str) -> float:
    """Return bits per second. A unit is required: `b` or `bit`, `B` or `byte`."""
    if match := _BANDWIDTH.fullmatch(text.strip()):
        number, prefix, kind = match.groups()
        is_bytes = kind == "B" or kind.lower().startswith("byte")
        scale = 1000.0 ** " kmgt".index(prefix.lower() or " ")
        return float(number) * scale * (8 if is_bytes else 1)
    raise ArgumentTypeError(f'"{text}" is no bandwidth: give 2Gbit, 200Mbit/s or 25MB/s')


def parse_duration(text: str, default_unit: str = "") -> float:
    """Return seconds. A unit is required, unless there is a default."""
    if (match := _DURATION.fullmatch(text.strip())) and (unit := match[2].lower() or default_unit):
        return float(match[1]) * _SECONDS[unit]
    raise ArgumentTypeError(f'"{text}" is no time: give number and unit, as in 30ms or 0.5s')


def quantity(value: float, unit: str) -> str:
    """Return four digits with a prefix: `2 Gbit/s`, `30 ms`."""
    for prefix, size in _PREFIXES.items():
        if value >= 0.99995 * size:  # four digits would round up
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
