"""Timeline of both threads of every worker, drawn by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from torchtitan_diloco.components.records import LANES, PHASE_COLOURS, Phase
from torchtitan_diloco.report.charts import LIGHT, STYLE, short_number, svg
from torchtitan_diloco.utils import brief

WIDTH, MARGINS = 980.0, 98.0
LANE, LANE_STEP, WORKER_STEP = 17.0, 20.0, 52.0
MAX_WORKERS = 8


def timeline_svg(title: str, found: Sequence[Phase], width: float = WIDTH) -> str:
    """Return two lanes for each worker as SVG, without title and legend."""
    figure, shown = draw_timeline(found, width)
    return svg(figure, title, list(map(_tooltip, shown)))


def save_timeline(title: str, found: Sequence[Phase], path: Path) -> None:
    """Write a timeline with title and legend to an .svg or .png file."""
    figure, shown = draw_timeline(found, title=title)
    if path.suffix == ".svg":
        text = svg(figure, title, list(map(_tooltip, shown)), standalone=True)
        path.write_text(text, encoding="utf-8")
    else:
        figure.savefig(path, dpi=144)


@rc_context(STYLE)
def draw_timeline(
    found: Sequence[Phase], width: float = WIDTH, title: str = ""
) -> tuple[Figure, list[Phase]]:
    """Draw two lanes for each worker, with a legend if there is a `title`.

    Return the figure and the phases in it. The bar of phase n has the id `tip-n`.
    """
    found = [phase for phase in found if phase.seconds > 0]
    workers = sorted({phase.worker for phase in found})
    start = min((phase.start_seconds for phase in found), default=0.0)
    length = max((phase.end_seconds for phase in found), default=1.0) - start
    tops = {worker: row * WORKER_STEP for row, worker in enumerate(workers[:MAX_WORKERS])}
    found = [phase for phase in found if phase.worker in tops]
    hidden = len(workers) - len(tops)
    more = f"; {hidden} more workers are not shown" if hidden else ""
    height = WORKER_STEP * max(1, len(tops))
    size = width / 72, (height + (112 if title else 54)) / 72
    figure = Figure(size, layout="constrained")
    x_label = f"seconds, from {start:,.2f} s on worker 0's clock{more}"
    axes = figure.add_subplot(xlabel=x_label, xlim=(0, length), ylim=(height, 0))
    axes.xaxis.set_major_formatter(short_number)
    axes.xaxis.set_major_locator(MaxNLocator(8 if width > 600 else 4, steps=[1, 2, 5, 10]))
    for top in tops.values():
        axes.add_patch(Rectangle((0, top), length, LANE, color=LIGHT["band"], linewidth=0))
        below = top + LANE_STEP + LANE / 2
        axes.axhline(below, color=LIGHT["grid"], linewidth=1, zorder=0)
    names = [name for worker in tops for name in (f"worker {worker}", "exchange")]
    ticks = [top + lane + LANE / 2 for top in tops.values() for lane in (0, LANE_STEP)]
    axes.set_yticks(ticks, names)
    for label in axes.get_yticklabels()[::2]:
        label.set(color=LIGHT["text"], weight="bold")
    for place, phase in enumerate(found):
        left = phase.start_seconds - start
        top = tops[phase.worker] + LANE_STEP * LANES.index(phase.lane)
        _draw_bar(axes, phase, (left, top), length / (width - MARGINS), f"tip-{place}")
    if title:
        keys = [Patch(color=LIGHT[c], label=name) for name, c in PHASE_COLOURS.items()]
        style: Any = {"ncols": 8, "frameon": False, "handlelength": 0.8, "alignment": "left"}
        style["title_fontproperties"] = {"size": 14, "weight": "bold"}
        figure.legend(handles=keys, title=title, loc="outside upper left", **style)
    return figure, found


def _draw_bar(
    axes: Axes, phase: Phase, corner: tuple[float, float], seconds_per_point: float, gid: str
) -> None:
    """Draw a phase, with the number of its fragment if there is room."""
    length = max(phase.seconds, seconds_per_point)
    colour = LIGHT[PHASE_COLOURS[phase.name]]
    axes.add_patch(Rectangle(corner, length, LANE, facecolor=colour, linewidth=0, gid=gid))
    fragment, centre = str(phase.round.fragment), (corner[0] + length / 2, corner[1] + LANE / 2)
    if length / seconds_per_point > 8 * len(fragment) + 4:
        text = axes.text(*centre, fragment, color=LIGHT["surface"])
        text.set(ha="center", va="center_baseline")


def _tooltip(phase: Phase) -> str:
    found, sent_bytes = phase.round, phase.round.workers[phase.worker].sent_bytes
    sent = f", {short_number(sent_bytes)}B sent" if np.isfinite(sent_bytes) else ""
    return (
        f"worker {phase.worker}: {phase.name} {brief(phase.seconds)}\n"
        f"fragment {found.fragment} ({found.fragment_name}), round {found.outer_round}{sent}"
    )
