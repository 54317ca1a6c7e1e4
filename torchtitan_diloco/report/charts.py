"""Line charts, heat maps, the timeline of workers, and what they share, drawn by matplotlib.

On a page they are SVG with text as text and CSS variables as colours, so that they follow the
reader's fonts and light or dark colour scheme. Tooltips are SVG titles: no script is needed.
"""

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from torchtitan_diloco.components.records import NAN, RoundRecord
from torchtitan_diloco.log import brief
from torchtitan_diloco.report.run_records import Array

COLOURS = {  # name: on a light and on a dark background
    "surface": ("#ffffff", "#15181d"),
    "text": ("#1a1d21", "#e8eaed"),
    "muted": ("#565f6b", "#a8b0bb"),
    "grid": ("#e4e7eb", "#2b3038"),
    "axis": ("#9aa3ad", "#636c78"),
    "band": ("#dde4ec", "#2a313a"),
    # Readers with a colour vision deficiency can tell most of these apart as well.
    "series-1": ("#0b62b0", "#6cb2ff"),
    "series-2": ("#c24a17", "#ff9a66"),
    "series-3": ("#1b7f53", "#5cd1a0"),
    "series-4": ("#8d4fa8", "#cda0ea"),
    "series-5": ("#936500", "#ecc04f"),
    "series-6": ("#0f7796", "#63cfe8"),
    "series-7": ("#bd3470", "#ff8fb9"),
    "series-8": ("#66707c", "#a6adb8"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
STYLE: Any = {
    "axes.edgecolor": LIGHT["axis"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "figure.dpi": 72,  # a unit of the SVG is a point
    "font.size": 12.5,
    "grid.color": LIGHT["grid"],
    "text.color": LIGHT["text"],
    "xaxis.labellocation": "right",
    "xtick.color": LIGHT["axis"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
"""matplotlib's settings for all figures."""
SERIES = 8
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
LINE_CHART_SIZE = (430.0, 226.0)
"""Small, so that texts are readable on a telephone."""
MAX_DOTS = 80
LABEL_SHARE = 0.22
"""Share of the width of a chart that the name of a mark takes, at most."""


@dataclass(frozen=True)
class Curve:
    name: str
    x: Array
    y: Array
    series: int
    """Curves of the same series have the same colour."""
    dashed: bool = False
    dots: bool = False
    faint: bool = False
    """Draw it thin and behind the other curves."""


class Mark(NamedTuple):
    """A vertical line across a chart, where something began."""

    x: float
    name: str
    """Shown above the line, "" for none."""
    colour: str


def series_colour(series: int) -> str:
    return f"series-{series % SERIES + 1}"


def css_variables() -> str:
    """Return the style sheet of charts."""
    light, dark = (
        "".join(f"--{name}:{pair[scheme]};" for name, pair in COLOURS.items()) for scheme in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f".chart text{{font-family:{FONT}!important;pointer-events:none}}"
    )


@rc_context(STYLE)
def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    log: bool = False,
    top: float | None = None,
    marks: Sequence[Mark] = (),
) -> str:
    """Return curves as SVG, without title and legend. `top` is the end of the y axis."""
    width, height = LINE_CHART_SIZE
    figure = Figure((width / 72, height / 72), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, yscale="log" if log else "linear")
    for curve in curves:
        _plot(axes, curve, log)
    axes.set_ylim(top=top)
    low, high = axes.get_ylim()
    few = (1, 2, 5) if high < 1000 * low else (1,)
    axes.yaxis.set_major_locator(
        LogLocator(subs=few) if log else MaxNLocator(5, steps=[1, 2, 5, 10])
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(short_number)
    axes.grid(axis="y")
    _mark(axes, marks)
    return svg(figure, title)


def _mark(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw the marks, and the names of those that are far enough apart."""
    low, high = axes.get_xlim()
    latest = -math.inf
    for mark in sorted(marks):
        axes.axvline(mark.x, color=LIGHT[mark.colour], linewidth=1, zorder=2)
        if mark.name and mark.x - latest > LABEL_SHARE * (high - low):
            latest = mark.x
            place: Any = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axes.annotate(mark.name, (mark.x, 1.02), color=LIGHT["muted"], **place)
    axes.set_xlim(low, high)


def _plot(axes: Axes, curve: Curve, log: bool) -> None:
    """Draw a curve, with gaps for values that cannot be shown, and dots for lone points."""
    shown = np.isfinite(curve.y) & ((curve.y > 0) | (not log))
    padded = np.pad(shown, 1)
    alone = shown & ~padded[:-2] & ~padded[2:]
    dots = shown if curve.dots and shown.size <= MAX_DOTS else alone
    axes.plot(
        curve.x,
        np.where(shown, curve.y, np.nan),
        color=LIGHT[series_colour(curve.series)],
        linestyle="--" if curve.dashed else "-",
        linewidth=1.2 if curve.faint else 2.0,
        alpha=0.45 if curve.faint else None,
        zorder=2.1 if curve.faint else 2.2,
        marker="o",
        markersize=6,
        markevery=np.flatnonzero(dots).tolist(),
    )


def heat_map(title: str, values: Array, names: Sequence[str]) -> str:
    """Draw a square of values, whose rows wait for the columns. NaN is left empty."""
    with rc_context(STYLE):
        figure = Figure((LINE_CHART_SIZE[0] / 72, 0.5 + 0.42 * len(names)), layout="constrained")
        axes = figure.subplots()
        largest, places = np.nanmax(values) or 1.0, range(len(names))
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(names) - 0.5, -0.5))
        for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
            value, corner = values[row, column], (column - 0.47, row - 0.45)
            shade = max(0.08, 0.75 * value / largest)
            colour = LIGHT["series-2"]
            axes.add_patch(Rectangle(corner, 0.94, 0.9, color=colour, alpha=shade))
            axes.text(column, row, f"{value:.3g}", ha="center", va="center")
        axes.set_xticks(places, [f"for {name}" for name in names])
        axes.set_yticks(places, names)
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        return svg(figure, title)


def svg(figure: Figure, title: str, tooltips: Sequence[str] = ()) -> str:
    """Return a figure as SVG for a page."""
    buffer = io.StringIO()
    width, height = figure.get_size_inches() * 72
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": f"{title} {width}"}
    with rc_context(options):  # the salt makes ids unique on a page and the same in every run
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    body = buffer.getvalue().partition("</defs>")[2]

    for number, tooltip in enumerate(tooltips):
        body = body.replace(f'<g id="tip-{number}">', f"<g><title>{escape(tooltip)}</title>")
    body = re.sub(r'(?<=<g) id="[^"]*"|; font-family:[^;"]*|<!--.*?-->', "", body)
    body = re.sub(r" transform=\"rotate\(-0 [^\"]*\"|(?<=\.\d\d)\d{4}(?=[ \"\n])", "", body)
    for name, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{name})")
    opening = (
        f'<svg class="chart" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width:g} {height:g}" xmlns:xlink="http://www.w3.org/1999/xlink"'
    )
    return f"{opening}>{body}"


def short_number(value: float, _: object = None) -> str:
    """Return a number as an axis shows it: `1.5M`, `35k`, `0.25`."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"


# --- timeline -------------------------------------------------------------------------------------

TIMELINE_WIDTH, MARGINS = 980.0, 98.0
LANE, LANE_STEP, WORKER_STEP = 17.0, 20.0, 52.0
MAX_WORKERS = 8
LANES = ("training", "exchange")
"""The training thread, and the thread that exchanges in the background."""
PHASES = {
    "taking": ("training", "due", "taken", "series-5"),
    "waiting": ("training", "asked", "arrived", "series-2"),
    "merging": ("training", "arrived", "applied", "series-4"),
    "encoding": ("exchange", "begun", "encoded", "series-1"),
    "waiting for others": ("exchange", "encoded", "heard", "series-8"),
    "transfer": ("exchange", "heard", "received", "series-3"),
    "outer step": ("exchange", "received", "ready", "series-6"),
}
"""Lane, start and end among the moments, and colour."""
PHASE_COLOURS = {"computing": "band"} | {name: phase[-1] for name, phase in PHASES.items()}
Exchange = Sequence[RoundRecord | None]
"""One exchange of one fragment: the records of all workers, None where there is none."""


class Phase(NamedTuple):
    worker: int
    lane: str
    start_seconds: float
    end_seconds: float
    name: str
    """A key of PHASES."""
    round: RoundRecord

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def phases(exchanges: Iterable[Exchange]) -> list[Phase]:
    """Return the phases of both threads of all workers, sorted by worker, lane and time.

    Moments are on the clock of the first worker. Where two phases of a thread would overlap, the
    later one starts where the earlier one ends.
    """
    found, shifts = list[Phase](), dict[int, float]()
    for exchange in exchanges:
        heard = [NAN if one is None else one.at_seconds.get("heard", NAN) for one in exchange]
        for worker, one in enumerate(exchange):
            if math.isfinite(shift := heard[0] - heard[worker]):
                shifts[worker] = shift  # else, use that of the exchange before
            if one is not None:
                found += _phases_of_round(worker, one, shifts.get(worker, 0.0))
    found.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = []
    for _, lane in itertools.groupby(found, key=lambda phase: (phase.worker, phase.lane)):
        latest = -math.inf
        for phase in lane:
            start = max(phase.start_seconds, latest)
            latest = max(phase.end_seconds, start)
            ordered.append(phase._replace(start_seconds=start, end_seconds=latest))
    return ordered


def _phases_of_round(worker: int, record: RoundRecord, shift: float) -> Iterator[Phase]:
    for name, (lane, *moments, _) in PHASES.items():
        start, end = (record.at_seconds.get(moment, NAN) + shift for moment in moments)
        if -math.inf < start <= end < math.inf:
            yield Phase(worker, lane, start, end, name, record)


@rc_context(STYLE)
def timeline_svg(
    title: str, found: Sequence[Phase], names: Sequence[str], width: float = TIMELINE_WIDTH
) -> str:
    """Return two lanes for each worker as SVG, without title and legend. At least one phase must
    have a length."""
    found = [phase for phase in found if phase.seconds > 0]
    workers = sorted({phase.worker for phase in found})
    start = min(phase.start_seconds for phase in found)
    length = max(phase.end_seconds for phase in found) - start
    tops = {worker: row * WORKER_STEP for row, worker in enumerate(workers[:MAX_WORKERS])}
    found = [phase for phase in found if phase.worker in tops]
    hidden = len(workers) - len(tops)
    more = f"; {hidden} more workers are not shown" if hidden else ""
    height = WORKER_STEP * len(tops)
    figure = Figure((width / 72, (height + 54) / 72), layout="constrained")
    began = datetime.fromtimestamp(start, tz=UTC)
    x_label = f"seconds, from {began:%H:%M:%S} UTC on the clock of {names[0]}{more}"
    axes = figure.add_subplot(xlabel=x_label, xlim=(0, length), ylim=(height, 0))
    axes.xaxis.set_major_formatter(short_number)
    axes.xaxis.set_major_locator(MaxNLocator(8 if width > 600 else 4, steps=[1, 2, 5, 10]))
    for top in tops.values():
        axes.add_patch(Rectangle((0, top), length, LANE, color=LIGHT["band"], linewidth=0))
        axes.axhline(top + LANE_STEP + LANE / 2, color=LIGHT["grid"], linewidth=1, zorder=0)
    rows = [text for worker in tops for text in (names[worker], "exchange")]
    ticks = [top + lane + LANE / 2 for top in tops.values() for lane in (0, LANE_STEP)]
    axes.set_yticks(ticks, rows)
    for label in axes.get_yticklabels()[::2]:
        label.set(color=LIGHT["text"], weight="bold")
    seconds_per_point = length / (width - MARGINS)
    for place, phase in enumerate(found):
        left, extent = phase.start_seconds - start, max(phase.seconds, seconds_per_point)
        top = tops[phase.worker] + LANE_STEP * LANES.index(phase.lane)
        style: Any = {"facecolor": LIGHT[PHASE_COLOURS[phase.name]], "gid": f"tip-{place}"}
        axes.add_patch(Rectangle((left, top), extent, LANE, linewidth=0, **style))
        fragment = str(phase.round.fragment)
        if extent / seconds_per_point > 8 * len(fragment) + 4:  # there is room
            text = axes.text(left + extent / 2, top + LANE / 2, fragment, color=LIGHT["surface"])
            text.set(ha="center", va="center_baseline")
    return svg(figure, title, [_tooltip(phase, names) for phase in found])


def _tooltip(phase: Phase, names: Sequence[str]) -> str:
    found = phase.round
    sent = f", {short_number(found.sent_bytes)}B sent" if np.isfinite(found.sent_bytes) else ""
    return (
        f"{names[phase.worker]}: {phase.name} {brief(phase.seconds)}\n"
        f"fragment {found.fragment} ({found.fragment_name}), round {found.outer_round}{sent}"
    )
