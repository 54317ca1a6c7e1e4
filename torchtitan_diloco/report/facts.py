"""What a run comes to, in a few numbers."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from torchtitan_diloco.planner.prediction import all_reduce_bytes
from torchtitan_diloco.report.run_records import Record, Run, number

SHARES = {
    "compute": "time/share_compute_percent_mean_over_ranks",
    "data": "time/share_data_percent_mean_over_ranks",
    "exposed communication": "time/share_exposed_communication_percent_mean_over_ranks",
    "other": "time/share_other_percent_mean_over_ranks",
}


@dataclass(frozen=True)
class WorkerFacts:
    worker: int
    last_in: int
    """Rounds in which it was the last to arrive."""
    rounds: int
    """In which it is known who was."""
    median_late: float | None
    """Seconds by which it came after the one before it, where it was the last."""
    median_ahead: float | None
    """Seconds by which it came before the last, where it was not."""
    mean_waited: float | None
    """Seconds for which its training thread waited for an exchange. Mostly none, so a median would say nothing."""


@dataclass(frozen=True)
class LinkFacts:
    sender: int
    receiver: int
    median_bits_per_second: float
    rounds: int


def sent_bytes_per_worker(run: Run) -> float | None:
    total, workers = run.total("diloco/sent_bytes_sum_over_ranks"), run.workers
    return None if total is None or workers is None else total / workers


def data_parallel_bytes(run: Run, step: float | None = None) -> float | None:
    """What one worker would have sent up to a step, or to the last, with a ring all-reduce of all gradients at every step."""
    step = run.last_step if step is None else step
    told, told_at = (
        number(run.summary.get(key)) for key in ("data_parallel_bytes_per_worker", "step")
    )
    since = number(run.summary.get("counted_after_step")) or 0.0
    if told is not None and told_at is not None and told_at > since:
        return told * max(0.0, step - since) / (told_at - since)
    workers, parameters = run.workers, run.parameters
    if workers is None or parameters is None or workers < 2:
        return None
    return all_reduce_bytes(parameters, workers) * step


def hidden_percent(run: Run) -> float | None:
    """Of the time that exchanges took: what training did not wait for."""
    exchange = run.total("diloco/exchange_seconds_mean_over_ranks")
    waited = run.total("diloco/exposed_waiting_seconds_mean_over_ranks")
    return 100 * max(0.0, 1 - waited / exchange) if exchange and waited is not None else None


def mean_share(run: Run, key: str) -> float | None:
    """Mean over the run's time of a share that was logged for stretches of it."""
    weighted, weights, before = 0.0, 0.0, 0
    for record in run.steps:
        share, pace, step = (
            number(record.get(key)),
            number(record.get("speed/seconds_per_step")),
            int(record["step"]),
        )
        if share is not None and pace is not None and math.isfinite(share * pace):
            weight = (step - before) * pace
            weighted, weights = weighted + weight * share, weights + weight
        if pace is not None:
            before = step
    return weighted / weights if weights else None


def exposed_percent(run: Run) -> float | None:
    """Of the run's time: what the training thread spent on exchanges or waited for them."""
    told = mean_share(run, SHARES["exposed communication"])
    if told is not None:
        return told
    exposed, elapsed = (
        run.total("diloco/exposed_seconds_mean_over_ranks"),
        run.last("time/elapsed_seconds"),
    )
    return 100 * exposed / elapsed[1] if exposed is not None and elapsed and elapsed[1] else None


def worker_facts(run: Run) -> list[WorkerFacts]:
    """Of every worker, the one that was last most often first."""
    last: Counter[int] = Counter()
    late, ahead, waited = (defaultdict[int, list[float]](list) for _ in range(3))
    for record in run.rounds:
        last_worker = number(record.get("last_worker"))
        if last_worker is not None:
            last[int(last_worker)] += 1
            late[int(last_worker)] += _known(record.get("late_by_seconds"))
        for worker, told in enumerate(_workers(record)):
            if worker != last_worker:
                ahead[worker] += _known(told.get("ahead_of_last_seconds"))
            waited[worker] += _known(told.get("waited_seconds"))
    rounds = last.total()
    workers = max((len(_workers(record)) for record in run.rounds), default=0)
    facts = [
        WorkerFacts(
            one,
            last[one],
            rounds,
            _median(late[one]),
            _median(ahead[one]),
            fmean(waited[one]) if waited[one] else None,
        )
        for one in range(workers)
    ]
    return sorted(facts, key=lambda fact: (-fact.last_in, fact.worker))


def link_facts(run: Run) -> list[LinkFacts]:
    """Of every pair between which a rate was measured, the slowest first."""
    rates = defaultdict[tuple[int, int], list[float]](list)
    for record in run.rounds:
        for receiver, told in enumerate(_workers(record)):
            for sender, rate in enumerate(told.get("received_bits_per_second_from") or []):
                rates[sender, receiver] += _known(rate)
    facts = [
        LinkFacts(sender, receiver, median(found), len(found))
        for (sender, receiver), found in rates.items()
        if found
    ]
    return sorted(facts, key=lambda fact: (fact.median_bits_per_second, fact.sender, fact.receiver))


def _workers(record: Record) -> list[Record]:
    return [told for told in record.get("workers") or [] if isinstance(told, dict)]


def _known(*values: object) -> list[float]:
    return [value for value in map(number, values) if value is not None and math.isfinite(value)]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
