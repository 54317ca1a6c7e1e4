"""Predict kept time, or goodput: the share of the chips' time that makes steps whose work is kept.

Chips fail independently. A failure stops a job. After a pause it goes on from its last checkpoint
(`job_goodput`, exact for failures at random times). Elastic data parallelism goes on from the state
of the surviving replicas. An island is a job of its own, whose work is kept by the log. What its
absence costs comes from the rules of the islands (`absence.py`).

Not in the model: failures that need no restart or hit several chips, and those of a site, the
server or the network; a lack of spare chips; and what more islands cost in loss and traffic.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from torchtitan_diloco.log import UserError, clock, markdown_table
from torchtitan_diloco.planner.absence import Absence, Rules, absence
from torchtitan_diloco.report.charts import LIGHT, STYLE, series_colour, short_number

YEAR = 365.0 * 86_400
SAVING = 0.001
"""Share of the time for checkpoints that keep no work, but only serve a disaster."""
ENOUGH = 0.001
"""The fewest islands within this of the best goodput are enough."""
MOST_SIMULATED = 3
"""Islands in the simulation of an absence. With more, it costs each of the others the same."""
LONGEST_SIMULATED = 30.0
"""Seconds. A longer absence costs the others no more."""


@dataclass(frozen=True)
class Fleet:
    """Chips, how often one fails, and the seconds that a failure takes."""

    chips: int
    mtbf: float
    """Mean seconds between two failures of a chip."""
    detect: float
    """Until the failure is known."""
    restart: float
    """Until new processes have started on chips that work, and have read a checkpoint."""
    rejoin: float
    """Until survivors or other islands and those that come back train together."""
    save: float = 0.0
    """For which training stops for a checkpoint."""

    def __post_init__(self) -> None:
        if self.chips < 1:
            raise UserError(f"--chips {self.chips}: give at least one chip, as in --chips 512")
        if self.mtbf <= 0:
            raise UserError(
                "--mtbf 0: give a time above 0 between two failures of a chip, as in --mtbf 3y"
            )

    @property
    def rate(self) -> float:
        """Failures of all chips in a second."""
        return self.chips / self.mtbf


class Outlook(NamedTuple):
    """Prediction for a way to train. Times are in seconds."""

    name: str
    goodput: float
    rate: float
    """Failures in a second that stop the same chips together."""
    pause: float
    """For which they stop then, without repeated work."""
    interval: float
    """From one checkpoint to the next."""


def job_goodput(rate: float, pause: float, interval: float, save: float = 0.0) -> float:
    """Return the goodput of a job that repeats its work since the last checkpoint.

    Args:
        rate: failures in a second. Those during a pause are handled in it.
        pause: seconds from a failure until the job trains.
        interval: seconds of training between two checkpoints. 0: no work is repeated.
        save: seconds for which a checkpoint stops training.
    """
    segment = interval + save
    if rate * segment > 500:
        return 0.0
    # In a time between failures of mean 1 / rate, 1 / (exp(rate * segment) - 1) segments end.
    kept = interval / segment if segment else 1.0
    lost_in = math.expm1(rate * segment) / (rate * segment) if rate * segment else 1.0
    return kept / lost_in / (1 + rate * pause)


def best_interval(rate: float, save: float) -> float:
    """Return the interval with the best goodput: about sqrt(2 save / rate) (Young, Daly)."""
    if not save:
        return 0.0
    interval = math.sqrt(2 * save / rate)
    for _ in range(50):  # Newton's method, for rate * interval = 1 - exp(-rate * segment)
        survives = math.exp(-rate * (interval + save))
        interval -= (rate * interval - 1 + survives) / (rate * (1 - survives))
    return interval


def one_job(fleet: Fleet, interval: float | None = None) -> Outlook:
    """Data parallelism that is not elastic, and workers that are one job, fail alike."""
    rate, pause = fleet.rate, fleet.detect + fleet.restart
    interval = best_interval(rate, fleet.save) if interval is None else interval
    goodput = job_goodput(rate, pause, interval, fleet.save)
    return Outlook("one job", goodput, rate, pause, interval)


def elastic(fleet: Fleet, interval: float | None = None) -> Outlook:
    """Data parallelism whose survivors have all state, and go on while chips are replaced."""
    pause, interval = fleet.detect + fleet.rejoin, _rare(fleet, interval)
    goodput = _saved(fleet, interval) * job_goodput(fleet.rate, pause, 0)
    return Outlook("elastic data parallelism", goodput, fleet.rate, pause, interval)


def islands(
    fleet: Fleet, rules: Rules, interval: float | None = None, *, are_elastic: bool = False
) -> Outlook:
    """Islands of equal size. `are_elastic`: each is elastic inside, as in Decoupled DiLoCo."""
    count, rate = rules.islands, fleet.rate / rules.islands
    cost = absence_cost(fleet, rules, are_elastic=are_elastic)
    pause = fleet.detect + max(fleet.rejoin, cost.rejoins)
    pause += 0.0 if are_elastic else fleet.restart
    # Its parts are like checkpoints, as its work since the last one is lost.
    own = job_goodput(rate, pause, 2 * cost.lost_steps * rules.step_seconds)
    absences = (count - 1) / (1 / rate + pause)  # of others in a second
    waiting = min(1.0, absences * cost.others_wait)
    interval = _rare(fleet, interval)
    goodput = _saved(fleet, interval) * own * (1 - waiting)
    return Outlook(f"{count} islands", goodput, rate, pause, interval)


def absence_cost(fleet: Fleet, rules: Rules, *, are_elastic: bool = False) -> Absence:
    """Return what an absence costs by the rules, as simulated with few islands."""
    few = min(rules.islands, MOST_SIMULATED)
    quorum = max(1, rules.quorum - (rules.islands - few))
    seconds = fleet.detect + fleet.rejoin + (0.0 if are_elastic else fleet.restart)
    few_rules = replace(rules, islands=few, quorum=quorum)
    return absence(few_rules, min(seconds, LONGEST_SIMULATED), dies=not are_elastic)


def _rare(fleet: Fleet, interval: float | None) -> float:
    return fleet.save * (1 / SAVING - 1) if interval is None else interval


def _saved(fleet: Fleet, interval: float) -> float:
    return interval / (interval + fleet.save) if fleet.save else 1.0


def outlooks(
    fleet: Fleet, rules: Sequence[Rules], interval: float | None = None
) -> tuple[list[Outlook], Outlook]:
    """Return one job, elastic data parallelism, and the islands of each of these rules. Of these,
    return also the fewest that are almost as good as the best."""
    for one in rules:
        if not 2 <= one.islands <= fleet.chips:
            raise UserError(f"--islands {one.islands}: give 2 or more, up to {fleet.chips} chips")
        if not 1 <= one.quorum <= one.islands:
            raise UserError(f"--quorum {one.quorum}: give 1 to {one.islands} islands")
    if interval is not None and not 0 < interval < math.inf:
        raise UserError(f"--checkpoint {interval:g}s: give a time above 0")
    several = [islands(fleet, one, interval) for one in sorted(rules, key=lambda it: it.islands)]
    best = max(one.goodput for one in several)
    chosen = next(one for one in several if one.goodput >= best - ENOUGH)
    return [one_job(fleet, interval), elastic(fleet, interval), *several], chosen


def outlooks_text(found: Sequence[Outlook], chosen: Outlook) -> str:
    """Return a table, with the chosen islands marked."""
    rows = [
        [
            f"* {one.name}" if one is chosen else one.name,
            f"{100 * one.goodput:.2f} %",
            clock(1 / one.rate),
            clock(one.pause),
            clock(one.interval) if one.interval else "any time",
        ]
        for one in found
    ]
    columns = ["training as", "kept time", "stops every", "for", "checkpoint every"]
    return markdown_table(columns, rows)


def write_plot(path: Path, fleet: Fleet, rules: Sequence[Rules]) -> None:
    """Draw what is lost over the interval of checkpoints, with the best one of one job."""
    best = one_job(fleet)
    intervals = np.geomspace(60, max(86_400, 10 * best.interval), 100)
    ways: list[Callable[..., Outlook]] = [one_job, elastic]
    ways += [partial(islands, rules=one) for one in rules]
    with rc_context(STYLE | {"svg.fonttype": "none", "svg.hashsalt": "failures"}):
        figure = Figure((7, 4), layout="constrained")
        label = "minutes between checkpoints"
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel=label)
        axes.set_title("chips' time that is lost, %", loc="left")
        for number, way in enumerate(ways):
            found = [way(fleet, interval=interval) for interval in intervals]
            lost = [100 * (1 - one.goodput) for one in found]
            colour = LIGHT[series_colour(number)]
            axes.plot(intervals / 60, lost, color=colour, label=found[0].name)
        axes.plot(best.interval / 60, 100 * (1 - best.goodput), "o", color=LIGHT["series-1"])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(short_number)
        axes.grid(axis="y")
        axes.legend(frameon=False)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:  # no such folder, or an unknown format
            reason = f"{error}".splitlines()[0]
            raise UserError(f"--plot {path}: {reason}: give a new .svg or .png file") from error
