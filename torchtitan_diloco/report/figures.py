"""The figures of a page with their captions."""

import math
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchtitan_diloco.components.metrics import BASELINE, CORPUS_LOSS, SENT, time_shares
from torchtitan_diloco.components.records import NAN, number
from torchtitan_diloco.islands.past import Interval
from torchtitan_diloco.islands.stays import GAP_FACTOR, LEAST_GAP, Lanes, Stay, lanes_of
from torchtitan_diloco.report.charts import (
    AXIS,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASE_COLORS,
    SERIES,
    Curve,
    Exchange,
    Mark,
    line_chart,
    phases,
    series_color,
    timeline_span,
    timeline_svg,
)
from torchtitan_diloco.report.run_records import (
    ELAPSED_SECONDS,
    Array,
    Run,
    Worker,
    ended_at,
    of_known,
)

TOKENS = "train/tokens"
SHARE_COLORS = {
    "compute": BLUE,
    "data": GREEN,
    "exposed communication": ORANGE,
    "other": GREY,
}
MAX_FRAGMENTS = 16
SHOWN_EXCHANGES = 5
TIMELINE_CAPTION = (
    "Upper lane: a worker's training thread, which computes where it does not take, wait or merge. "
    "Lower lane: its exchanges in the background. Numbers are fragments. The workers' clocks are "
    "aligned at the moment when all headers have arrived, those of islands are not."
)
COSINE_CAPTION = "1: all workers move in the same direction; near 0: in unrelated directions."
DRIFT_CAPTION = "Distance of a worker from the new shared parameters before it merged them."
MARK_CAPTION = "Vertical line: a mixture of corpora begins."
DRIFT_UNIT = "root mean square over parameters"
COSINE = "round/cosine_to_mean"
DRIFT = "round/drift_norm"


class Axis(NamedTuple):
    """X axis of a chart: the values of a key that starts at 0, in units of `size`."""

    key: str
    label: str
    size: float = 1.0

    def curve(self, run: Run, key: str, source: Worker | None = None) -> tuple[Array, Array]:
        """Return the values of a key over this axis."""
        steps, values = run.curve(key, source)
        places = self.places(run, steps, source)
        return places, values if places.size else places

    def places(self, run: Run, steps: Array, source: Worker | None = None) -> Array:
        """Return where steps are on this axis, or nothing if it is not known."""
        known, counted = run.curve(self.key, source)
        if not known.size:
            return known
        begin = run.came_after(source) if source and self.key == ELAPSED_SECONDS else 0.0
        reached: Array = np.interp(steps, [0.0, *known], [0.0, *counted])
        return (reached + begin) / self.size


class Key(NamedTuple):
    """Entry of a legend. `kind` is line, dashed, faint or box."""

    name: str
    color: str
    kind: str = "box"


