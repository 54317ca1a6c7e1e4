"""The figures of a page, each with a caption that says what it shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from torchtitan_diloco.components.timeline import phases
from torchtitan_diloco.report.charts import (
    PHASE_COLOURS,
    SERIES,
    TIMELINE_WIDTH,
    Curve,
    line_chart,
    timeline_svg,
)
from torchtitan_diloco.report.facts import SHARES, data_parallel_bytes, mean_share
from torchtitan_diloco.report.run_records import (
    ELAPSED_SECONDS,
    SENT_BYTES,
    TOKENS,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Array,
    Run,
    number,
)

BANDWIDTH_USED = "diloco/bandwidth_used_mbit_per_second_mean_over_workers"
BANDWIDTH_PEAK = "diloco/bandwidth_peak_mbit_per_second_max_over_workers"
SHARE_COLOURS = dict(zip(SHARES, ("series-1", "series-3", "series-2", "series-8"), strict=True))
LOG_RATIO = 30.0
"""Rates that differ by more are drawn on a logarithmic axis."""
TIMELINE_CAPTION = (
    "Upper lane: a worker's training thread, which computes where it does not take, wait or merge. "
    "Lower lane: its exchanges in the background. Numbers are fragments. The workers' clocks are "
    "aligned at the moment when all headers have arrived."
)


class Key(NamedTuple):
    """Entry of a legend."""

    name: str
    colour: str
    kind: str = "line"
    """line, dashed, faint or box."""


class Share(NamedTuple):
    name: str
    colour: str
    percent: float


@dataclass(frozen=True)
class Figure:
    """SVG or stacked bars with what stands around them."""

    title: str
    caption: str
    legend: Sequence[Key]
    svg: str = ""
    narrow_svg: str = ""
    """Replaces a wide `svg` on a narrow page."""
    bars: dict[str, list[Share]] = field(default_factory=dict)
    """By run."""


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Return all figures for which at least one run has records."""
    longest = max(run.last(ELAPSED_SECONDS)[1] for run in runs)
    unit, size = ("hours", 3600.0) if longest >= 3 * 3600 else ("minutes", 60.0)
    if not longest >= 600:
        unit, size = "seconds", 1.0
    found = [
        _loss(runs, "Loss over tokens", TOKENS, "tokens, all workers", 1.0),
        _loss(runs, "Loss over time", ELAPSED_SECONDS, unit, size),
        _sent(runs, unit, size),
        _bandwidth(runs, unit, size),
        _time_shares(runs),
        *_timelines(runs),
        _cosine(runs),
        _drift(runs),
    ]
    return [figure for figure in found if figure is not None]


def _line_figure(
    runs: Sequence[Run], title: str, caption: str, curves: Sequence[Curve], **axes: Any
) -> Figure | None:
    """Draw the curves that have a value. The legend names them or, if there are several, the runs."""
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    legend: dict[str, Key] = {}
    for curve in curves:
        kind = "dashed" if curve.dashed else "faint" if curve.faint else "line"
        key = Key(curve.name, f"series-{curve.series % SERIES + 1}", kind)
        if len(runs) > 1:
            key = Key(runs[curve.series].name, key.colour)
        legend.setdefault(key.name, key)
    if len(runs) > 1:
        names = [f"{runs[curve.series].name}, {curve.name}" for curve in curves]
        curves = [replace(curve, name=name) for curve, name in zip(curves, names, strict=True)]
    if not curves:
        return None
    return Figure(title, caption, list(legend.values()), line_chart(title, curves, **axes))


def _loss(runs: Sequence[Run], title: str, x: str, x_label: str, size: float) -> Figure | None:
    curves: list[Curve] = []
    for series, run in enumerate(runs):
        steps, losses = run.curve(VALIDATION_LOSS)
        shared = Curve("shared model", run.interpolate(x, steps) / size, losses, series, dots=True)
        steps, losses = run.curve(TRAINING_LOSS)
        x_values, faint = run.interpolate(x, steps) / size, bool(shared.y.size)
        curves += [Curve("training", x_values, losses, series, faint=faint), shared]
    caption = "Training loss over the tokens of all workers."
    if any(curve.faint for curve in curves):
        caption = f"Faint: {caption} Strong, with dots: loss of the shared model on held-out text."
    top = _top_of_axis(np.concatenate([curve.y for curve in curves]))
    if top is not None:
        caption += " The highest losses, at most 1 in 50, are above the chart."
    return _line_figure(
        runs, title, caption, curves, x_label=x_label, y_label="nats per token", top=top
    )


def _top_of_axis(losses: Array) -> float | None:
    """Return an end of the axis that leaves out first losses and rare spikes, if there are any."""
    losses = losses[np.isfinite(losses)]
    if losses.size < 50:
        return None
    low, usual = float(losses.min()), float(np.quantile(losses, 0.98, method="lower"))
    top = usual + 0.05 * (usual - low)
    return top if low < usual and top < losses.max() else None


def _sent(runs: Sequence[Run], unit: str, size: float) -> Figure | None:
    curves: list[Curve] = []
    for series, run in enumerate(runs):
        steps, sent = run.curve(SENT_BYTES)
        if not (run.workers and np.nansum(sent)):
            continue
        times = run.interpolate(ELAPSED_SECONDS, steps) / size
        total = np.nancumsum(sent) / run.workers
        expected = np.array([data_parallel_bytes(run, step) for step in steps])
        curves.append(Curve("sent", times, total, series))
        curves.append(Curve("data parallelism would send", times, expected, series, dashed=True))
    compared = any(np.isfinite(curve.y).any() for curve in curves if curve.dashed)
    caption = "Bytes that one worker has sent so far, counted in the buffers, mean over workers."
    if compared:
        caption += (
            " Dashed: what data parallelism sends in as many steps (bf16 gradients, ring). "
            "Logarithmic axis."
        )
    axes = {"x_label": unit, "y_label": "bytes since the start", "log": compared}
    return _line_figure(runs, "Bytes sent by each worker", caption, curves, **axes)


