"""The timeline of the workers: who did what, when, on one clock."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from torchtitan_diloco.components.records import NAN, RoundRecord
from torchtitan_diloco.log import brief
from torchtitan_diloco.report.charts import LIGHT, STYLE, short_number, svg

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


def last_to_arrive(exchange: Exchange) -> tuple[int | None, float]:
    """Return the worker that held up an exchange, None if it is not known, and for how long.

    This needs no common clock: the last worker waits the shortest time for the others' headers.
    """
    waited = [NAN if one is None else one.waited_for_headers for one in exchange]
    if len(shortest := sorted(filter(math.isfinite, waited))) < 2:
        return None, NAN
    return waited.index(shortest[0]), shortest[1] - shortest[0]


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


def timeline_svg(
    title: str, found: Sequence[Phase], names: Sequence[str], width: float = TIMELINE_WIDTH
) -> str:
    """Return two lanes for each worker as SVG, without title and legend."""
    figure, shown = draw_timeline(found, names, width)
    return svg(figure, title, [_tooltip(phase, names) for phase in shown])


@rc_context(STYLE)
def draw_timeline(
    found: Sequence[Phase], names: Sequence[str], width: float = TIMELINE_WIDTH
) -> tuple[Figure, list[Phase]]:
    """Draw two lanes for each worker, whose names are given.

    Return the figure and the phases in it. The bar of phase n has the id `tip-n`. At least one
    phase must have a length.
    """
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
    return figure, found


def _tooltip(phase: Phase, names: Sequence[str]) -> str:
    found = phase.round
    sent = f", {short_number(found.sent_bytes)}B sent" if np.isfinite(found.sent_bytes) else ""
    return (
        f"{names[phase.worker]}: {phase.name} {brief(phase.seconds)}\n"
        f"fragment {found.fragment} ({found.fragment_name}), round {found.outer_round}{sent}"
    )
