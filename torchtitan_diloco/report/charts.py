"""Line charts and timelines, drawn by matplotlib.

On a page they are SVG with text as text and CSS variables as colours, so that they follow the
reader's fonts and light or dark colour scheme. Tooltips are SVG titles: no script is needed.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from torchtitan_diloco.components.timeline import LANES, PHASE_NAMES, Phase
from torchtitan_diloco.report.run_records import Array
from torchtitan_diloco.utils import brief

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
SERIES = 8
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": LIGHT["axis"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": LIGHT["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.xmargin": 0.02,
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
LINE_CHART_SIZE = (430.0, 246.0)
"""Small, so that texts are readable on a telephone."""
HOVER_STRIPS = 48
MAX_DOTS = 80
"""A curve of more points has no dots."""
LARGEST = 1e100
"""Values beyond are not drawn: an axis cannot be computed for all floating-point numbers."""

PHASE_COLOURS = {"computing": "band"} | {
    name: f"series-{number}"
    for name, number in zip(PHASE_NAMES, (5, 2, 4, 1, 8, 3, 6), strict=True)
}
TIMELINE_WIDTH = 980.0
LEFT, RIGHT, BELOW = 86.0, 12.0, 46.0
"""Margins of a timeline."""
LANE, LANE_STEP, WORKER_STEP = 17.0, 20.0, 52.0
MAX_WORKERS = 8


@dataclass(frozen=True)
class Curve:
    """Curve of a line chart."""

    name: str
    x: Array
    y: Array
    """Values that have no place on the axis are gaps."""
    series: int
    """Curves of one series have one colour."""
    dashed: bool = False
    dots: bool = False
    faint: bool = False
    """Drawn thin and behind the other curves."""


def css_variables(root: str = ":root") -> str:
    """Return the style sheet of charts. `root` selects the elements that get the colours."""
    light, dark = (
        "".join(f"--{name}:{pair[scheme]};" for name, pair in COLOURS.items()) for scheme in (0, 1)
    )
    return (
        f"{root}{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}"
        f".chart text{{font-family:{FONT}!important;pointer-events:none}}"
        ".hover path{fill:var(--text)!important;fill-opacity:0}.hover:hover path{fill-opacity:.07}"
    )


@rc_context(STYLE)
def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    bottom: float | None = None,
    top: float | None = None,
) -> str:
    """Return curves over a common axis as SVG, without title and legend.

    `log`: with a logarithmic y axis; `bottom` and `top`: ends of the y axis.
    """
    figure = _figure(*LINE_CHART_SIZE, layout="constrained")
    axes = figure.add_subplot(title=y_label, xlabel=x_label, yscale="log" if log else "linear")
    for curve in curves:
        _plot(axes, curve, log)
    axes.set_ylim(bottom, top)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)) if log else MaxNLocator(5)
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _short(value))
    axes.grid(axis="y")
    return _svg(figure, title, _add_hover_strips(axes, curves, x_label))


def _plot(axes: Axes, curve: Curve, log: bool) -> None:
    """Draw a curve, with a dot where a point has no neighbour."""
    shown = (np.abs(curve.y) < LARGEST) & ((curve.y > 0) | (not log))
    padded = np.pad(shown, 1)
    alone = shown & ~padded[:-2] & ~padded[2:]
    dots = shown if curve.dots and shown.size <= MAX_DOTS else alone
    axes.plot(
        curve.x,
        np.where(shown, curve.y, np.nan),
        color=LIGHT[f"series-{curve.series % SERIES + 1}"],
        linestyle="--" if curve.dashed else "-",
        linewidth=1.2 if curve.faint else 2.0,
        alpha=0.45 if curve.faint else None,
        zorder=2 if curve.faint else 3,
        marker="o",
        markersize=6,
        markevery=np.flatnonzero(dots).tolist(),
    )


def _add_hover_strips(axes: Axes, curves: Sequence[Curve], x_label: str) -> list[str]:
    """Add invisible strips over the plot. Return their tooltips: the values below the pointer."""
    strips: dict[int, dict[str, tuple[float, float]]] = {}
    left, right = axes.get_xlim()
    for curve in curves:
        for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True):
            if np.isfinite(y):
                strip = int(HOVER_STRIPS * (x - left) / (right - left))
                strips.setdefault(strip, {})[curve.name] = (x, y)
    tooltips = []
    for strip, values in strips.items():
        box = Rectangle((strip / HOVER_STRIPS, 0), 1 / HOVER_STRIPS, 1, transform=axes.transAxes)
        box.set(gid=f"hover-{len(tooltips)}", linewidth=0, facecolor="none")
        axes.add_patch(box)
        position = max(x for x, _ in values.values())
        lines = [f"{name}: {y:.4g}" for name, (_, y) in values.items()]
        tooltips.append("\n".join([f"{_short(position)} {x_label}", *lines]))
    return tooltips


def timeline_svg(title: str, phases: Sequence[Phase], width: float) -> str:
    """Return what the two threads of every worker did over time as SVG, without title and legend."""
    figure, tooltips = _draw_timeline(phases, width)
    return _svg(figure, title, tooltips)


def save_timeline(title: str, phases: Sequence[Phase], path: Path) -> None:
    """Write a timeline with title and legend to an .svg or .png file."""
    figure, tooltips = _draw_timeline(phases, TIMELINE_WIDTH, title)
    if path.suffix == ".svg":
        path.write_text(_svg(figure, title, tooltips, standalone=True), encoding="utf-8")
    else:
        figure.savefig(path, dpi=144)


@rc_context(STYLE)
def _draw_timeline(
    phases: Sequence[Phase], width: float, title: str = ""
) -> tuple[Figure, list[str]]:
    """Draw two lanes per worker. Return the figure and the tooltips of its bars."""
    shown = [phase for phase in phases if phase.worker < MAX_WORKERS and phase.seconds > 0]
    workers = sorted({phase.worker for phase in shown})
    start = min((phase.start_seconds for phase in shown), default=0.0)
    end = max((phase.end_seconds for phase in shown), default=1.0)
    hidden = len({phase.worker for phase in phases}) - len(workers)
    lanes, above = WORKER_STEP * len(workers), 62.0 if title else 4.0
    height, plot_width = above + lanes + BELOW, width - LEFT - RIGHT
    figure = _figure(width, height)
    axes = figure.add_axes(
        (LEFT / width, BELOW / height, plot_width / width, lanes / height),
        xlabel=f"seconds, from {start:,.2f} s on worker 0's clock"
        + (f"; {hidden} more workers not drawn" if hidden else ""),
        xlim=(0, end - start),
        ylim=(lanes, 0),
    )
    axes.xaxis.set_major_locator(MaxNLocator(8 if width > 600 else 4))
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_yticks([])
    tooltips: list[str] = []
    for row, worker in enumerate(workers):
        for number, lane in enumerate(LANES):
            top = row * WORKER_STEP + number * LANE_STEP
            name = f"worker {worker}" if lane == "training" else lane
            _draw_lane_name(axes, name, top, bold=lane == "training")
            own = [phase for phase in shown if (phase.worker, phase.lane) == (worker, lane)]
            _draw_bars(axes, own, top, start, plot_width, tooltips)
    if title:
        figure.text(2 / width, 1 - 18 / height, title, fontsize=14, fontweight="bold")
        present = {"computing", *(phase.name for phase in shown)}
        handles = [
            Patch(color=LIGHT[colour], label=name)
            for name, colour in PHASE_COLOURS.items()
            if name in present
        ]
        place = {"loc": "upper left", "bbox_to_anchor": (0, 1 - 22 / height), "ncols": 8}
        figure.legend(handles=handles, frameon=False, borderpad=0, handlelength=0.8, **place)
    return figure, tooltips


def _draw_lane_name(axes: Axes, name: str, top: float, *, bold: bool) -> None:
    """Write a name in the left margin, over the band or line on which the bars will lie."""
    _, end = axes.get_xlim()
    middle = top + LANE / 2
    if bold:
        axes.add_patch(Rectangle((0, top), end, LANE, facecolor=LIGHT["band"]))
    else:
        axes.plot((0, end), (middle, middle), color=LIGHT["grid"], linewidth=1)
    style = {"color": LIGHT["text" if bold else "muted"], "weight": "bold" if bold else "normal"}
    offset = {"xytext": (2 - LEFT, 0), "textcoords": "offset points"}
    axes.annotate(name, (0, middle), va="center_baseline", **offset, **style)


def _draw_bars(
    axes: Axes,
    phases: Sequence[Phase],
    top: float,
    start: float,
    plot_width: float,
    tooltips: list[str],
) -> None:
    """Draw phases with the numbers of their fragments where there is room. Extend `tooltips`."""
    _, end = axes.get_xlim()
    for phase in phases:
        left = phase.start_seconds - start
        length = max(phase.seconds, end / plot_width)  # at least a pixel
        colour = LIGHT[PHASE_COLOURS[phase.name]]
        gid = f"tip-{len(tooltips)}"
        axes.add_patch(Rectangle((left, top), length, LANE, facecolor=colour, gid=gid))
        number = str(phase.fragment)
        if length / end * plot_width > 8 * len(number) + 4:
            place = (left + length / 2, top + LANE / 2)
            axes.text(*place, number, color=LIGHT["surface"], ha="center", va="center_baseline")
        name = f" ({phase.fragment_name})" if phase.fragment_name else ""
        sent = "" if phase.sent_bytes is None else f", {_short(phase.sent_bytes)}B sent"
        tooltips.append(
            f"worker {phase.worker}: {phase.name} {brief(phase.seconds)}\n"
            f"fragment {phase.fragment}{name}, round {phase.outer_round}{sent}"
        )


def _figure(width: float, height: float, **options: Any) -> Figure:
    """Return a figure whose points are the units of its SVG."""
    size = (width / 72, height / 72)
    return Figure(figsize=size, dpi=72, facecolor=LIGHT["surface"], **options)


def _short(value: float) -> str:
    """Return a number as an axis shows it: `1.5M`, `35k`, `0.25`."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"


