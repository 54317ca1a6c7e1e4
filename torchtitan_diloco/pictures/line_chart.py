"""Curves over a common axis."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan_diloco.pictures.axis import Axis, has_place, short, spanned
from torchtitan_diloco.pictures.colours import series_role
from torchtitan_diloco.pictures.scene import (
    HOVER,
    TITLE_SIZE,
    Box,
    Dot,
    LegendEntry,
    Line,
    Point,
    Scene,
    Shape,
    Text,
    legend,
    shortened,
    text_width,
)

WIDTH, PLOT_HEIGHT = 430.0, 180.0
"""Narrow: on a telephone the texts are still to be read."""
FAINT = 0.45
HOVER_STRIPS = 48
MOST_DOTS = 80
"""Beyond, they would be a thick line."""


@dataclass(frozen=True)
class Series:
    name: str
    """For the legend; empty: no entry of its own, as for the second curve of one run."""
    points: Sequence[tuple[float, float]]
    """In the order of x. Numbers that are not finite, and on a logarithmic axis not positive, are gaps."""
    dash: bool = False
    markers: bool = False
    faint: bool = False
    """A backdrop to the series that matter."""
    colour: int | None = None
    """Series of one colour belong together. Not given: its place among the series."""
    hint: str = ""
    """What its values are called under the pointer, if not by its name."""


@dataclass(frozen=True)
class _Plot:
    x: Axis
    y: Axis

    def place(self, point: tuple[float, float]) -> Point:
        return self.x.place(point[0]), self.y.place(point[1])

    def shows(self, point: tuple[float, float]) -> bool:
        return has_place(point[0], log=self.x.log) and has_place(point[1], log=self.y.log)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    y_range: tuple[float | None, float | None] | None = None,
    width: float = WIDTH,
) -> Scene:
    """`y_range`: the ends of the y axis, None for one that follows the data."""
    shapes: list[Shape] = [
        Text(2, 18, shortened(title, width - 4, TITLE_SIZE * 1.05), size=TITLE_SIZE, bold=True)
    ]
    entries = [
        LegendEntry(one.name, _role(number, one), one.dash, opacity=FAINT if one.faint else 1.0)
        for number, one in enumerate(series)
        if one.name
    ]
    names, names_height = legend(entries, x=2, y=26, width=width - 4)
    top = 26 + names_height + 26
    bottom = top + PLOT_HEIGHT

    points = [point for one in series for point in one.points if all(map(math.isfinite, point))]
    lowest, highest = spanned(
        [y for _, y in points], log=y_log, limits=y_range or (None, None), margin=0.05
    )
    y = Axis(lowest, highest, bottom, top, y_log)
    marks = y.marks()
    left = 10 + max(text_width(text) for _, text in marks)
    plot = _Plot(Axis(*spanned([x for x, _ in points], log=x_log), left, width - 12, x_log), y)

    shapes += [*names, Text(2, top - 12, y_label, "muted")]
    shapes += _grid(plot, marks)
    shapes.append(Text(width - 12, bottom + 36, x_label, "muted", anchor="end"))
    if not any(map(plot.shows, points)):
        middle = (left + width - 12) / 2
        shapes.append(
            Text(middle, (top + bottom) / 2, "nothing recorded", "muted", anchor="middle")
        )
    else:
        for number, one in sorted(enumerate(series), key=lambda item: not item[1].faint):
            shapes += _curve(one, _role(number, one), plot)
        shapes += _hover_strips(series, plot, x_label)
    return Scene(width, bottom + 44, title, tuple(shapes))


def thinned(points: Sequence[Point]) -> list[Point]:
    """Of the points in each column of one unit, which stands for a pixel, the first, the lowest, the highest and the last:
    the line through them looks as that through all. `points` are in the order of x."""
    kept: list[Point] = []
    for _, column in itertools.groupby(points, key=lambda point: math.floor(point[0])):
        inside = list(column)
        heights = [y for _, y in inside]
        chosen = {0, heights.index(min(heights)), heights.index(max(heights)), len(inside) - 1}
        kept += [inside[place] for place in sorted(chosen)]
    return kept


def stretches(points: Sequence[Point], low: float, high: float) -> Iterator[list[Point]]:
    """What lies between two heights of the line through the points, cut where it crosses them."""
    low, high = sorted((low, high))
    current: list[Point] = []
    if len(points) == 1 and low <= points[0][1] <= high:
        yield list(points)
    for start, end in itertools.pairwise(points):
        inside = _inside(start, end, low, high)
        if inside is None:
            continue
        first, last = inside
        if current and current[-1] != first:
            yield current
            current = []
        current += [last] if current else [first, last]
        if last != end:
            yield current
            current = []
    if current:
        yield current


def _inside(start: Point, end: Point, low: float, high: float) -> tuple[Point, Point] | None:
    """The part of a straight piece between two heights."""
    if max(start[1], end[1]) < low or min(start[1], end[1]) > high:
        return None

    def pulled(point: Point, other: Point) -> Point:
        height = min(max(point[1], low), high)
        if height == point[1]:
            return point
        share = (height - point[1]) / (other[1] - point[1])
        return point[0] + share * (other[0] - point[0]), height

    return pulled(start, end), pulled(end, start)


def _role(number: int, series: Series) -> str:
    return series_role(number if series.colour is None else series.colour)


def _grid(plot: _Plot, marks: Sequence[tuple[float, str]]) -> Iterator[Shape]:
    x, y = plot.x, plot.y
    for value, text in marks:
        height = y.place(value)
        yield Line(((x.start, height), (x.end, height)), "grid")
        yield Text(x.start - 6, height + 4.2, text, "muted", anchor="end")
    yield Line(((x.start, y.start), (x.end, y.start)), "axis")
    free = -math.inf
    for value, text in x.marks():
        half = text_width(text) / 2
        at = x.place(value)
        middle = min(max(at, x.start + half - 8), x.end + 10 - half)
        if middle - half < free:
            continue
        free = middle + half + 6
        yield Line(((at, y.start), (at, y.start + 4)), "axis")
        yield Text(middle, y.start + 17, text, "muted", anchor="middle")


def _curve(series: Series, role: str, plot: _Plot) -> Iterator[Shape]:
    width, opacity = (1.2, FAINT) if series.faint else (2.0, 1.0)
    for shown, group in itertools.groupby(series.points, key=plot.shows):
        if not shown:
            continue
        placed = [plot.place(point) for point in group]
        for stretch in stretches(thinned(placed), plot.y.start, plot.y.end):
            if len(stretch) == 1:
                yield Dot(*stretch[0], 2.5, role)
            else:
                yield Line(tuple(stretch), role, width, dash=series.dash, opacity=opacity)
        if series.markers and len(placed) <= MOST_DOTS:
            yield from (Dot(x, y, 3.2, role) for x, y in placed if plot.y.end <= y <= plot.y.start)


def _hover_strips(series: Sequence[Series], plot: _Plot, x_label: str) -> Iterator[Shape]:
    """Upright strips over the plot that tell the values below the pointer, without a script."""
    width = (plot.x.end - plot.x.start) / HOVER_STRIPS
    told: dict[int, dict[str, tuple[float, float]]] = {}
    for one in series:
        for point in filter(plot.shows, one.points):
            strip = min(HOVER_STRIPS - 1, int((plot.x.place(point[0]) - plot.x.start) / width))
            told.setdefault(strip, {})[one.hint or one.name] = point
    for strip, values in sorted(told.items()):
        at = max(point[0] for point in values.values())
        lines = [f"{short(at)} {x_label}"] + [
            f"{name}: {value:.4g}".removeprefix(": ") for name, (_, value) in values.items()
        ]
        place = plot.x.start + strip * width
        yield Box(place, plot.y.end, width, plot.y.start - plot.y.end, HOVER, "\n".join(lines))
