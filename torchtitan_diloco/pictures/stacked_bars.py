"""What a whole is made of, one bar for each."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_diloco.pictures.scene import (
    TEXT_SIZE,
    TITLE_SIZE,
    Box,
    LegendEntry,
    Scene,
    Shape,
    Text,
    legend,
    shortened,
    text_width,
)

WIDTH = 430.0


@dataclass(frozen=True)
class Part:
    name: str
    value: float
    role: str


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Sequence[Part]


def stacked_bars(bars: Sequence[Bar], *, title: str, width: float = WIDTH) -> Scene:
    """Each bar is as long as the page is wide and is cut in the ratio of its parts."""
    shapes: list[Shape] = [
        Text(2, 18, shortened(title, width - 4, TITLE_SIZE * 1.05), size=TITLE_SIZE, bold=True)
    ]
    entries = {
        part.name: LegendEntry(part.name, part.role, box=True) for bar in bars for part in bar.parts
    }
    names, names_height = legend(list(entries.values()), x=2, y=26, width=width - 4)
    shapes += names
    top = 26 + names_height + 10
    for bar in bars:
        shapes.append(Text(2, top + 12, shortened(bar.name, width - 4)))
        shapes += _bar(bar, top + 18, width - 4)
        top += 56
    if not bars:
        shapes.append(Text(width / 2, top + 30, "nothing recorded", "muted", anchor="middle"))
        top += 50
    return Scene(width, top, title, tuple(shapes))


def _bar(bar: Bar, top: float, width: float) -> list[Shape]:
    height = 26.0
    total = sum(part.value for part in bar.parts)
    shapes: list[Shape] = []
    left = 2.0
    for part in bar.parts:
        if part.value <= 0 or total <= 0:
            continue
        length = width * part.value / total
        text = f"{part.value:.1f} %"
        shapes.append(Box(left, top, length, height, part.role, f"{bar.name}: {part.name} {text}"))
        if text_width(text) + 8 < length:
            shapes.append(
                Text(
                    left + length / 2,
                    top + height / 2 + TEXT_SIZE / 3,
                    text,
                    "on-colour",
                    anchor="middle",
                )
            )
        left += length
    return shapes