@dataclass(frozen=True)
class Figure:
    """A chart, a timeline, lanes or stacked bars, with the text around them."""

    title: str
    caption: str
    legend: Sequence[Key]
    unit: str = ""
    """Label of the y axis of a chart, or of the x axis of a timeline."""
    chart: str = ""
    """SVG, shown as an image."""
    timeline: str = ""
    """SVG, shown as a part of the page, as it has tooltips."""
    lanes: Lanes | None = None
    bars: dict[str, dict[str, float]] = field(default_factory=dict)
    """Percentages of the legend's entries by run."""

    @property
    def image(self) -> str:
        """Address of the chart, which contains it."""
        return f"data:image/svg+xml;base64,{b64encode(self.chart.encode()).decode()}"


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Return all figures for which there are records."""
    longest = np.nanmax([0.0, *(run.last(ELAPSED_SECONDS)[1] for run in runs)])
    time = Axis(ELAPSED_SECONDS, "seconds")
    if longest >= 3 * 3600:
        time = Axis(ELAPSED_SECONDS, "hours", size=3600.0)
    elif longest >= 600:
        time = Axis(ELAPSED_SECONDS, "minutes", size=60.0)
    tokens = Axis(TOKENS, "tokens of the run")
    candidates = [
        *map(_lanes, runs),
        _loss(runs, "Loss over tokens", tokens),
        _loss(runs, "Loss over time", time),
        _loss_of_corpora(runs[0], tokens) if len(runs) == 1 else None,
        _learning_rate(runs, tokens),
        _sent(runs, time),
        _time_shares(runs),
        *map(_shared_loss, runs),
        *map(_training_losses, runs),
        *map(_merged_tokens, runs),
        *map(_verdicts, runs),
        *_timelines(runs),
    ]
    if len(runs) == 1:
        title = "Cosine of a worker's update to the mean"
        candidates += [
            _rounds(runs[0], COSINE, title=title, unit="cosine", caption=COSINE_CAPTION),
            _rounds(
                runs[0],
                DRIFT,
                title="Drift of the workers",
                unit=DRIFT_UNIT,
                caption=DRIFT_CAPTION,
            ),
        ]
    return [figure for figure in candidates if figure is not None]


def _line_figure(
    runs: Sequence[Run],
    curves: Sequence[Curve],
    *,
    title: str,
    caption: str,
    unit: str,
    x_label: str,
    log: bool = False,
    top: float | None = None,
    marks: Sequence[Mark] = (),
) -> Figure | None:
    """Draw the curves that have a value. The legend names the curves of one run, or the runs.

    `x_label`, `log`, `top`: as for `line_chart`.
    """
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves:
        return None
    if marks:
        caption = f"{caption} {MARK_CAPTION}".strip()
    legend: dict[str, Key] = {}
    for place, curve in enumerate(curves):
        name = curve.name
        kind = "line"
        if len(runs) > 1:
            name = runs[curve.series].name
            curves[place] = replace(curve, name=f"{name}, {curve.name}")
        elif curve.dashed:
            kind = "dashed"
        elif curve.faint:
            kind = "faint"
        legend.setdefault(name, Key(name, series_color(curve.series), kind))
    chart = line_chart(curves, x_label=x_label, log=log, top=top, marks=marks)
    return Figure(title, caption, legend=list(legend.values()), unit=unit, chart=chart)


def _marks(runs: Sequence[Run], x: Axis | None = None) -> list[Mark]:
    """Return where mixtures begin after the start of a run, over an axis, or over steps. The marks
    of several runs have their colors and no names."""
    marks = list[Mark]()
    for series, run in enumerate(runs):
        later = [(name, record.step) for name, record in run.mixtures if record.step]
        steps = np.array([step for _, step in later], dtype=float)
        places = steps if x is None else x.places(run, steps)
        for place, (name, _) in zip(places.tolist(), later, strict=False):  # none if not known
            several = len(runs) > 1
            color = series_color(series) if several else AXIS
            marks.append(Mark(place, "" if several else name, color))
    return marks


def _loss(runs: Sequence[Run], title: str, x: Axis) -> Figure | None:
    """Draw the training loss and the validations of each run.

    Of a single run of islands, draw the training loss of each island.
    """
    curves: list[Curve] = []
    for series, run in enumerate(runs):
        places, losses = x.curve(run, "loss/val")
        shared = Curve("shared model", places, losses, series=series, dots=True)
        sources: list[tuple[Worker | None, str, int]] = [(None, "training", series)]
        if run.is_of_islands and len(runs) == 1:
            sources = [
                (worker, f"training, {worker.name}", number)
                for number, worker in enumerate(run.workers)
            ]
        for source, name, color in sources:
            places, losses = x.curve(run, "loss/train", source)
            is_faint = bool(shared.y.size)
            curves.append(Curve(name, places, losses, series=color, faint=is_faint))
        curves.append(shared)
    whose = "each island" if any(run.is_of_islands for run in runs) else "all workers"
    caption = f"Training loss of {whose}."
    for run in runs:
        name = f" of {run.name}" if len(runs) > 1 else ""
        tokens = run.last(TOKENS)[1]
        if run.parameters:
            caption += f" Model{name}: {run.parameters:,} parameters, {tokens:,.0f} tokens."
    if any(curve.faint for curve in curves):
        caption += " Strong, with dots: loss of the shared model on held-out text."
    top = _top_of_axis(np.concatenate([curve.y for curve in curves]))
    if top is not None:
        caption += " The highest losses, at most 1 in 10, are above the chart."
    return _line_figure(
        runs,
        curves,
        title=title,
        caption=caption,
        unit="nats per token",
        marks=_marks(runs, x),
        x_label=x.label,
        top=top,
    )


def _loss_of_corpora(run: Run, x: Axis) -> Figure | None:
    """Draw the loss on the held-out text of each corpus of a mixture."""
    names = (key for record in run.source.steps for key in record)
    keys = dict.fromkeys(key for key in names if CORPUS_LOSS in key)
    curves = []
    for series, key in enumerate(keys):
        places, losses = x.curve(run, key)
        name = key.removeprefix(CORPUS_LOSS)
        curves.append(Curve(name, places, losses, series=series, dots=True))
    return _line_figure(
        [run],
        curves,
        title="Loss by corpus",
        caption="Loss of the shared model on the held-out text of each corpus.",
        unit="nats per token",
        marks=_marks([run], x),
        x_label=x.label,
    )


def _learning_rate(runs: Sequence[Run], x: Axis) -> Figure | None:
    """Draw the learning rate of the inner optimizer."""
    curves = []
    for series, run in enumerate(runs):
        places, rates = x.curve(run, "train/lr")
        curves.append(Curve("learning rate", places, rates, series=series))
    return _line_figure(
        runs,
        curves,
        title="Learning rate",
        caption="Of the inner optimizer.",
        unit="rate",
        marks=_marks(runs, x),
        x_label=x.label,
    )


def _lanes(run: Run) -> Figure | None:
    """Show when each island was there."""
    if not run.stays:
        return None
    source = run.history.source if run.history else "the islands' clocks"
    caption = (
        f"Bar: signs of life of an island, on {source}. Mark: a part was merged one or more "
        "versions late."
    )
    return Figure(f"Islands of {run.name}", caption, [], lanes=lanes_of(run.stays))


def _shared_loss(run: Run) -> Figure | None:
    """Draw the loss of the shared model by the history of a run, unless records have more."""
    if run.history is None or run.last_step:
        return None
    points = np.array(run.history.losses, dtype=float).reshape(-1, 2)
    curve = Curve("shared model", points[:, 0], points[:, 1], series=0, dots=True)
    return _line_figure(
        [run],
        [curve],
        title=f"Loss of {run.name}",
        caption="Of the shared model, on held-out text.",
        unit="nats per token",
        x_label="merged tokens",
    )


def _training_losses(run: Run) -> Figure | None:
    """Draw the training losses of islands by the history of their run."""
    if run.last_step:
        return None
    return _of_intervals(
        run,
        lambda interval: NAN if interval.loss is None else interval.loss,
        title=f"Training loss of the islands of {run.name}",
        caption="Mean of the parts that were merged in ten minutes.",
        unit="nats per token",
    )


def _merged_tokens(run: Run) -> Figure | None:
    """Draw how fast the work of each island was merged by the history of their run."""
    return _of_intervals(
        run,
        lambda interval: interval.tokens_per_second,
        title=f"Merged tokens of {run.name}",
        caption="Work of each island that was merged, mean of ten minutes.",
        unit="tokens per second",
    )


def _of_intervals(
    run: Run, value: Callable[[Interval], float], *, title: str, caption: str, unit: str
) -> Figure | None:
    """Draw a value of each island over the time of the run."""
    history = run.history
    if history is None or not any(history.intervals.values()):
        return None
    last = max(interval.end for intervals in history.intervals.values() for interval in intervals)
    label, size = ("hours", 3600.0) if last - history.began >= 3 * 3600 else ("minutes", 60.0)
    curves = list[Curve]()
    for series, (name, intervals) in enumerate(history.intervals.items()):
        middles = [
            ((interval.begin + interval.end) / 2 - history.began) / size for interval in intervals
        ]
        values = np.array([value(interval) for interval in intervals], dtype=float)
        curves.append(Curve(name, np.array(middles), values, series=series, dots=True))
    return _line_figure([run], curves, title=title, caption=caption, unit=unit, x_label=label)


def _verdicts(run: Run) -> Figure | None:
    """Show when somebody was slow, and who."""
    if not run.verdicts:
        return None
    stays = [
        Stay(f"{verdict.culprit}: {verdict.what}", [[verdict.time, end]])
        for verdict, end in run.verdicts
    ]
    starts = (start.time for worker in run.workers for start in worker.starts)
    first = min(starts, default=min(verdict.time for verdict, _ in run.verdicts))
    times = (number(record.get("time")) for worker in run.workers for record in worker.steps)
    last = max(filter(math.isfinite, times), default=first)
    # The lane of the run makes the others begin and end with it. It is not shown.
    lanes = lanes_of([Stay("run", [[first, max(first, last)]]), *stays])
    caption = (
        "Bar: from when a verdict was made until it was over, or the process that made it ended. "
        "The table has the evidence."
    )
    return Figure(f"Verdicts of {run.name}", caption, [], lanes=lanes._replace(rows=lanes.rows[1:]))


def _top_of_axis(losses: Array) -> float | None:
    """Return an end of the axis that cuts off the first losses and spikes, if any."""
    losses = losses[np.isfinite(losses)]
    if losses.size < 10:
        return None
    low = float(losses.min())
    usual = float(np.quantile(losses, 0.9, method="lower"))
    top = usual + 0.1 * (usual - low)
    return top if low < usual and top < losses.max() else None


def _sent(runs: Sequence[Run], x: Axis) -> Figure | None:
    """Draw the bytes that a worker has sent, and those of the baseline."""
    curves: list[Curve] = []
    for series, run in enumerate(runs):
        times, sent = x.curve(run, SENT)
        if np.nansum(sent):
            counted = [record for record in run.source.steps if record.get(SENT) is not None]
            steps = np.cumsum([number(record.get("worker/steps")) for record in counted])
            expected = run.baseline_bytes(steps)
            curves.append(Curve("sent", times, np.nancumsum(sent), series=series))
            curves.append(Curve(BASELINE, times, expected, series=series, dashed=True))
    caption = (
        "Bytes that one worker has sent so far, counted in the buffers, mean over workers. Dashed: "
        "what data parallelism with bf16 gradients sends in as many steps, in a ring. Logarithmic "
        "axis."
    )
    return _line_figure(
        runs,
        curves,
        title="Bytes sent by each worker",
        caption=caption,
        unit="bytes since the start",
        x_label=x.label,
        log=True,
    )


def _time_shares(runs: Sequence[Run]) -> Figure | None:
    """Draw the shares of the training time, one bar a run."""
    bars = {run.name: time_shares(run.totals) for run in runs if run.totals}
    caption = (
        "Shares of the training time, without validations and saves, mean over all ranks. Exposed "
        "communication is what is not hidden behind training."
    )
    if any(np.isnan(shares["exposed communication"]) for shares in bars.values()):
        caption += " In data parallelism, communication is part of compute."
    if len(bars) < len(runs):
        caption += f" Not recorded by {len(runs) - len(bars)} of the runs."
    legend = [Key(*entry) for entry in SHARE_COLORS.items()]
    return Figure("Where the time went", caption, legend, bars=bars) if bars else None


def _timelines(runs: Sequence[Run]) -> list[Figure]:
    """Draw the timeline of each run's last exchanges."""
    timelines = []
    for run in runs:
        title = "The last exchanges"
        if len(runs) > 1:
            title += f", {run.name}"
        shown = [phase for phase in phases(latest(run, SHOWN_EXCHANGES)) if phase.seconds > 0]
        if shown:
            legend = [Key(*entry) for entry in PHASE_COLORS.items()]
            unit = timeline_span(shown, run.worker_names)
            svg = timeline_svg(title, shown, run.worker_names)
            timelines.append(Figure(title, TIMELINE_CAPTION, legend, unit=unit, timeline=svg))
    return timelines


