"""Link, step times and coding speeds of a run, from the records of its workers."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from torchtitan_diloco.planner.prediction import Conditions, coded_bytes
from torchtitan_diloco.report.run_records import Run, open_runs
from torchtitan_diloco.user import UserError

UNLIMITED = 1e12
"""Bits per second of a link whose transfers were too short to be measured."""


def observed_conditions(folder: Path, workers: int) -> Conditions:
    """Return what the workers of a run, which must be so many, measured."""
    (run,) = open_runs([folder])
    rounds = [one for worker in run.workers for one in worker.rounds]
    heard_after = [seconds for one in rounds for seconds in one.heard_after_seconds.values()]
    totals = [worker.totals for worker in run.workers]
    codec = run.settings.get("diloco.quantization.codec", "")
    if not heard_after or not all(own.get("worker/compute_seconds") for own in totals):
        raise UserError(f"--run {folder} has measured no links: give a finished run of one job")
    if len(run.workers) != workers:
        raise UserError(
            f"--run {folder} has the records of {len(run.workers)} workers: give a run of "
            f"{workers}, with the folders of all"
        )
    means = [own["worker/compute_seconds"] / own["worker/steps"] for own in totals]
    spreads = [worker.compute_spread for worker in run.workers]
    shares = [spread / mean for spread, mean in zip(spreads, means, strict=True)]
    coded = (
        (coded_bytes(one.parameters, workers, codec), one.encoding_seconds + one.decoding_seconds)
        for one in rounds
    )
    stepped = ((4 * one.parameters, one.seconds("received", "ready")) for one in rounds)
    return Conditions(
        _slowest_link(run),
        tuple(means),
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
    """Return the rate of the slowest worker: the sum of its simultaneous transfers, one way."""
    largest = max(one.parameters for worker in run.workers for one in worker.rounds)
    measured = defaultdict[tuple[int, int], list[float]](list)
    for receiver, worker in enumerate(run.workers):
        for one in worker.rounds:
            if 2 * one.parameters > largest:  # others are too short
                for sender, rate in one.received_bits_per_second_from.items():
                    measured[sender, receiver].append(rate)
    sums = defaultdict[tuple[str, int], float](float)
    for (sender, receiver), rates in measured.items():
        sums["from", sender] += statistics.median(rates)
        sums["to", receiver] += statistics.median(rates)
    return min((rate or UNLIMITED for rate in sums.values()), default=UNLIMITED)
