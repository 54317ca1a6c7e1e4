"""Line charts and timelines, drawn by matplotlib.

On a page they are SVG with text as text and CSS variables as colours, so that they follow the
reader's fonts and light or dark colour scheme. Tooltips are SVG titles: no script is needed.
"""

import io
import itertools
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
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from torchtitan_diloco.components.timeline import Phase
from torchtitan_diloco.components.timeline_figure import (
    COLOURS,
    LIGHT,
    STYLE,
    WIDTH,
    draw_timeline,
    short_number,
)
from torchtitan_diloco.report.run_records import Array
from torchtitan_diloco.utils import brief

SERIES = 8
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
LINE_CHART_SIZE = (430.0, 226.0)
"""Small, so that texts are readable on a telephone."""
HOVER_STRIPS = 48
MAX_DOTS = 80
LARGEST = 1e100
"""Values beyond are not drawn: an axis cannot be computed for all floating-point numbers."""


@dataclass(frozen=True)
class Curve:
    """Curve of a line chart. Values that have no place on the axis are gaps."""

    name: str
    x: Array
    y: Array
    series: int
    """Curves of one series have one colour."""
    dashed: bool = False
    dots: bool = False
    faint: bool = False
    """Drawn thin and behind the other curves."""


def series_colour(series: int) -> str:
    return f"series-{series % SERIES + 1}"


def css_variables(root: str = ":root") -> str:
    """Return the style sheet of charts. `root` selects the elements that get the colours."""
    light, dark = (
        "".join(f"--{name}:{pair[scheme]};" for name, pair in COLOURS.items()) for scheme in (0, 1)
    )
    return (
        f"{root}{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}"
        f".chart text{{font-family:{FONT}!important;pointer-events:none}}"
        ".hover{fill:var(--text);fill-opacity:0}.hover:hover{fill-opacity:.07}"
    )


@rc_context(STYLE)
def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    log: bool = False,
    top: float | None = None,
) -> str:
    """Return curves over a common axis as SVG, without title and legend.

    `log`: with a logarithmic y axis; `top`: end of the y axis.
    """
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
    svg = _svg(figure, title)
    return svg.replace("</svg>", f"{_hover_strips(axes, curves, x_label)}</svg>")


def _plot(axes: Axes, curve: Curve, log: bool) -> None:
    """Draw a curve, with a dot where a point has no neighbour."""
    shown = (np.abs(curve.y) < LARGEST) & ((curve.y > 0) | (not log))
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


def _hover_strips(axes: Axes, curves: Sequence[Curve], x_label: str) -> str:
    """Return invisible SVG strips over a drawn plot, whose tooltips are the values below them."""
    edges = np.linspace(*axes.get_xlim(), HOVER_STRIPS + 1)
    left, bottom, width, height = axes.get_position().bounds * np.tile(LINE_CHART_SIZE, 2)
    strips = ""
    for place, (start, end) in enumerate(itertools.pairwise(edges)):
        lines: list[str] = []
        position = start
        for curve in curves:
            inside = np.flatnonzero((curve.x >= start) & (curve.x < end) & np.isfinite(curve.y))
            if inside.size:
                lines.append(f"{curve.name}: {curve.y[inside[-1]]:.4g}")
                position = max(position, curve.x[inside[-1]])
        if lines:
            tooltip = _escape("\n".join([f"{short_number(position)} {x_label}", *lines]))
            strips += (
                f'<rect class="hover" x="{left + place * width / HOVER_STRIPS:.2f}" '
                f'y="{LINE_CHART_SIZE[1] - bottom - height:.2f}" height="{height:.2f}" '
                f'width="{width / HOVER_STRIPS:.2f}"><title>{tooltip}</title></rect>\n'
            )
    return strips


def timeline_svg(title: str, phases: Sequence[Phase], width: float = WIDTH) -> str:
    """Return the two threads of every worker over time as SVG, without title and legend."""
    figure, shown = draw_timeline(phases, width)
    return _svg(figure, title, [_bar_tooltip(phase) for phase in shown])


def save_timeline(title: str, phases: Sequence[Phase], path: Path) -> None:
    """Write a timeline with title and legend to an .svg or .png file."""
    figure, shown = draw_timeline(phases, title=title)
    if path.suffix == ".svg":
        tooltips = [_bar_tooltip(phase) for phase in shown]
        path.write_text(_svg(figure, title, tooltips, standalone=True), encoding="utf-8")
    else:
        figure.savefig(path, dpi=144)


def _bar_tooltip(phase: Phase) -> str:
    found, sent_bytes = phase.round, phase.round.workers[phase.worker].sent_bytes
    sent = f", {short_number(sent_bytes)}B sent" if np.isfinite(sent_bytes) else ""
    return (
        f"worker {phase.worker}: {phase.name} {brief(phase.seconds)}\n"
        f"fragment {found.fragment} ({found.fragment_name}), round {found.outer_round}{sent}"
    )


def _svg(
    figure: Figure, title: str, tooltips: Sequence[str] = (), *, standalone: bool = False
) -> str:
    """Return a figure as SVG for a page or, `standalone`, for a file of its own."""
    buffer = io.StringIO()
    width, height = figure.get_size_inches() * 72
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": f"{title} {width}"}
    with rc_context(options):  # the salt makes ids unique on a page and the same in every run
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=not standalone, metadata=metadata)
    body = buffer.getvalue().partition("</defs>")[2]

    for number, tooltip in enumerate(tooltips):
        body = body.replace(f'<g id="tip-{number}">', f"<g><title>{_escape(tooltip)}</title>")
    body = re.sub(r'(?<=<g) id="[^"]*"|; font-family:[^;"]*|<!--.*?-->', "", body)
    body = re.sub(r" transform=\"rotate\(-0 [^\"]*\"|(?<=\.\d\d)\d{4}(?=[ \"\n])", "", body)
    for name, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{name})")
    opening = (
        f'<svg class="chart" role="img" aria-label="{_escape(title)}" '
        f'viewBox="0 0 {width:g} {height:g}" xmlns:xlink="http://www.w3.org/1999/xlink"'
    )
    if not standalone:
        return f"{opening}>{body}"
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    style = f"<title>{_escape(title)}</title><style>{escape(css_variables('svg'))}</style>"
    return f"{opening} {size}>{style}{body}"


def _escape(text: str) -> str:
    """Escape text for XML, which cannot hold most control characters."""
    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))
