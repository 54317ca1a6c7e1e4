"""Scene -> pixels, for TensorBoard and for .png files. Everything is drawn larger and reduced, which smooths the edges."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from torchtitan_diloco.pictures.colours import ROLES, red_green_blue
from torchtitan_diloco.pictures.scene import HOVER, Box, Dot, Line, Point, Scene, Text

FINER = 3
"""Times as large in both directions as what is kept."""
DASH, GAP = 5.0, 4.0
LIKE = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "x", "\u00b5": "u", "\u2026": "..."}
)
"""What pillow's own font lacks: minus, dashes, times, micro. Any other sign beyond Latin-1 becomes a question mark."""


def to_pixels(scene: Scene, scale: float = 2, *, dark: bool = False) -> NDArray[np.uint8]:
    """Height x width x red, green, blue; `scale` pixels for a unit of the scene."""
    return np.asarray(_image(scene, scale, dark), dtype=np.uint8)


def write_png(scene: Scene, path: Path, scale: float = 2, *, dark: bool = False) -> None:
    _image(scene, scale, dark).save(path, format="PNG")


def _image(scene: Scene, scale: float, dark: bool) -> Image.Image:
    width, height = round(scene.width * scale), round(scene.height * scale)
    canvas = _Canvas(width * FINER, height * FINER, scale * FINER, dark)
    for shape in scene.shapes:
        match shape:
            case Line():
                canvas.line(shape)
            case Box():
                canvas.box(shape)
            case Dot():
                canvas.dot(shape)
            case Text():
                canvas.text(shape)
    return canvas.image.reduce(FINER)


class _Canvas:
    def __init__(self, width: int, height: int, scale: float, dark: bool) -> None:
        self._scale, self._dark = scale, dark
        self.image = Image.new("RGB", (width, height), self._colour("surface"))
        self._draw = ImageDraw.Draw(self.image)
        self._fonts: dict[float, Any] = {}

    def line(self, line: Line) -> None:
        colour, width = (
            self._colour(line.role, line.opacity),
            max(1, round(line.width * self._scale)),
        )
        for piece in _dashes(line.points) if line.dash else [line.points]:
            placed = [(x * self._scale, y * self._scale) for x, y in piece]
            self._draw.line(placed, fill=colour, width=width, joint="curve")

    def box(self, box: Box) -> None:
        if box.role != HOVER:
            corners = (box.x, box.y, box.x + box.width, box.y + box.height)
            left, top, right, bottom = (corner * self._scale for corner in corners)
            self._draw.rectangle(
                (left, top, max(left, right - 1), max(top, bottom - 1)), fill=self._colour(box.role)
            )

    def dot(self, dot: Dot) -> None:
        sides = (dot.x - dot.radius, dot.y - dot.radius, dot.x + dot.radius, dot.y + dot.radius)
        self._draw.ellipse([side * self._scale for side in sides], fill=self._colour(dot.role))

    def text(self, text: Text) -> None:
        font = self._fonts.setdefault(text.size, ImageFont.load_default(text.size * self._scale))
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
        shown = text.text.translate(LIKE).encode("latin-1", "replace").decode("latin-1")
        stroke = self._scale * 0.25 if text.bold else 0
        colour = self._colour(text.role)
        place = (text.x * self._scale, text.y * self._scale)
        self._draw.text(
            place,
            shown,
            fill=colour,
            font=font,
            anchor=anchor,
            stroke_width=stroke,
            stroke_fill=colour,
        )

    def _colour(self, role: str, opacity: float = 1.0) -> tuple[int, int, int]:
        """Mixed with the ground where it is not opaque."""
        colours, ground = ROLES[role], ROLES["surface"]
        chosen, below = (colours.dark, ground.dark) if self._dark else (colours.light, ground.light)
        mixed = [
            round(opacity * above + (1 - opacity) * under)
            for above, under in zip(red_green_blue(chosen), red_green_blue(below), strict=True)
        ]
        return mixed[0], mixed[1], mixed[2]


def _dashes(points: tuple[Point, ...]) -> list[list[Point]]:
    """The line in pieces of DASH with gaps of GAP between them, around its corners."""
    pieces: list[list[Point]] = []
    current: list[Point] = [points[0]]
    drawing, left = True, DASH
    for start, end in itertools.pairwise(points):
        length = math.dist(start, end)
        done = 0.0
        while length - done > left:
            done += left
            share = done / length
            point = (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
            if drawing:
                pieces.append([*current, point])
            current, drawing = [point], not drawing
            left = DASH if drawing else GAP
        left -= length - done
        if drawing:
            current.append(end)
    return [*pieces, current] if drawing and len(current) > 1 else pieces
