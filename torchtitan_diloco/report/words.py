"""Numbers as people read them."""

import math
from collections.abc import Sequence

from torchtitan_diloco.utils import brief, clock

ABSENT = "–"  # noqa: RUF001 - the dash of a cell in which nothing stands
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SPARKS = "▁▂▃▄▅▆▇█"


def quantity(value: float | None, unit: str) -> str:
    """`1.23 GB`: three digits and the unit."""
    if value is None or not math.isfinite(value):
        return ABSENT if value is None else f"{value} {unit}"
    scale, prefix = next(
        ((scale, prefix) for scale, prefix in PREFIXES if abs(value) >= scale), (1.0, "")
    )
    value /= scale
    digits = (
        0
        if abs(value) >= 100 or (scale == 1 and value == int(value))
        else 1
        if abs(value) >= 10
        else 2
    )
    return f"{value:,.{digits}f} {prefix}{unit}"


def count(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f} %"


def seconds(value: float | None) -> str:
    return ABSENT if value is None else brief(value)


def duration(value: float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else clock(value)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve in one line of text, for where there is no picture."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    chosen = [finite[round(place * (len(finite) - 1) / (width - 1))] for place in range(width)]
    low, high = min(chosen), max(chosen)
    return "".join(
        SPARKS[round((value - low) / ((high - low) or 1.0) * (len(SPARKS) - 1))] for value in chosen
    )
