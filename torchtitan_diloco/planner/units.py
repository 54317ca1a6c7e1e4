"""Bandwidths and times as people write them, "2Gbit", "25MB/s", "30ms", and back.

Bits and bytes are told apart by the letter (b, bit / B, byte, any case but for that one letter), prefixes are powers of ten
(k M G T) or, with an i, of 1024 (Ki Mi Gi Ti). A bare number has no unit and is refused: nobody could tell Mbit from MB.
"""

import math
import re

_WORD = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*([A-Za-zµμ/%]*)\s*")
_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_AMOUNT = re.compile(
    r"(ki|mi|gi|ti|k|m|g|t|)(bits?|bytes?|b)(?:ps|/s|/sec|/second|)", re.IGNORECASE
)
_SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "h": 3600.0,
}  # fmt: skip

BANDWIDTH_EXAMPLES = "2Gbit, 200Mbit/s, 25MB/s"
DURATION_EXAMPLES = "30ms, 0.5s, 250us"
SLOWEST_BITS, FASTEST_BITS = 1e3, 1e14
"""Outside of a kilobit and a hundred terabits a second a bandwidth is a slip of the pen."""


def parse_bandwidth(text: str, name: str = "bandwidth") -> float:
    """Bits a second."""
    number, unit = _split(text, name, BANDWIDTH_EXAMPLES)
    amount = _AMOUNT.fullmatch(unit)
    if amount is None:
        problem = f'the unit "{unit}" is no bandwidth' if unit else "a bandwidth needs a unit"
        raise ValueError(
            f'{name} "{text}": {problem}; write bits or bytes a second, such as {BANDWIDTH_EXAMPLES}'
        )
    prefix, kind = amount.group(1), amount.group(2)
    is_bytes = kind == "B" or kind.lower().startswith("byte")
    bits = number * _PREFIXES[prefix.lower()] * (8 if is_bytes else 1)
    if not SLOWEST_BITS <= bits <= FASTEST_BITS:
        raise ValueError(
            f'{name} "{text}" is {bits:g} bits a second, and links have {format_bandwidth(SLOWEST_BITS)} to '
            f"{format_bandwidth(FASTEST_BITS)}: check number and unit ({BANDWIDTH_EXAMPLES})"
        )
    return bits


def parse_byte_rate(text: str, name: str) -> float:
    """Bytes a second, of what is no link: GB/s of memory or of coding."""
    return parse_bandwidth(text, name) / 8


def parse_duration(text: str, name: str = "time") -> float:
    """Seconds. A bare number is refused, too, but for 0, which is the same in all units."""
    number, unit = _split(text, name, DURATION_EXAMPLES)
    if number == 0 and not unit:
        return 0.0
    if unit.lower() not in _SECONDS:
        problem = f'the unit "{unit}" is no time' if unit else "a time needs a unit"
        raise ValueError(f'{name} "{text}": {problem}; write {DURATION_EXAMPLES}')
    return number * _SECONDS[unit.lower()]


def parse_share(text: str, name: str) -> float:
    """A share of one: "0.9" or "90%"."""
    number, unit = _split(text, name, "0.9, 90%")
    if unit not in ("", "%"):
        raise ValueError(f'{name} "{text}": the unit "{unit}" is no share; write 0.9 or 90%')
    return number / 100 if unit else number


def format_bandwidth(bits_per_second: float) -> str:
    """In bits a second, four digits: "1.25 Gbit/s"."""
    return f"{_with_prefix(bits_per_second)}bit/s"


def format_bytes(count: float) -> str:
    return f"{_with_prefix(count)}B"


def format_duration(seconds: float) -> str:
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.4g} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.4g} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def _split(text: str, name: str, examples: str) -> tuple[float, str]:
    word = _WORD.fullmatch(text)
    if word is None:
        raise ValueError(f'{name} "{text}": not a number with a unit; write {examples}')
    number = float(word.group(1).replace("_", "").replace(",", "") + (word.group(2) or ""))
    if not math.isfinite(number):
        raise ValueError(f'{name} "{text}": too large for a number; write {examples}')
    return number, word.group(3)


def _with_prefix(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} "
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.99995 * size:  # what four digits would round up
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g} "
