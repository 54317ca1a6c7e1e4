"""Link, step times and coding speeds of a run, from the records of its workers."""

import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.formats import FORMATS
from torchtitan_diloco.planner.prediction import Conditions, coded_bytes
from torchtitan_diloco.report.run_records import Run, open_runs


def observed_conditions(folder: Path, workers: int) -> Conditions:
    """Return what the workers of a run, which must be so many, measured."""
    (run,) = open_runs([folder])
    rounds = [record for worker in run.workers for record in worker.rounds]
    heard_after = [seconds for record in rounds for seconds in record.heard_after_seconds.values()]
    totals = [worker.totals for worker in run.workers]
    codec = run.settings.get("diloco.quantization.codec", "")
    needed = ("worker/compute_seconds", "worker/steps")
    has_computed = all(of_worker.get(name) for of_worker in totals for name in needed)
    if not heard_after or not has_computed:
        measured = "times of steps" if heard_after else "links"
        raise UserError(
            f"--run {folder} has measured no {measured}: give a finished run of one job; or, for "
            f"one of islands, --config {shlex.quote(str(folder / 'config.toml'))}, --bandwidth and "
            "--step-time"
        )
    if len(run.workers) != workers:
        raise UserError(
            f"--run {folder} has the records of {len(run.workers)} workers: give a run of "
            f"{workers}, with the folders of all"
        )
    if workers != 2 and codec not in FORMATS:  # two code as much in all formats
        raise UserError(
            f"--run {folder} has no diloco.quantization.codec in a config.toml: copy config.toml "
            "of the run, too"
        )
    means = [
        of_worker["worker/compute_seconds"] / of_worker["worker/steps"] for of_worker in totals
    ]
    spreads = [worker.compute_spread for worker in run.workers]
    shares = [spread / mean for spread, mean in zip(spreads, means, strict=True)]
    coded = []
    stepped = []
    for record in rounds:
        coding_seconds = record.number("worker/coding_seconds")
        coded.append((coded_bytes(record.parameters, workers, codec), coding_seconds))
        stepped.append((4 * record.parameters, record.seconds("received", "ready")))
    return Conditions(
        bits_per_second=_slowest_link(run),
        step_seconds=tuple(means),
        latency_seconds=min(heard_after),
        jitter=min(1.0, statistics.fmean(shares)),
        coding_bytes_per_second=_median_rate(coded),
        outer_bytes_per_second=_median_rate(stepped),
    )


def _median_rate(measured: Iterable[tuple[float, float]]) -> float:
    """Return the median of bytes per second, or infinity if nothing took time."""
    rates = [count / seconds for count, seconds in measured if seconds > 0]
    return statistics.median(rates or [math.inf])


def _slowest_link(run: Run) -> float:
    """Return the rate of the slowest worker: the sum of its simultaneous transfers, one way.
    Infinity if all of them were too short to be measured."""
    largest = max(record.parameters for worker in run.workers for record in worker.rounds)
    measured = defaultdict[tuple[int, int], list[float]](list)
    for receiver, worker in enumerate(run.workers):
        for record in worker.rounds:
            if 2 * record.parameters > largest:  # others are too short
                for sender, rate in record.received_bits_per_second_from.items():
                    measured[sender, receiver].append(rate)
    sums = defaultdict[tuple[str, int], float](float)
    for (sender, receiver), rates in measured.items():
        sums["from", sender] += statistics.median(rates)
        sums["to", receiver] += statistics.median(rates)
    return min((rate or math.inf for rate in sums.values()), default=math.inf)