def latest(run: Run, count: int) -> list[Exchange]:
    """Return the last exchanges, at most so many, without those before a pause of the run.

    Of an exchange that one island made up for long after the others, its part is left.
    """
    chosen = [exchange for exchange in run.exchanges[-count:] if math.isfinite(ended_at(exchange))]
    ends = np.array([ended_at(exchange) for exchange in chosen])
    gaps = np.diff(ends)
    longest = max(LEAST_GAP, GAP_FACTOR * np.median(gaps)) if gaps.size else math.inf
    (pauses,) = np.nonzero(gaps > longest)
    first = pauses[-1] + 1 if pauses.size else 0
    apart = longest if run.is_of_islands else math.inf  # clocks of a job's workers may differ
    shown = list[Exchange]()
    for exchange, end in zip(chosen[first:], ends[first:], strict=True):
        earliest = end - apart
        shown.append(
            [None if record is None or record.ended < earliest else record for record in exchange]
        )
    return shown


def _rounds(run: Run, name: str, *, title: str, unit: str, caption: str) -> Figure | None:
    """Draw the mean of a metric of rounds over the workers, by fragment."""
    names = dict[int, str]()
    points = defaultdict[int, list[tuple[int, float]]](list)
    for exchange in run.exchanges:
        known = [record for record in exchange if record is not None]
        first = known[0]
        names[first.fragment] = first.fragment_name
        values = np.array([record.number(name) for record in known])
        if math.isfinite(mean := of_known(np.mean, values)):
            step = max(record.step for record in known)
            size = math.sqrt(first.parameters) if name == DRIFT else 1.0
            points[first.fragment].append((step, mean / size))
    curves = []
    for place, fragment in enumerate(sorted(points)[:MAX_FRAGMENTS]):
        steps, means = np.array(points[fragment]).T
        label = f"{fragment}: {names[fragment]}"
        repeats_color = place >= len(SERIES)
        curves.append(Curve(label, steps, means, series=place, dashed=repeats_color))
    return _line_figure(
        [run],
        curves,
        title=title,
        caption=f"{caption} Mean over workers.",
        unit=unit,
        marks=_marks([run]),
        x_label="step",
    )
