"""Line charts, drawn by matplotlib, the timeline of workers, and what they share.

All have the same width, and are scaled by the page. Tooltips of the timeline are SVG titles: no
script is needed.
"""

import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from torchtitan_diloco.base.formatting import brief
from torchtitan_diloco.components.records import NAN, RoundRecord
from torchtitan_diloco.report.run_records import Array

SURFACE = "#ffffff"
TEXT = "#1a1d21"
MUTED = "#565f6b"
GRID = "#e4e7eb"
AXIS = "#9aa3ad"
BAND = "#dde4ec"
BLUE = "#0b62b0"
ORANGE = "#c24a17"
GREEN = "#1b7f53"
PURPLE = "#8d4fa8"
OCHRE = "#936500"
TEAL = "#0f7796"
PINK = "#bd3470"
GREY = "#66707c"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, OCHRE, TEAL, PINK, GREY)
"""Readers with a color vision deficiency can tell most of these apart as well."""
STYLE: Any = {
    "axes.edgecolor": AXIS,
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "figure.dpi": 72,  # a unit of the SVG is a point
    "font.size": 12.5,
    "grid.color": GRID,
    "text.color": TEXT,
    "xaxis.labellocation": "right",
    "xtick.color": AXIS,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
"""matplotlib's settings for all figures."""
SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "torchtitan_diloco"}
"""For texts in the fonts of the reader, and the same file from the same records."""
WIDTH = 430.0
"""Width of a chart, in points. It is small, so that texts are readable on a telephone."""
HEIGHT = 226.0
MAX_DOTS = 80
LABEL_SHARE = 0.22
"""Share of the width of a chart that the name of a mark takes, at most."""


@dataclass(frozen=True)
class Curve:
    name: str
    x: Array
    y: Array
    series: int
    """Curves of the same series have the same color."""
    dashed: bool = False
    dots: bool = False
    faint: bool = False
    """Draw it thin and behind the other curves."""


class Mark(NamedTuple):
    """A vertical line across a chart, where something began."""

    x: float
    name: str
    """Shown above the line, "" for none."""
    color: str


def series_color(series: int) -> str:
    return SERIES[series % len(SERIES)]


@rc_context(STYLE | SVG)
def line_chart(
    curves: Sequence[Curve],
    *,
    x_label: str,
    log: bool = False,
    top: float | None = None,
    marks: Sequence[Mark] = (),
) -> str:
    """Return curves as SVG, without title and legend. `top` is the end of the y axis."""
    figure = Figure((WIDTH / 72, HEIGHT / 72), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, yscale="log" if log else "linear")
    for curve in curves:
        _plot(axes, curve, log)
    axes.set_ylim(top=top)
    if log:
        low, high = axes.get_ylim()
        few = (1, 2, 5) if high < 1000 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=few))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(short_number)
    axes.grid(axis="y")
    _mark(axes, marks)
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