def _svg(figure: Figure, title: str, tooltips: Sequence[str], *, standalone: bool = False) -> str:
    """Return a figure as SVG for a page or, `standalone`, for a file of its own."""
    buffer = io.StringIO()
    width, height = figure.get_size_inches() * 72
    options = {"svg.fonttype": "none", "svg.hashsalt": f"{title} {width}"}
    with rc_context(options):  # the salt makes ids unique on a page and the same in every run
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=not standalone, metadata=no_metadata)
    body = buffer.getvalue().partition("</defs>")[2]

    def with_tooltip(match: re.Match[str]) -> str:
        return f'<g class="{match[1]}"><title>{_escape(tooltips[int(match[2])])}</title>'

    for pattern, replacement in (
        (r'<g id="(tip|hover)-(\d+)">', with_tooltip),
        (r'<g id="[^"]*">', "<g>"),
        (r"<!--.*?-->|; font-family:[^;\"]*| transform=\"rotate\(-?0 [^\"]*\"", ""),
        (r'(?<=[ "]\d)(\d*\.\d\d)\d{4}(?=[ "\n])', r"\1"),
        (r"\s*\n\s*", "\n"),
    ):
        body = re.sub(pattern, replacement, body, flags=re.DOTALL)
    for name, light in LIGHT.items():
        body = body.replace(light, f"var(--{name})")
    size = f'viewBox="0 0 {width:g} {height:g}"'
    links = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg class="chart" role="img" aria-label="{_escape(title)}" {size} {links}'
    if not standalone:
        return f"{opening}>{body}"
    own = f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    style = f"<title>{_escape(title)}</title><style>{escape(css_variables('svg'))}</style>"
    return f"{opening} {own}>{style}{body}"


def _escape(text: str) -> str:
    """Escape text for XML, which has no way to write most control characters."""
    return escape(
        "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    )
