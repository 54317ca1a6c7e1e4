"""Numbers, times, tables and progress as text."""

import sys
from collections.abc import Sequence
from typing import Any

BAR_SECONDS = 0.2
"""Seconds between two changes of a progress bar on a terminal."""
FIRST_LINE_SECONDS = 10.0
"""Seconds until the first line about progress elsewhere."""


def clock(seconds: float) -> str:
    """Format as `2d 3:04:05`."""
    days, remainder = divmod(round(seconds), 86_400)
    hours, remainder = divmod(remainder, 3600)
    minutes, remainder = divmod(remainder, 60)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{remainder:02d}"


def brief(seconds: float) -> str:
    """Format as `1.23 s` or `45.6 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"


def few_digits(value: float, decimals: int) -> str:
    """Format as `1,234.5`, and below 1 with two significant digits, as `0.043`."""
    return f"{value:,.{decimals}f}" if value >= 1 else f"{value:.2g}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 step`, or `1,000 steps`. `plural`: if it does not only add an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]
    rows = [columns, ["-" * width for width in widths], *rows]
    lines = [map(str.ljust, row, widths) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def progress_options(action: str) -> dict[str, Any]:
    """Return the options of a tqdm progress bar in bytes, which shows only what takes long."""
    every = BAR_SECONDS if sys.stderr.isatty() else FIRST_LINE_SECONDS
    look = {"unit": "B", "unit_scale": True, "leave": False, "desc": action}
    return {"mininterval": every, "delay": every, **look}