def _mark(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw the marks, and the names of those that are far enough apart."""
    low, high = axes.get_xlim()
    latest = -math.inf
    for mark in sorted(marks):
        axes.axvline(mark.x, color=mark.color, linewidth=1, zorder=2)
        if mark.name and mark.x - latest > LABEL_SHARE * (high - low):
            latest = mark.x
            place: Any = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axes.annotate(mark.name, (mark.x, 1.02), color=MUTED, **place)
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
        color=series_color(curve.series),
        linestyle="--" if curve.dashed else "-",
        linewidth=1.2 if curve.faint else 2.0,
        alpha=0.45 if curve.faint else None,
        zorder=2.1 if curve.faint else 2.2,
        marker="o",
        markersize=6,
        markevery=np.flatnonzero(dots).tolist(),
    )


def short_number(value: float, _: object = None) -> str:
    """Return a number as an axis shows it: `1.5M`, `35k`, `0.25`."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"


# --- timeline -------------------------------------------------------------------------------------

LANE = 17.0
LANE_STEP = 20.0
WORKER_STEP = 62.0
NAME_HEIGHT = 18.0
AXIS_HEIGHT = 22.0
MAX_WORKERS = 8
LANES = ("training", "exchange")
"""The training thread, and the thread that exchanges in the background."""
PHASES = {
    "taking": ("training", "due", "taken", OCHRE),
    "waiting": ("training", "asked", "arrived", ORANGE),
    "merging": ("training", "arrived", "applied", PURPLE),
    "encoding": ("exchange", "begun", "encoded", BLUE),
    "waiting for others": ("exchange", "encoded", "heard", GREY),
    "transfer": ("exchange", "heard", "received", GREEN),
    "outer step": ("exchange", "received", "ready", TEAL),
}
"""Lane, start and end among the moments, and color."""
PHASE_COLORS = {"computing": BAND} | {name: phase[-1] for name, phase in PHASES.items()}
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
    recorded = list[Phase]()
    shifts = dict[int, float]()  # by worker, from its clock to that of the first
    for exchange in exchanges:
        # All workers have heard the last header at about the same moment.
        heard = [
            NAN if record is None else record.at_seconds.get("heard", NAN) for record in exchange
        ]
        for worker, record in enumerate(exchange):
            if math.isfinite(shift := heard[0] - heard[worker]):
                shifts[worker] = shift  # else, use that of the exchange before
            if record is not None:
                recorded += _phases_of_round(worker, record, shift=shifts.get(worker, 0.0))
    recorded.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = []
    for _, lane in itertools.groupby(recorded, key=lambda phase: (phase.worker, phase.lane)):
        latest = -math.inf
        for phase in lane:
            start = max(phase.start_seconds, latest)
            latest = max(phase.end_seconds, start)
            ordered.append(phase._replace(start_seconds=start, end_seconds=latest))
    return ordered


def _phases_of_round(worker: int, record: RoundRecord, shift: float) -> Iterator[Phase]:
    for name, (lane, start_moment, end_moment, _) in PHASES.items():
        start = record.at_seconds.get(start_moment, NAN) + shift
        end = record.at_seconds.get(end_moment, NAN) + shift
        if -math.inf < start <= end < math.inf:
            yield Phase(
                worker=worker,
                lane=lane,
                start_seconds=start,
                end_seconds=end,
                name=name,
                round=record,
            )


def timeline_span(drawn: Sequence[Phase], names: Sequence[str]) -> str:
    """Return what the x axis of a timeline is."""
    began = datetime.fromtimestamp(min(phase.start_seconds for phase in drawn), tz=UTC)
    hidden = len({phase.worker for phase in drawn}) - MAX_WORKERS
    more = f"; {hidden} more workers are not shown" if hidden > 0 else ""
    return f"seconds, from {began:%H:%M:%S} UTC on the clock of {names[0]}{more}"


def timeline_svg(title: str, drawn: Sequence[Phase], names: Sequence[str]) -> str:
    """Return two lanes for each worker as SVG, without title and legend. At least one phase must
    have a length."""
    start = min(phase.start_seconds for phase in drawn)
    length = max(phase.end_seconds for phase in drawn) - start
    workers = sorted({phase.worker for phase in drawn})[:MAX_WORKERS]
    tops = {worker: NAME_HEIGHT + row * WORKER_STEP for row, worker in enumerate(workers)}
    bottom = WORKER_STEP * len(tops)
    parts = list[str]()
    for worker, top in tops.items():
        middle = top + LANE_STEP + LANE / 2  # of the lower lane
        parts.append(_text(0, top - 5, names[worker], color=TEXT, anchor="start"))
        parts.append(_box(0, top, width=WIDTH, height=LANE, color=BAND))
        parts.append(_box(0, middle, width=WIDTH, height=1, color=GRID))
    for phase in drawn:
        if phase.worker not in tops or phase.seconds <= 0:
            continue
        left = WIDTH * (phase.start_seconds - start) / length
        extent = max(1.0, WIDTH * phase.seconds / length)
        top = tops[phase.worker] + LANE_STEP * LANES.index(phase.lane)
        color = PHASE_COLORS[phase.name]
        tooltip = _tooltip(phase, names)
        parts.append(_box(left, top, width=extent, height=LANE, color=color, tooltip=tooltip))
        fragment = str(phase.round.fragment)
        if extent > 8 * len(fragment) + 4:  # there is room
            center = left + extent / 2
            parts.append(_text(center, top + 13, fragment, color=SURFACE, anchor="middle"))
    parts += _time_axis(length, bottom)
    return (
        f'<svg class="chart" role="img" aria-label="{escape(title)}" font-size="12.5" '
        f'viewBox="0 0 {WIDTH:g} {bottom + AXIS_HEIGHT:g}">{"".join(parts)}</svg>'
    )


def _time_axis(length: float, bottom: float) -> Iterator[str]:
    """Yield the axis of a timeline of `length` seconds, with its ticks."""
    yield _box(0, bottom, width=WIDTH, height=1, color=AXIS)
    for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, length):
        place = WIDTH * tick / length
        if place > WIDTH:
            continue
        anchor = "middle"
        if tick == 0:
            anchor = "start"
        elif place >= WIDTH - 20:
            anchor = "end"
        yield _box(min(place, WIDTH - 1), bottom, width=1, height=4, color=AXIS)
        yield _text(place, bottom + 17, short_number(tick), color=MUTED, anchor=anchor)


def _box(
    left: float, top: float, *, width: float, height: float, color: str, tooltip: str = ""
) -> str:
    place = f'x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}"'
    about = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return f'<rect {place} fill="{color}">{about}</rect>'


def _text(left: float, bottom: float, text: str, *, color: str, anchor: str) -> str:
    place = f'x="{left:.2f}" y="{bottom:g}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{escape(text)}</text>'


def _tooltip(phase: Phase, names: Sequence[str]) -> str:
    record = phase.round
    size = record.number("worker/sent_bytes")
    sent = f", {short_number(size)}B sent" if np.isfinite(size) else ""
    return (
        f"{names[phase.worker]}: {phase.name} {brief(phase.seconds)}\n"
        f"fragment {record.fragment} ({record.fragment_name}), round {record.outer_round}{sent}"
    )
