"""All metrics, and what a log, a report and the boards compute from them.

A number has one name: in the records, on the boards, in a report and in the documentation
(docs/report-and-plan.md, whose table is made from `METRICS`). It is declared once, here or, if it
is one of the outer loop, in `OUTER_METRICS`. The declaration says how its values are merged.

The shares that a log, a report and the boards show are computed here: `hidden_percent`,
`compute_percent`, `exposed_percent` and `kept_time`. The first three are of all ranks of a job, by
its counters under world/, which all workers record alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeGuard

from torchtitan_diloco.diloco.metrics import OUTER_METRICS, Merge, Metric, Scope

Record = dict[str, Any]
"""Of a step: values by name, None if not known."""
HOUR = 3600.0
SENT = "world/sent_bytes"
CORPUS_LOSS = "loss/val/"
CORPUS_BITS = "loss/bits_per_byte/"
"""Prefixes of the names of the losses and of the bits per byte of single corpora."""
ANY_CORPUS = "CORPUS"
"""Stands for the name of a corpus in a declaration."""


def _seconds(meaning: str, *, of_job: bool = False) -> Metric:
    """Return a metric of seconds that are added up over steps."""
    return Metric("seconds", meaning, steps=Merge.SUM, ranks=Merge.MEAN, of_job=of_job)


def _speed(unit: str, meaning: str, scope: Scope = Scope.WORKER) -> Metric:
    return Metric(unit, meaning, scope, is_slow_at_first=True)


METRICS = {
    "loss/bits_per_byte": Metric("bits per byte", "of the same text as loss/val", Scope.RUN),
    f"{CORPUS_BITS}{ANY_CORPUS}": Metric(
        "bits per byte", "the same for the text of one of several corpora", Scope.RUN
    ),
    "loss/train": Metric("nats per token", "of the workers' own parameters", Scope.JOB),
    "loss/val": Metric("nats per token", "of the shared parameters, on held-out text", Scope.RUN),
    f"{CORPUS_LOSS}{ANY_CORPUS}": Metric(
        "nats per token", "the same for the text of one of several corpora", Scope.RUN
    ),
    "speed/compute_percent": _speed(
        "percent", "of the training time spent on computing", Scope.JOB
    ),
    "speed/mfu_percent": _speed("percent", "of the GPUs' bf16 peak"),
    "speed/seconds_per_step": _speed("seconds", "without validations and saves"),
    "speed/tokens_per_second": _speed("tokens/s", "without validations and saves", Scope.JOB),
    "sync/exposed_percent": Metric(
        "percent", "of the training time lost to communication", Scope.JOB
    ),
    "sync/hidden_percent": Metric(
        "percent", "of the exchanges' time hidden behind training", Scope.JOB
    ),
    "sync/mbit_per_second": Metric("Mbit/s", "sent to other workers, mean over the wall time"),
    "train/gradient_norm": Metric("norm", "of the last step, before clipping"),
    "train/lr": Metric("rate", "of the inner optimizer", Scope.RUN),
    "train/memory_gib": Metric(
        "GiB", "peak since the start of the process", steps=Merge.MAX, ranks=Merge.MAX
    ),
    "train/phase": Metric(
        "number", "of the mixture that is read next, 0 for data.mixture", Scope.RUN
    ),
    "train/tokens": Metric("tokens", "since the start of the run", Scope.RUN),
    # TensorBoard sorts names, so the rest comes last.
    "worker/agreement_seconds": _seconds("waiting for answers of other ranks", of_job=True),
    "worker/compute_seconds": _seconds("of the steps, without waiting", of_job=True),
    "worker/compute_spread": Metric(
        "seconds",
        "standard deviation of the compute of a step",
        steps=Merge.MEAN,
        ranks=Merge.MEAN,
    ),
    "worker/data_seconds": _seconds("waiting for data", of_job=True),
    "worker/elapsed_seconds": Metric("seconds", "since the start of the run, all its processes"),
    "worker/queued_seconds": _seconds("of the steps, ready to run but without a core"),
    "worker/skipped_steps": Metric(
        "steps", "skipped, as gradients were not finite", steps=Merge.SUM
    ),
    "worker/step_seconds": _seconds("of the steps", of_job=True),
    "worker/steps": Metric("steps", "in the interval", steps=Merge.SUM),
    "worker/wall_seconds": _seconds("without validations and saves", of_job=True),
    "world/longest_data_seconds": Metric(
        "seconds",
        "longest wait of a rank for the data of one step",
        Scope.JOB,
        steps=Merge.MAX,
        ranks=Merge.MAX,
        is_slow_at_first=True,
    ),
} | OUTER_METRICS


OF_JOB = {
    name.replace("worker/", "world/"): name for name, metric in METRICS.items() if metric.of_job
}
"""Metrics of workers by the names of their means over all workers of the job."""
METRICS |= {
    name: METRICS[of_worker]._replace(
        meaning=f"{METRICS[of_worker].meaning}, mean over workers",
        scope=Scope.JOB,
        fragments=None,
        of_job=False,
    )
    for name, of_worker in OF_JOB.items()
}
OVER_STEPS = {name: metric.steps for name, metric in METRICS.items() if metric.steps is not None}


def _reduced_over(scope: Scope, *merges: Merge) -> tuple[str, ...]:
    """Return the metrics of a scope that merge over ranks in one of these ways."""
    return tuple(
        name for name, metric in METRICS.items() if metric.scope is scope and metric.ranks in merges
    )


SUMMED_OVER_JOB = _reduced_over(Scope.JOB, Merge.SUM, Merge.MEAN)
LARGEST_OF_JOB = _reduced_over(Scope.JOB, Merge.MAX)
MERGED_IN_WORKER = _reduced_over(Scope.WORKER, *Merge)


def metric_of(name: str) -> Metric | None:
    """Return the metric of a name, None if it is not declared."""
    for prefix in (CORPUS_LOSS, CORPUS_BITS):
        if name.startswith(prefix):
            return METRICS[f"{prefix}{ANY_CORPUS}"]
    return METRICS.get(name)


def described(name: str, workers: int) -> str:
    """Return unit, meaning and scope in a job of so many workers, "" if it is not declared."""
    metric = metric_of(name)
    if metric is None:
        return ""
    is_of_all = metric.scope is Scope.RUN or (metric.scope is Scope.JOB and workers > 1)
    owner = "all workers" if is_of_all else "this worker"
    return f"{metric.unit}, {metric.meaning}; {owner}"


# --- totals ---------------------------------------------------------------------------------------

Totals = dict[str, float]
"""Numbers of many steps, merged from their records."""


def add_totals(totals: Totals, record: Mapping[str, Any]) -> None:
    """Merge the numbers of the next record into the totals, as they merge over steps.

    Means are weighted with the steps of the record.
    """
    steps = record.get("worker/steps")
    if not _is_number(steps) or not steps > 0:
        steps = 1.0
    steps_so_far = totals.get("worker/steps", 0.0) + steps
    for name, merge in OVER_STEPS.items():
        value = record.get(name)
        if _is_number(value) and math.isfinite(value):
            before = totals.get(name)
            # As if each of its steps had this value, and those before it that of the totals.
            count = steps_so_far / steps
            totals[name] = value if before is None else merge.with_next(before, value, count)


def totals_of(records: Iterable[Record], *, streaming: bool) -> Totals:
    """Return the totals over the steps with an outer loop, or over those without."""
    totals: Totals = {}
    for record in records:
        if ("worker/exposed_seconds" in record) == streaming:
            add_totals(totals, record)
    return totals


def merge_totals(islands: Sequence[Totals]) -> Totals:
    """Return the means of the totals of islands, and the largest of maxima.

    Sums are first scaled to the steps of the first island that has any, as others may begin later.
    """
    known = [totals for totals in islands if totals]
    steps = [totals.get("worker/steps") or 1.0 for totals in known]
    merged: Totals = {}
    for name in dict.fromkeys(chain.from_iterable(known)):
        values = []
        for totals, own_steps in zip(known, steps, strict=True):
            if name in totals:
                is_sum = OVER_STEPS[name] is Merge.SUM
                values.append(totals[name] * (steps[0] / own_steps if is_sum else 1.0))
        merge = Merge.MAX if OVER_STEPS[name] is Merge.MAX else Merge.MEAN
        merged[name] = merge.of(values)
    return merged


# --- bytes ----------------------------------------------------------------------------------------

BASELINE = "bf16 gradients, every step"
"""What all ratios of bytes refer to, whichever gradients the control of a run sends."""


class Gradients(NamedTuple):
    """A format in which gradients are averaged over workers."""

    name: str
    bytes_each: int


GRADIENTS = {"float32": Gradients("fp32", 4), "bfloat16": Gradients("bf16", 2)}
"""By the value of `parallel.reduce_dtype`."""


def all_reduce_bytes(parameters: float, workers: int, *, each: int) -> float:
    """Return the bytes that one worker sends in a ring all-reduce of all gradients.

    `each`: bytes of a gradient.
    """
    return 2 * (workers - 1) / workers * each * parameters


def baseline_bytes(parameters: float, workers: int) -> float:
    """Return the bytes that one worker sends in a step of the baseline."""
    return all_reduce_bytes(parameters, workers, each=GRADIENTS["bfloat16"].bytes_each)


# --- shares ---------------------------------------------------------------------------------------


def percent(part: float, whole: float) -> float:
    """Return a share from 0 to 100, NaN if it is not known."""
    return min(max(100 * part / whole, 0.0), 100.0) if whole else math.nan


def exchange_times(totals: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of the exchanges, and for how many of them training waited.

    Both are 0 without other workers: what a single worker does instead of an exchange counts as
    none.
    """
    if totals.get(SENT) == 0:
        return 0.0, 0.0
    seconds = totals.get("world/exchange_seconds", 0.0)
    # A wait may be longer than the exchange by the time until the threads have passed it on.
    return seconds, min(seconds, totals.get("world/exposed_waiting_seconds", 0.0))


