"""The few numbers that describe a run. Numbers that are not known are NaN."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from torchtitan_diloco.planner.prediction import all_reduce_bytes
from torchtitan_diloco.report.run_records import SENT_BYTES, Run, number, round_workers

SHARES = {
    "compute": "time/share_compute_percent_mean_over_ranks",
    "data": "time/share_data_percent_mean_over_ranks",
    "exposed communication": "time/share_exposed_communication_percent_mean_over_ranks",
    "other": "time/share_other_percent_mean_over_ranks",
}


class WorkerFacts(NamedTuple):
    worker: int
    rounds_last: int
    """Rounds in which this worker was the last to arrive."""
    rounds: int
    """Rounds in which the last worker is known."""
    median_late: float
    """Seconds after the previous worker, over the rounds in which this worker was last."""
    median_ahead: float
    """Seconds before the last worker, over the other rounds."""
    mean_waited: float
    """Seconds per round that the training thread waited. The median would mostly be zero."""


class LinkFacts(NamedTuple):
    median_bits_per_second: float
    sender: int
    receiver: int
    rounds: int


def sent_bytes_per_worker(run: Run) -> float:
    return run.total(SENT_BYTES) / (run.workers or np.nan)


def data_parallel_bytes(run: Run, step: float | None = None) -> float:
    """Return the bytes that a worker would have sent up to `step` (default: the last step) with a
    ring all-reduce of all gradients at every step."""
    step = run.last_step if step is None else step
    end, start = number(run.summary.get("step")), number(run.summary.get("counted_after_step", 0))
    if end > start:
        total = number(run.summary.get("data_parallel_bytes_per_worker"))
        return total * max(0.0, step - start) / (end - start)
    return all_reduce_bytes(run.parameters, run.workers) * step if run.workers > 1 else np.nan


def hidden_percent(run: Run) -> float:
    """Return the share of the exchanges' time that training did not wait for."""
    exchange = run.total("diloco/exchange_seconds_mean_over_ranks")
    waited = run.total("diloco/exposed_waiting_seconds_mean_over_ranks")
    return 100 * float(np.maximum(0, 1 - waited / exchange)) if exchange else np.nan


def mean_share(run: Run, key: str) -> float:
    """Return the mean of a logged share, weighted by the time of each interval."""
    weight = "time/wall_seconds_mean_over_ranks"
    pairs = np.array([[number(record.get(name)) for name in (key, weight)] for record in run.steps])
    known = pairs[np.isfinite(pairs).all(axis=1)] if len(pairs) else pairs.reshape(0, 2)
    shares, seconds = known.T
    return float(np.average(shares, weights=seconds)) if seconds.sum() else np.nan


def worker_facts(run: Run) -> list[WorkerFacts]:
    """Return the facts of every worker, the one that was last most often first."""
    last = np.array([number(record.get("last_worker")) for record in run.rounds])
    late = np.array([number(record.get("late_by_seconds")) for record in run.rounds])
    ahead, waited = (
        run.round_values(key).filled(np.nan) for key in ("ahead_of_last_seconds", "waited_seconds")
    )
    facts = [
        WorkerFacts(
            worker,
            int((last == worker).sum()),
            int(np.isfinite(last).sum()),
            known_median(late[last == worker]),
            known_median(ahead[last != worker, worker]),
            float(np.ma.masked_invalid(waited[:, worker]).mean()),
        )
        for worker in range(waited.shape[1])
    ]
    return sorted(facts, key=lambda fact: -fact.rounds_last)


def link_facts(run: Run) -> list[LinkFacts]:
    """Return the facts of every pair of workers with a measured rate, the slowest first."""
    rates = defaultdict[tuple[int, int], list[float]](list)
    for record in run.rounds:
        for receiver, table in enumerate(round_workers(record)):
            for sender, rate in enumerate(table.get("received_bits_per_second_from") or []):
                if np.isfinite(number(rate)):
                    rates[sender, receiver].append(rate)
    return sorted(
        LinkFacts(known_median(found), *pair, len(found)) for pair, found in rates.items()
    )


def known_median(values: ArrayLike) -> float:
    """Return the median of the finite values, NaN if there are none."""
    values = np.asarray(values, dtype=float)
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else np.nan
