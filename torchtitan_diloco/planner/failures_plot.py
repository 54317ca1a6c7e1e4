"""Draw what failures cost over the interval of checkpoints."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.planner.failures import Fleet, Outlook, Rules, elastic, islands, one_job
from torchtitan_diloco.report.charts import BLUE, STYLE, SVG, series_color, short_number


def write_plot(path: Path, fleet: Fleet, rules: Sequence[Rules]) -> None:
    """Draw the time that is lost, with the best interval of one job."""
    best = one_job(fleet)
    intervals = np.geomspace(60, max(86_400, 10 * best.interval), 100)
    outlook_functions: list[Callable[..., Outlook]] = [one_job, elastic]
    outlook_functions += [partial(islands, rules=rule) for rule in rules]
    with rc_context(STYLE | SVG):
        figure = Figure((7, 4), layout="constrained")
        label = "minutes between checkpoints"
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel=label)
        axes.set_title("chips' time that is lost, %", loc="left")
        for number, outlook_of in enumerate(outlook_functions):
            outlooks = [outlook_of(fleet, interval=interval) for interval in intervals.tolist()]
            lost = [100 * (1 - outlook.goodput) for outlook in outlooks]
            color = series_color(number)
            axes.plot(intervals / 60, lost, color=color, label=outlooks[0].name)
        axes.plot(best.interval / 60, 100 * (1 - best.goodput), "o", color=BLUE)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(short_number)
        axes.grid(axis="y")
        axes.legend(frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except (OSError, ValueError) as error:  # a folder is a file, or the format is unknown
            reason = f"{error}".splitlines()[0]
            raise UserError(f"--plot {path}: {reason}: give a new .svg or .png file") from error