def hidden_percent(totals: Mapping[str, float]) -> float:
    """Return the share of the exchanges' time that is hidden behind training, which did not wait.

    NaN if there was no exchange.
    """
    seconds, waited = exchange_times(totals)
    return 100 - percent(waited, seconds)


def compute_percent(totals: Mapping[str, float]) -> float:
    """Return the compute share: the share of the training time that was spent on computing.

    NaN with data parallelism, whose backward pass contains its communication.
    """
    return time_shares(totals)["compute"] if _communication_is_known(totals) else math.nan


def exposed_percent(totals: Mapping[str, float]) -> float:
    """Return the share of the training time that communication took. NaN as for computing."""
    return time_shares(totals)["exposed communication"]


def time_shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the training time, without validations and saves, in percent.

    Waiting for agreement of ranks is exposed communication. With data parallelism, communication
    is part of the backward pass: its share is unknown and counts as compute.
    """
    names = ("wall", "compute", "data", "exposed", "agreement")
    wall, compute, data, exposed, agreement = (
        totals.get(f"world/{name}_seconds", math.nan) for name in names
    )
    communication = exposed + agreement
    named = compute + data
    if _communication_is_known(totals):
        named += communication
    return {
        "compute": percent(compute, wall),
        "data": percent(data, wall),
        "exposed communication": percent(communication, wall),
        "other": percent(wall - named, wall),
    }


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _communication_is_known(totals: Mapping[str, float]) -> bool:
    return "world/exposed_seconds" in totals


def _never_decreases(moments: Sequence[float]) -> bool:
    return all(before <= after for before, after in pairwise(moments))


def kept_time(starts: Sequence[float], steps: Sequence[Record]) -> dict[str, float]:
    """Return the percent of the wall time, in the run and in its last hour, that went into steps
    that were kept.

    Empty if the run was started once, and took less than an hour, or if a clock went back, as on
    another machine whose clock is behind. `starts`: when its processes began. `steps`: the records
    of one worker, without those of the steps that were repeated.
    """
    pairs = [(record.get("time"), record.get("world/step_seconds")) for record in steps]
    timed_steps = [
        (at, step_seconds)
        for at, step_seconds in pairs
        if _is_number(at) and _is_number(step_seconds)
    ]
    if not starts or not timed_steps:
        return {}
    moments = [at for at, _ in timed_steps]
    if not (_never_decreases(starts) and _never_decreases(moments)):
        return {}
    end = timed_steps[-1][0]
    spans = {"run": end - starts[0], "last hour": min(HOUR, end - starts[0])}
    if len(starts) == 1 and spans["run"] < HOUR:
        return {}
    shares = {}
    for name, seconds in spans.items():
        in_span = sum(step_seconds for at, step_seconds in timed_steps if at > end - seconds)
        shares[name] = percent(in_span, seconds)
    return shares
