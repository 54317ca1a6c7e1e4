"""Predict kept time, or goodput: the share of the chips' time that makes steps whose work is kept.

Chips fail independently, at random times. Every way to train has the same closed form (`kept_time`)
and differs in what it puts in: how often the same chips stop, for how long, and which work is lost.

Not in the model: failures that need no restart or hit several chips, and those of a site, the
store or the network; a lack of spare chips; and what more islands cost in loss and traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_diloco.base.formatting import clock, markdown_table
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.rules.presence import SILENT

RARE = 999
"""Checkpoints that only serve a disaster: training takes so many times the time of a save, so that
saves take a thousandth of all time."""
ENOUGH = 0.001
"""The fewest islands within this of the best goodput are enough."""


@dataclass(frozen=True)
class Fleet:
    """Chips, how often one fails, and the seconds that a failure takes."""

    chips: int
    mtbf: float
    """Mean seconds between two failures of a chip."""
    detect: float
    """Seconds until the failure is known."""
    restart: float
    """Seconds until new processes have started on chips that work, and have read a checkpoint."""
    rejoin: float
    """Seconds until survivors or other islands and those that come back train together."""
    save: float = 0.0
    """Seconds for which training stops for a checkpoint."""

    def __post_init__(self) -> None:
        if self.chips < 1:
            raise UserError(f"--chips {self.chips}: give at least one chip, as in --chips 512")
        if self.mtbf <= 0:
            raise UserError(
                "--mtbf 0: give a time above 0 between two failures of a chip, as in --mtbf 3y"
            )

    @property
    def every(self) -> float:
        """Mean seconds between two failures of any chip."""
        return self.mtbf / self.chips


@dataclass(frozen=True)
class Rules:
    """Settings of the islands of a run."""

    islands: int
    sync_every: int
    delay: int
    step_seconds: float
    grace_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.islands < 2:
            raise UserError(f"--islands {self.islands}: give 2 or more")
        if self.step_seconds <= 0:
            raise UserError(f"--step-time {self.step_seconds:g}s: give a time above 0")
        if not 0 < self.grace_seconds <= 3600:
            raise UserError(f"--grace {self.grace_seconds:g}s: give more than 0, up to 1h")


class Outlook(NamedTuple):
    """What a way to train puts into the formula. Times are in seconds."""

    name: str
    every: float
    """Mean time of training between two failures that stop the same chips."""
    pause: float
    """Time for which these chips stop after a failure."""
    lost: float
    """Mean time of training whose work a failure loses."""
    interval: float
    """Time from one checkpoint to the next."""
    save: float = 0.0
    """Time for which training stops for a checkpoint."""
    waiting: float | None = None
    """Share of its time for which an island waits for others that are absent."""

    @property
    def goodput(self) -> float:
        """Share of the time that makes steps whose work is kept.

        Of segments of 2 x lost seconds, 1 / (e^y - 1) end between two failures (J. T. Daly, 2006).
        Failures during a pause are handled in it.
        """
        y = 2 * self.lost / self.every
        if y > 500:
            return 0.0
        without_saves = self.interval / (self.interval + self.save) if self.save else 1.0
        without_repeats = y / math.expm1(y) if y else 1.0
        without_waiting = 1 - (self.waiting or 0.0)
        return without_saves * without_repeats / (1 + self.pause / self.every) * without_waiting


def best_interval(every: float, save: float) -> float:
    """Return the interval with the best goodput: that of Young, with the terms of Daly."""
    if save >= 2 * every:
        return every
    share = save / (2 * every)
    return math.sqrt(2 * save * every) * (1 + math.sqrt(share) / 3 + share / 9) - save


def one_job(fleet: Fleet, interval: float | None = None) -> Outlook:
    """Return the outlook of data parallelism that is not elastic, or of workers of one job."""
    if interval is None:
        interval = best_interval(fleet.every, fleet.save)
    pause = fleet.detect + fleet.restart
    lost = (interval + fleet.save) / 2
    return Outlook(
        name="one job",
        every=fleet.every,
        pause=pause,
        lost=lost,
        interval=interval,
        save=fleet.save,
    )


def elastic(fleet: Fleet, interval: float | None = None) -> Outlook:
    """Return the outlook of data parallelism whose survivors have all state, and go on while chips
    are replaced."""
    if interval is None:
        interval = RARE * fleet.save
    pause = fleet.detect + fleet.rejoin
    return Outlook(
        name="elastic data parallelism",
        every=fleet.every,
        pause=pause,
        lost=0.0,
        interval=interval,
        save=fleet.save,
    )


def islands(fleet: Fleet, rules: Rules, interval: float | None = None) -> Outlook:
    """Return the outlook of islands of equal size.

    One that failed loses the work since its last part was stored.
    """
    if interval is None:
        interval = RARE * fleet.save
    every = fleet.every * rules.islands
    pause = fleet.detect + fleet.restart + fleet.rejoin
    lost = (rules.sync_every + rules.delay) / 2 * rules.step_seconds
    waits = rules.grace_seconds > rules.delay * rules.step_seconds
    absences = (rules.islands - 1) / (every + pause)  # of others in a second
    waiting = min(1.0, absences * min(pause, SILENT)) if waits else 0.0
    return Outlook(
        name=f"{rules.islands} islands",
        every=every,
        pause=pause,
        lost=lost,
        interval=interval,
        save=fleet.save,
        waiting=waiting,
    )


def outlooks(
    fleet: Fleet, rules: Sequence[Rules], interval: float | None = None
) -> tuple[list[Outlook], Outlook]:
    """Return one job, elastic data parallelism, and the islands of each of these rules. Of these,
    return also the fewest that are almost as good as the best."""
    most = max(rule.islands for rule in rules)
    if most > fleet.chips:
        raise UserError(f"--islands {most}: give 2 or more, up to {fleet.chips} chips")
    if interval is not None and not 0 < interval < math.inf:
        raise UserError(f"--checkpoint {interval:g}s: give a time above 0")
    by_number = sorted(rules, key=lambda rule: rule.islands)
    of_islands = [islands(fleet, rule, interval) for rule in by_number]
    best = max(outlook.goodput for outlook in of_islands)
    chosen = next(outlook for outlook in of_islands if outlook.goodput >= best - ENOUGH)
    return [one_job(fleet, interval), elastic(fleet, interval), *of_islands], chosen


FORMULAS = f"""\
* are the fewest islands within 0.1 points of the best. T is "checkpoint every", S is --save:

