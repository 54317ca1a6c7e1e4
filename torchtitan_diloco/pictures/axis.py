"""An axis: which stretch of numbers it shows, where on it a number lies, and at which round numbers it has marks."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

LARGEST = 1e250
"""Beyond, and below its inverse, floating-point numbers cannot be reckoned with."""


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    start: float
    """Where `low` lies in the picture."""
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (
                math.log(self.high) - math.log(self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def marks(self, count: int = 5) -> list[tuple[float, str]]:
        """Round numbers with their texts."""
        values = (
            log_ticks(self.low, self.high, count) if self.log else ticks(self.low, self.high, count)
        )
        steps = [after - before for before, after in itertools.pairwise(values)]
        if self.log:  # far apart below, so each has digits of its own
            return [
                (value, short(value, min(step, value)))
                for value, step in zip(values, [*steps, *steps[-1:]], strict=True)
            ]
        return [(value, short(value, min(steps))) for value in values]


def spanned(
    values: Iterable[float],
    *,
    log: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    margin: float = 0.0,
) -> tuple[float, float]:
    """From the lowest to the highest value and a margin, a share of the distance; `limits` that are given count instead.
    Never an empty stretch."""
    finite = [value for value in values if has_place(value, log=log)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0) if log else (0.0, 1.0)
    if log:
        low, high = math.log(low), math.log(high)
    room = margin * (high - low)
    low, high = low - room, high + room
    if log:
        low, high = math.exp(low), math.exp(high)
    low = low if limits[0] is None else limits[0]
    high = high if limits[1] is None else limits[1]
    if log and high <= low * 1.0001:
        return low / 2, low * 2
    if not log and high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / LARGEST):
        room = 0.1 * abs(low) or 1.0
        return (low, low + room) if limits[0] is not None else (low - room, low + room)
    return low, high


def has_place(value: float, *, log: bool) -> bool:
    """On an axis. NaN and the infinities have none, and on a logarithmic one what is not positive."""
    return 1 / LARGEST <= value <= LARGEST if log else abs(value) <= LARGEST


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most `count` + 1 multiples of a step of 1, 2 or 5 times a power of ten, between `low` and `high`."""
    step = _round_step((high - low) / count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [_tidy(number * step) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten, all or every n-th; where there are few, 2 and 5 times them as well; where even those are few, `ticks`."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    decades = last - first + 1
    if decades >= 3:
        every = math.ceil(decades / (count + 1))
        return [_power(exponent) for exponent in range(first, last + 1) if exponent % every == 0]
    fine = [
        factor * _power(exponent)
        for exponent in range(first - 1, last + 1)
        for factor in (1.0, 2.0, 5.0)
        if low * (1 - 1e-9) <= factor * _power(exponent) <= high * (1 + 1e-9)
    ]
    return [_tidy(value) for value in fine] if len(fine) >= 3 else ticks(low, high, count)


def short(value: float, step: float = 0.0) -> str:
    """`1.2M`, `35k`, `0.25`, `5e-5`: as many digits as numbers need that are `step` apart (0: three digits)."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    step = abs(step) or 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    size = max(abs(value), 0.0)
    if size < 1e-3:
        exponent = math.floor(math.log10(size) + 1e-12)
        return f"{_fixed(value / _power(exponent), step / _power(exponent))}e{exponent}"
    for scale, suffix in SUFFIXES:
        if size >= scale * (1 - 1e-9) and size >= 1000:
            return _fixed(value / scale, step / scale) + suffix
    return _fixed(value, step)


def _fixed(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{value:.{min(decimals, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_step(least: float) -> float:
    exponent = math.floor(math.log10(least))
    candidates: Sequence[float] = [factor * _power(exponent) for factor in (1, 2, 5, 10)]
    return next(candidate for candidate in candidates if candidate >= least * (1 - 1e-9))


def _power(exponent: int) -> float:
    return float(f"1e{exponent}")


def _tidy(value: float) -> float:
    """Without the dust of binary fractions: 0.3, not 0.30000000000000004."""
    return float(f"{value:.12g}")
