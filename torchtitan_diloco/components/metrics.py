"""The numbers of a step: their names, units, meaning and scope.

A number has one name: in the records, on the boards, in a report and in the documentation
(docs/report-and-plan.md, but for those under worker/ and world/). To add one, declare it here, and
add it to the record in `Telemetry.open_record`, or to the outer loop's `metrics()`.
Those under worker/ and world/ are of the steps since the last record. Without those of `GAUGES`,
they can be summed up.

The shares that a log, a report and the boards show are computed here: `hidden_percent`,
`compute_percent`, `exposed_percent` and `kept_time`. The first three are of all ranks of a job, by
its counters under world/, which all workers record alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

Record = dict[str, Any]
"""Of a step: values by name, None if not known."""
HOUR = 3600.0
SENT = "worker/sent_bytes"
RUN = "run"
"""Scope of a number that is of the whole run."""
JOB = "job"
"""Scope: all workers that were started together. An island is alone."""
WORKER = "worker"
"""Scope: one worker."""


class Metric(NamedTuple):
    unit: str
    meaning: str
    scope: str = WORKER


METRICS = {
    "loss/bits_per_byte": Metric("bits per byte", "of the same text as loss/val", RUN),
    "loss/train": Metric("nats per token", "of the workers' own parameters", JOB),
    "loss/val": Metric("nats per token", "of the shared parameters, on held-out text", RUN),
    "speed/compute_percent": Metric("percent", "of the training time spent on computing", JOB),
    "speed/mfu_percent": Metric("percent", "of the GPUs' bf16 peak"),
    "speed/seconds_per_step": Metric("seconds", "without validations and saves"),
    "speed/tokens_per_second": Metric("tokens/s", "without validations and saves", JOB),
    "sync/exposed_percent": Metric("percent", "of the training time lost to communication", JOB),
    "sync/hidden_percent": Metric("percent", "of the exchanges' time hidden behind training", JOB),
    "sync/mbit_per_second": Metric("Mbit/s", "sent to other workers, mean over the wall time"),
    "train/gradient_norm": Metric("norm", "of the last step, before clipping"),
    "train/lr": Metric("rate", "of the inner optimizer", RUN),
    "train/memory_gib": Metric("GiB", "peak since the start of the process"),
    "train/phase": Metric("number", "of the mixture that is read next, 0 for data.mixture", RUN),
    "train/tokens": Metric("tokens", "since the start of the run", RUN),
    # TensorBoard sorts names, so the rest comes last.
    "worker/agreement_seconds": Metric("seconds", "waiting for answers of other ranks"),
    "worker/coding_seconds": Metric("seconds", "of the exchange thread, encoding and decoding"),
    "worker/compute_seconds": Metric("seconds", "of the steps, without waiting"),
    "worker/compute_spread": Metric("seconds", "standard deviation of the compute of a step"),
    "worker/data_seconds": Metric("seconds", "waiting for data"),
    "worker/elapsed_seconds": Metric("seconds", "since the start of the run, all its processes"),
    "worker/exchange_seconds": Metric("seconds", "of exchanges in the background"),
    "worker/exposed_seconds": Metric("seconds", "taking, waiting for and merging fragments"),
    "worker/exposed_waiting_seconds": Metric("seconds", "waiting for fragments"),
    "worker/fragments_applied": Metric("fragments", "applied"),
    "worker/fragments_in_flight": Metric("fragments", "in flight at the end of the interval"),
    "worker/healed_fragments": Metric("fragments", "reset to the shared parameters"),
    "worker/participants": Metric("workers", "in the applied fragments, added up"),
    "worker/queued_seconds": Metric("seconds", "of the steps, ready to run but without a core"),
    "worker/received_bytes": Metric("bytes", "received by the first rank"),
    "worker/sent_bytes": Metric("bytes", "sent by all ranks, counted, mean over workers"),
    "worker/skipped_steps": Metric("steps", "skipped, as gradients were not finite"),
    "worker/step_seconds": Metric("seconds", "of the steps"),
    "worker/steps": Metric("steps", "in the interval"),
    "worker/transfer_waiting_seconds": Metric("seconds", "of the exchange thread, for messages"),
    "worker/wall_seconds": Metric("seconds", "without validations and saves"),
}
GAUGES = ("worker/compute_spread", "worker/elapsed_seconds", "worker/fragments_in_flight")
"""Numbers under worker/ of which a sum says nothing."""
WORLD_TIMES = (
    "agreement_seconds",
    "compute_seconds",
    "data_seconds",
    "exchange_seconds",
    "exposed_seconds",
    "exposed_waiting_seconds",
    "step_seconds",
    "wall_seconds",
)
"""Counters under worker/ that are also averaged over all ranks of the job, under world/."""
for _name in WORLD_TIMES:
    _unit, _meaning, _ = METRICS[f"worker/{_name}"]
    METRICS[f"world/{_name}"] = Metric(_unit, f"{_meaning}, mean over ranks", JOB)


def described(name: str, workers: int) -> str:
    """Return unit, meaning and scope in a job of so many workers, "" if it is not declared."""
    if name not in METRICS:
        return ""
    unit, meaning, scope = METRICS[name]
    is_of_all = scope == RUN or (scope == JOB and workers > 1)
    whose = "all workers" if is_of_all else "this worker"
    return f"{unit}, {meaning}; {whose}"


# --- totals ---------------------------------------------------------------------------------------

Totals = dict[str, float]
"""Sums of the counters of records, which are named worker/... and world/..."""


def add_totals(totals: Totals, record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        is_counter = name.startswith(("worker/", "world/")) and name not in GAUGES
        if is_counter and isinstance(value, int | float):
            totals[name] = totals.get(name, 0.0) + value


def totals_of(records: Iterable[Record], *, streaming: bool) -> Totals:
    """Return the totals over the steps with an outer loop, or over those without."""
    totals: Totals = {}
    for record in records:
        if ("worker/exposed_seconds" in record) == streaming:
            add_totals(totals, record)
    return totals


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


def kept_time(starts: Sequence[float], steps: Sequence[Record]) -> dict[str, float]:
    """Return the percent of the wall time, in the run and in its last hour, that went into steps
    that were kept.

    Empty if the run was started once, and took less than an hour. `starts`: when its processes
    began. `steps`: the records of one worker, without those of the steps that were repeated.
    """
    pairs = [(record.get("time"), record.get("world/step_seconds")) for record in steps]
    kept = [(at, took) for at, took in pairs if _is_number(at) and _is_number(took)]
    if not starts or not kept:
        return {}
    end = kept[-1][0]
    spans = {"run": end - starts[0], "last hour": min(HOUR, end - starts[0])}
    if len(starts) == 1 and spans["run"] < HOUR:
        return {}
    shares = {}
    for name, seconds in spans.items():
        in_span = sum(took for at, took in kept if at > end - seconds)
        shares[name] = percent(in_span, seconds)
    return shares