def _bandwidth(runs: Sequence[Run], unit: str, size: float) -> Figure | None:
    curves: list[Curve] = []
    for series, run in enumerate(runs):
        for name, key in (("used", BANDWIDTH_USED), ("peak", BANDWIDTH_PEAK)):
            steps, rates = run.curve(key)
            times = run.interpolate(ELAPSED_SECONDS, steps) / size
            curves.append(Curve(name, times, rates, series, dashed=name == "peak"))
    rates = np.concatenate([curve.y for curve in curves])
    rates = rates[np.isfinite(rates) & (rates > 0)]
    log = bool(rates.size) and rates.max() > LOG_RATIO * np.quantile(rates, 0.25)
    caption = (
        "Bytes sent in an interval over its length, mean over workers: the load on a link. Dashed: "
        "the highest rate of one worker during a transfer."
    )
    caption += " Logarithmic axis." if log else ""
    axes = {"x_label": unit, "y_label": "Mbit/s sent by a worker", "log": log}
    return _line_figure(runs, "Bandwidth", caption, curves, bottom=None if log else 0.0, **axes)


def _time_shares(runs: Sequence[Run]) -> Figure | None:
    bars: dict[str, list[Share]] = {}
    for run in runs:
        shares = [
            Share(name, SHARE_COLOURS[name], mean_share(run, SHARES[name])) for name in SHARES
        ]
        known = [share for share in shares if np.isfinite(share.percent)]
        if known:
            bars[run.name] = known
    if not bars:
        return None
    caption = (
        "Shares of the training thread's time, mean over ranks and over the run. Exposed "
        "communication is what training did not hide."
    )
    if any(len(shares) < len(SHARES) for shares in bars.values()):
        caption += " In data parallelism communication is part of compute."
    if len(bars) < len(runs):
        caption += f" Not recorded by {len(runs) - len(bars)} of the runs."
    legend = [Key(name, colour, "box") for name, colour in SHARE_COLOURS.items()]
    return Figure("Where the time went", caption, legend, bars=bars)


def _timelines(runs: Sequence[Run]) -> list[Figure]:
    found = []
    for run in runs:
        suffix = f", {run.name}" if len(runs) > 1 else ""
        for (wide, narrow), title, caption in (
            ((8, 3), "The last exchanges", TIMELINE_CAPTION),
            ((1, 1), "The last exchange", "The same for the last exchange alone."),
        ):
            shown = phases(run.rounds[-wide:])
            fewer = phases(run.rounds[-narrow:])
            if not any(phase.seconds > 0 for phase in fewer):
                continue
            title += suffix
            names = {"computing"} | {phase.name for phase in shown}
            legend = [
                Key(name, PHASE_COLOURS[name], "box") for name in PHASE_COLOURS if name in names
            ]
            images = [
                timeline_svg(title, some, width)
                for some, width in ((shown, TIMELINE_WIDTH), (fewer, 430.0))
            ]
            found.append(Figure(title, caption, legend, *images))
    return found


def _cosine(runs: Sequence[Run]) -> Figure | None:
    caption = "1: all workers move in the same direction; near 0: their directions have nothing in common."
    values = [run.round_values("cosine_to_mean").mean(axis=1) for run in runs]
    title = "Cosine of a worker's update to the mean"
    return _rounds_figure(runs, title, caption, values, "cosine")


def _drift(runs: Sequence[Run]) -> Figure | None:
    caption = "Distance of a worker from the new shared parameters before it merged them."
    values = []
    for run in runs:
        parameters = np.array([number(record.get("parameters")) for record in run.rounds])
        values.append(run.round_values("drift_norm").mean(axis=1) / np.sqrt(parameters))
    return _rounds_figure(runs, "Drift of the workers", caption, values, "root mean square")


def _rounds_figure(
    runs: Sequence[Run],
    title: str,
    caption: str,
    values: Sequence[np.ma.MaskedArray[Any, Any]],
    y_label: str,
) -> Figure | None:
    """Draw a value of the rounds in which it was measured: a curve per fragment or, for several
    runs, per run."""
    curves: list[Curve] = []
    for series, (run, masked) in enumerate(zip(runs, values, strict=True)):
        measured = np.flatnonzero(np.isfinite(masked.filled(np.nan)))
        rounds, y = [run.rounds[place] for place in measured], masked[measured].filled(np.nan)
        x = np.array([float(record["step"]) for record in rounds])
        fragments = np.array([int(record.get("fragment") or 0) for record in rounds])
        names = {record.get("fragment"): record.get("fragment_name") for record in rounds}
        if len(runs) == 1:
            curves = [  # where the colours begin again, lines are dashed
                Curve(
                    f"{fragment}: {names[fragment] or 'fragment'}",
                    x[own],
                    y[own],
                    place,
                    place >= SERIES,
                )
                for place, fragment in enumerate(np.unique(fragments)[: 2 * SERIES].tolist())
                for own in [fragments == fragment]
            ]
        elif measured.size:  # fragments differ more from each other than from round to round
            cycle = len(names)
            whole = y.size // cycle * cycle
            means = y[:whole].reshape(-1, cycle).mean(axis=1)
            curves.append(Curve("mean of a cycle", x[cycle - 1 :: cycle], means, series))
    caption += (
        " Mean over workers, a curve for each of the first fragments."
        if len(runs) == 1
        else " Mean over workers and the fragments of a cycle."
    )
    return _line_figure(runs, title, caption, curves, x_label="step", y_label=y_label)