kept time = T / (T + S) x y / (e^y - 1) / (1 + for / every) x (1 - waiting), y = 2 x lost / every
every     = MTBF / chips, of islands x their number M
for       = one job: detect + restart; elastic: detect + rejoin; islands: all three
lost      = one job: (T + S) / 2; elastic: 0; islands: (H + tau) / 2 steps
T         = one job: sqrt(2 S every) x (1 + sqrt(s) / 3 + s / 9) - S, s = S / (2 every)
            (Young, Daly; every, if S is twice as long); others: {RARE} x S; or --checkpoint
waiting   = islands: (M - 1) / (every + for) x {SILENT:g} s (or for, if shorter),
            0 if tau steps take as long as the grace"""


def outlooks_text(compared: Sequence[Outlook], chosen: Outlook) -> str:
    """Return a table, with the chosen islands marked, and the formulas of its numbers."""
    rows = [
        [
            f"* {outlook.name}" if outlook is chosen else outlook.name,
            f"{100 * outlook.goodput:.2f} %",
            _time(outlook.every),
            _time(outlook.pause),
            _time(outlook.lost),
            _time(outlook.interval) if outlook.interval else "any time",
            "-" if outlook.waiting is None else f"{100 * outlook.waiting:.2f} %",
        ]
        for outlook in compared
    ]
    columns = "training as, kept time, every, for, lost, checkpoint every, waiting"
    return f"{markdown_table(columns.split(', '), rows)}\n\n{FORMULAS}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else clock(seconds)
