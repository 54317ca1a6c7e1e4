"""Numbers, times and tables as text."""

from collections.abc import Sequence


def clock(seconds: float) -> str:
    """Format as `2d 3:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{rest:02d}"


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
