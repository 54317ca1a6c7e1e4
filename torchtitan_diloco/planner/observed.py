"""Link, step times and coding speeds of a run, from the records of its workers."""

import math
import statistics
from collections.abc import Collection, Iterable

from torchtitan_diloco.components.records import RoundRecord
from torchtitan_diloco.planner.prediction import Conditions, coded_bytes
from torchtitan_diloco.report.run_records import Run

UNLIMITED = 1e12
"""Bits per second of a link whose transfers were too short to be measured."""


def observed_conditions(run: Run) -> Conditions | None:
    """Return what the workers measured, or None if it is not enough."""
    rounds = [record for worker in run.workers for record in worker.rounds]
    codec, workers = run.settings.get("diloco.quantization.codec", ""), len(run.workers)
    heard_after = [one for record in rounds for one in record.heard_after_seconds.values()]
    totals = [worker.totals for worker in run.workers]
    if not heard_after or not all(one.get("worker/compute_seconds") for one in totals):
        return None
    means = [one["worker/compute_seconds"] / one["worker/steps"] for one in totals]
    spreads = [worker.compute_spread for worker in run.workers]
    shares = [spread / mean for spread, mean in zip(spreads, means, strict=True)]
    return Conditions(
        _slowest_link([worker.rounds for worker in run.workers]),
        tuple(means),
        latency_seconds=min(heard_after),
        jitter=min(1.0, statistics.fmean(shares)),
        coding_bytes_per_second=_median_rate(
            (
                coded_bytes(one.parameters, workers, codec),
                one.encoding_seconds + one.decoding_seconds,
            )
            for one in rounds
        ),
        outer_bytes_per_second=_median_rate(
            (4 * one.parameters, one.seconds("received", "ready")) for one in rounds
        ),
    )


def _median_rate(measured: Iterable[tuple[float, float]]) -> float:
    """Return the median of bytes per second, or infinity if nothing took time."""
    rates = [count / seconds for count, seconds in measured if seconds > 0]
    return statistics.median(rates or [math.inf])


def _slowest_link(received: Collection[Collection[RoundRecord]]) -> float:
    """Return the rate of the slowest worker: the sum of its simultaneous transfers. `received`:
    by worker."""
    largest = max(record.parameters for own in received for record in own)

    def median_rate(own: Collection[RoundRecord], source: int) -> float:
        large = [one for one in own if 2 * one.parameters > largest]  # others are too short
        rates = [one.received_bits_per_second_from.get(source) for one in large]
        return statistics.median([rate for rate in rates if rate is not None] or [0.0])

    table = [[median_rate(own, source) for source in range(len(received))] for own in received]
    return min(sum(rates) or UNLIMITED for rates in (*table, *zip(*table, strict=True)))
