"""Picture of a timeline, for TensorBoard and the report, and the style of all pictures.

Importing it imports matplotlib, which is slow.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

from torchtitan_diloco.components.timeline import LANES, PHASE_COLOURS, Phase

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
"""matplotlib's settings for all pictures of a run, here and in the report."""
WIDTH, MARGINS = 980.0, 98.0
LANE, LANE_STEP, WORKER_STEP = 17.0, 20.0, 52.0
MAX_WORKERS = 8


@rc_context(STYLE)
def draw_timeline(
    found: Sequence[Phase], width: float = WIDTH, title: str = ""
) -> tuple[Figure, list[Phase]]:
    """Draw two lanes per worker, with a legend if there is a `title`.

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


def short_number(value: float, _: object = None) -> str:
    """Return a number as an axis shows it: `1.5M`, `35k`, `0.25`."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"
