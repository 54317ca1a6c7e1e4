"""The pictures of a report, each with a sentence that says what one sees."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from torchtitan_diloco.pictures.colours import SERIES
from torchtitan_diloco.pictures.line_chart import Series, line_chart
from torchtitan_diloco.pictures.scene import Scene
from torchtitan_diloco.pictures.stacked_bars import Bar, Part, stacked_bars
from torchtitan_diloco.pictures.timeline_chart import timeline_chart
from torchtitan_diloco.report.facts import SHARES, data_parallel_bytes, mean_share
from torchtitan_diloco.report.run_records import Record, Run, number

TRAINED = "train/loss_nats_per_token_global"
VALIDATED = "validation/loss_nats_per_token_global"
SENT = "diloco/sent_bytes_sum_over_ranks"
BANDWIDTH_USED = "diloco/bandwidth_used_mbit_per_second_mean_over_workers"
BANDWIDTH_PEAK = "diloco/bandwidth_peak_mbit_per_second_max_over_workers"
SHARE_ROLES = {
    "compute": "series-1",
    "data": "series-3",
    "exposed communication": "series-2",
    "other": "series-8",
}
WIDE, NARROW = 980.0, 430.0
LAST_ROUNDS, LAST_ROUNDS_NARROW = 8, 3
"""On a wide and on a narrow picture."""
MOST_CURVES = 2 * SERIES
FAR_APART = 30.0
"""Rates are drawn on a logarithmic axis from here on."""
MANY_LOSSES = 50
"""So many, and the highest of them may be left out of a picture."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    scene: Scene
    caption: str
    narrow: Scene | None = None
    """For a narrow page, where the scene is a wide one."""


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Without those for which no run has recorded anything."""
    unit, size = _time_unit(runs)
    found = [
        _loss(runs, "Loss over tokens", "tokens, all workers", lambda run: run.tokens_at),
        _loss(runs, "Loss over time", unit, lambda run: lambda step: run.seconds_at(step) / size),
        _sent(runs, unit, size),
        _bandwidth(runs, unit, size),
        _time_shares(runs),
        *_timelines(runs),
        _rounds_chart(
            runs,
            "Cosine of a worker's update to the mean",
            "cosine",
            _cosine,
            "1: all workers pull the same way; near 0: each pulls its own way, as far as noise goes.",
        ),
        _rounds_chart(
            runs,
            "Drift of the workers",
            "root mean square over parameters",
            _drift,
            "How far a worker was from the new shared parameters, before it took them over.",
        ),
    ]
    return [figure for figure in found if figure is not None]


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    longest = max((run.seconds_at(run.last_step) for run in runs), default=0.0)
    if longest < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)


def _loss(
    runs: Sequence[Run], title: str, x_label: str, x: Callable[[Run], Callable[[float], float]]
) -> Figure | None:
    series: list[Series] = []
    for colour, run in enumerate(runs):
        place = x(run)
        trained, validated = (
            [(place(step), loss) for step, loss in run.curve(key)] for key in (TRAINED, VALIDATED)
        )
        alone = len(runs) == 1
        if trained:
            name = "training" if alone else "" if validated else run.name
            hint = "training" if alone else f"{run.name}, training"
            series.append(Series(name, trained, faint=bool(validated), colour=colour, hint=hint))
        if validated:
            name, hint = ("shared model", "") if alone else (run.name, f"{run.name}, shared model")
            series.append(Series(name, validated, markers=True, colour=colour, hint=hint))
    if not series:
        return None
    top = _end_of_axis(series)
    scene = line_chart(
        series, title=title, x_label=x_label, y_label="nats per token", y_range=(None, top)
    )
    caption = "Training loss over the tokens of all workers."
    if any(one.faint for one in series):
        caption = "Faint: training loss over the tokens of all workers. Strong, with dots: the shared model on held-out text."
    return Figure(
        scene,
        caption
        if top is None
        else f"{caption} The highest losses, 1 in 50 or fewer, are above the picture.",
    )


def _end_of_axis(series: Sequence[Series]) -> float | None:
    """The first losses and rare leaps would press all else to the ground. None: there are none."""
    losses = sorted(loss for one in series for _, loss in one.points if math.isfinite(loss))
    if len(losses) < MANY_LOSSES:
        return None
    most = losses[-(len(losses) // 50) - 1]
    top = most + 0.05 * (most - losses[0])
    return top if most > losses[0] and top < losses[-1] else None


def _sent(runs: Sequence[Run], unit: str, size: float) -> Figure | None:
    series: list[Series] = []
    compared = False
    for colour, run in enumerate(runs):
        workers, total = run.workers, 0.0
        sent: Points = []
        for step, value in run.curve(SENT):
            total += value if math.isfinite(value) else 0.0
            sent.append((run.seconds_at(step) / size, total / (workers or 1)))
        if workers is None or not total:
            continue
        name = "" if len(runs) == 1 else run.name
        series.append(Series(name or "sent", sent, colour=colour))
        expected = [
            (run.seconds_at(step) / size, data_parallel_bytes(run, step) or math.nan)
            for step, _ in run.curve(SENT)
        ]
        if any(math.isfinite(value) for _, value in expected):
            compared = True
            named = "" if name else "data parallelism would send"
            hint = f"{name}, if it were data parallelism" if name else ""
            series.append(Series(named, expected, colour=colour, dash=True, hint=hint))
    if not series:
        return None
    scene = line_chart(
        series,
        title="Bytes sent by each worker",
        x_label=unit,
        y_label="bytes since the start",
        y_log=compared,
    )
    dashed = (
        " Dashed: what data parallelism sends for as many steps (bf16 gradients, ring). Logarithmic."
        if compared
        else ""
    )
    return Figure(
        scene,
        f"What one worker has sent to others so far, counted in the buffers, mean over workers.{dashed}",
    )


def _bandwidth(runs: Sequence[Run], unit: str, size: float) -> Figure | None:
    series: list[Series] = []
    for colour, run in enumerate(runs):
        curves = (_used(run), run.curve(BANDWIDTH_PEAK))
        used, peak = (
            [(run.seconds_at(step) / size, value) for step, value in curve] for curve in curves
        )
        name = "" if len(runs) == 1 else run.name
        if used:
            series.append(Series(name or "used", used, colour=colour, hint=f"{name} used".strip()))
        if peak:
            series.append(
                Series(
                    "" if name else "peak",
                    peak,
                    dash=True,
                    colour=colour,
                    hint=f"{name} peak".strip(),
                )
            )
    if not series:
        return None
    rates = sorted(rate for one in series for _, rate in one.points if 0 < rate < math.inf)
    apart = bool(rates) and rates[-1] > FAR_APART * rates[len(rates) // 4]
    scene = line_chart(
        series,
        title="Bandwidth",
        x_label=unit,
        y_label="Mbit/s sent by a worker",
        y_log=apart,
        y_range=(None if apart else 0.0, None),
    )
    caption = (
        "Bytes sent in an interval over its length, mean over workers: what the link must carry."
    )
    caption += (
        " Dashed: the highest rate of one worker while it was sending."
        if any(one.dash for one in series)
        else ""
    )
    return Figure(scene, f"{caption} Logarithmic." if apart else caption)


def _used(run: Run) -> Points:
    """As recorded, or, in runs from before it was, as bytes over time."""
    told = run.curve(BANDWIDTH_USED)
    if told or run.workers is None:
        return [(float(step), value) for step, value in told]
    found: Points = []
    before = 0.0
    for step, value in run.curve(SENT):
        now = run.seconds_at(step)
        if now > before:
            found.append((step, 8 * value / run.workers / (now - before) / 1e6))
        before = now
    return found


def _timelines(runs: Sequence[Run]) -> list[Figure]:
    found: list[Figure] = []
    for run in (run for run in runs if run.rounds):
        of = f", {run.name}" if len(runs) > 1 else ""
        shown = min(LAST_ROUNDS, len(run.rounds))
        wide = timeline_chart(
            run.rounds, last=shown, width=WIDE, title=f"The last {shown} exchanges{of}"
        )
        fewer = min(LAST_ROUNDS_NARROW, shown)
        narrow = timeline_chart(
            run.rounds, last=fewer, width=NARROW, title=f"The last {fewer} exchanges{of}"
        )
        caption = (
            "Above, a worker's training thread: where it is not taking, waiting or merging, it computes. Below, its exchanges "
            "in the background. Numbers are fragments; the workers' clocks are aligned at the moment when all had been heard."
        )
        found.append(Figure(wide, caption, narrow))
        closer = [
            timeline_chart(run.rounds, last=1, width=width, title=f"The last exchange{of}")
            for width in (WIDE, NARROW)
        ]
        found.append(Figure(closer[0], "The same for the last one alone.", closer[1]))
    return found


def _time_shares(runs: Sequence[Run]) -> Figure | None:
    bars = []
    for run in runs:
        shares = {name: mean_share(run, key) for name, key in SHARES.items()}
        parts = [
            Part(name, share, SHARE_ROLES[name])
            for name, share in shares.items()
            if share is not None
        ]
        if parts:
            bars.append(Bar(run.name, parts))
    if not bars:
        return None
    wide, narrow = (
        stacked_bars(bars, title="Where the time went", width=width) for width in (WIDE, NARROW)
    )
    caption = "Shares of the training thread's time, mean over ranks and over the run. Exposed is what training did not hide."
    if any("exposed communication" not in [part.name for part in bar.parts] for bar in bars):
        caption += " In data parallelism communication is part of compute."
    without = len(runs) - len(bars)
    caption += f" Not recorded by {without} of the runs." if without else ""
    return Figure(wide, caption, narrow)


def _rounds_chart(
    runs: Sequence[Run],
    title: str,
    y_label: str,
    value: Callable[[Record], float | None],
    meaning: str,
) -> Figure | None:
    series: list[Series] = []
    for run in runs:
        points = [(record, value(record)) for record in run.rounds]
        known = [(record, found) for record, found in points if found is not None]
        if len(runs) == 1:
            series += _by_fragment(known)
        elif known:
            series.append(Series(run.name, _by_step(known)))
    if not series:
        return None
    over = "Mean over workers and the fragments of a cycle."
    if len(runs) == 1:
        over = f"Mean over workers, a curve for each {'of the first fragments' if len(series) == MOST_CURVES else 'fragment'}."
    return Figure(
        line_chart(series, title=title, x_label="step", y_label=y_label), f"{meaning} {over}"
    )


def _by_fragment(known: Sequence[tuple[Record, float]]) -> list[Series]:
    curves = defaultdict[int, Points](list)
    names: dict[int, str] = {}
    for record, value in known:
        fragment = int(record.get("fragment") or 0)
        curves[fragment].append((float(record["step"]), value))
        names[fragment] = f"{fragment}: {record.get('fragment_name') or 'fragment'}"
    return [
        Series(
            names[fragment], curves[fragment], dash=number >= SERIES
        )  # where the colours begin again
        for number, fragment in enumerate(sorted(curves)[:MOST_CURVES])
    ]


def _by_step(known: Sequence[tuple[Record, float]]) -> Points:
    """Means over as many rounds as there are fragments, which differ more from each other than from one cycle to the next."""
    cycle = len({record.get("fragment") for record, _ in known})
    groups = [known[start : start + cycle] for start in range(0, len(known) - cycle + 1, cycle)]
    return [(float(group[-1][0]["step"]), fmean(value for _, value in group)) for group in groups]


def _cosine(record: Record) -> float | None:
    return _mean_over_workers(record, "cosine_to_mean")


def _drift(record: Record) -> float | None:
    drift, parameters = _mean_over_workers(record, "drift_norm"), number(record.get("parameters"))
    return drift / math.sqrt(parameters) if drift is not None and parameters else None


def _mean_over_workers(record: Record, key: str) -> float | None:
    values = [
        number(told.get(key)) for told in record.get("workers") or [] if isinstance(told, dict)
    ]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None
