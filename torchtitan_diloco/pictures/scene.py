"""A picture as plain data: shapes in their order from back to front, in units of about a pixel, y downwards.

Shapes name a role, not a colour (colours.py), so that one scene is drawn on a light and on a dark ground.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]

TEXT_SIZE = 12.5
TITLE_SIZE = 14.0
HOVER = "hover"
"""Role of a box that is not drawn: what one sees there are its tooltip and, under the pointer, a trace of its shape."""


@dataclass(frozen=True)
class Line:
    points: tuple[Point, ...]
    role: str
    width: float = 1.0
    dash: bool = False
    opacity: float = 1.0


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    role: str
    tooltip: str = ""


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    role: str


@dataclass(frozen=True)
class Text:
    """`y` is that of the line it stands on."""

    x: float
    y: float
    text: str
    role: str = "text"
    size: float = TEXT_SIZE
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Line | Box | Dot | Text


@dataclass(frozen=True)
class Scene:
    width: float
    height: float
    title: str
    """Also for those who have the picture read out."""
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float = TEXT_SIZE) -> float:
    """About: the font is the reader's. On the wide side, so that nothing is cut off."""
    narrow = sum(character in "ijltf.,:;|'!()[] " for character in text)
    wide = sum(character.isupper() or character in "mwMW%@" for character in text)
    return size * (0.58 * len(text) - 0.22 * narrow + 0.16 * wide)


def shortened(text: str, width: float, size: float = TEXT_SIZE) -> str:
    """As much of a text as has room, with an ellipsis where something is missing."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(f"{text}…", size) > width:
        text = text[:-1]
    return f"{text.rstrip()}…"


@dataclass(frozen=True)
class LegendEntry:
    name: str
    role: str
    dash: bool = False
    box: bool = False
    """A square, for what is drawn as an area; otherwise a piece of line."""
    opacity: float = 1.0


def legend(
    entries: Sequence[LegendEntry], *, x: float, y: float, width: float
) -> tuple[list[Shape], float]:
    """Entries in as many rows as they need below `y`, where nothing else is drawn; their height."""
    row, swatch, gap = 18.0, 16.0, 14.0
    shapes: list[Shape] = []
    left, top = x, y
    for entry in entries:
        name = shortened(entry.name, width - swatch - 5)
        needed = swatch + 5 + text_width(name)
        if left > x and left + needed > x + width:
            left, top = x, top + row
        middle = top + row / 2
        if entry.box:
            shapes.append(Box(left + 3, middle - 5, 10, 10, entry.role))
        else:
            shapes.append(
                Line(
                    ((left, middle), (left + swatch, middle)),
                    entry.role,
                    2.5,
                    entry.dash,
                    entry.opacity,
                )
            )
        shapes.append(Text(left + swatch + 5, middle + 4.5, name))
        left += needed + gap
    return shapes, (top + row - y if entries else 0.0)
