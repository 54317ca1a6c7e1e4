"""Round records: one record of each round of a fragment, with the numbers of all workers.

Every machine has a clock of its own. The last header of a round arrives at all workers at the same
moment, up to its latency, so the moments of a worker are shifted until this one is worker 0's. How
late a worker was is a difference of durations, which needs no common clock: the last worker to
arrive waits the shortest time for the headers of the others. A worker whose process stopped during
the exchange found them late, and held up the round all the same: it counts as the last.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchtitan_diloco.components.records import NAN, Record, RoundRecord, WorkerRound
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.transport import FLAG_NAMES
from torchtitan_diloco.distributed.world import World

LEAST_LINK_BYTES = 16_384
"""The time of a smaller message shows when a thread woke up, not how fast the link is."""


class RoundTable:
    """Turns the rounds of all ranks into records.

    `row` returns what a rank knows of its worker's numbers, so that the sum over the ranks of the
    worker is a row of the table that `records` reads.
    """

    def __init__(self, world: World, fragment_names: Sequence[str], clock_start: float) -> None:
        """`clock_start`: the `time.perf_counter()` of moment zero."""
        self._world, self._names, self._clock_start = world, fragment_names, clock_start
        self._shifts = [0.0] * world.workers
        self._keys = list(self._numbers(Round(0, 0, 0, 0)))

    def row(self, rounds: Sequence[Round]) -> list[float]:
        return [value for found in rounds for value in self._numbers(found).values()]

    def _numbers(self, found: Round) -> dict[str, float]:
        """Return what this rank adds to the numbers of its worker: moments by the first rank."""
        traffic, start = found.traffic, self._clock_start
        summed = {
            "parameters": found.values,
            "sent_bytes": traffic.bytes_sent,
            "received_bytes": traffic.bytes_received,
            "delta_square": found.delta_square,
            "mean_square": found.mean_square,
            "dot": traffic.dot,
            "drift_square": float(found.drift) ** 2,
            "update_square": found.update_square,
        }
        own = {
            "weight": found.weight,
            "flags": found.flags,
            "stopped_seconds": found.stopped,
            "encoding_seconds": traffic.encoding_seconds,
            "decoding_seconds": traffic.decoding_seconds,
            "due_at_seconds": found.due - start,
            "taken_at_seconds": found.taken - start,
            "begun_at_seconds": found.begun - start,
            "encoded_at_seconds": traffic.encoded - start,
            "heard_at_seconds": max(traffic.heard.values(), default=NAN) - start,
            "received_at_seconds": traffic.received - start,
            "ready_at_seconds": found.ready - start,
            "asked_at_seconds": found.asked - start,
            "arrived_at_seconds": found.fetched - start,
            "applied_at_seconds": found.applied - start,
        }
        for other in range(self._world.workers):
            size, seconds = traffic.link_bytes.get(other, 0), traffic.link_seconds(other)
            is_known = size >= LEAST_LINK_BYTES and seconds > 0
            own[f"rate_from/{other}"] = 8 * size / seconds if is_known else NAN
            own[f"heard_after/{other}"] = traffic.heard_after(other)
        return summed | (dict.fromkeys(own, 0.0) if self._world.rank_in_worker else own)

    def records(self, rounds: Sequence[Round], table: NDArray[np.float64]) -> Iterator[RoundRecord]:
        """Yield a record for each round. `table` has a row for each worker."""
        parts = np.split(table, len(rounds), axis=1) if rounds else []
        for found, part in zip(rounds, parts, strict=True):
            workers = [dict(zip(self._keys, row, strict=True)) for row in part.tolist()]
            self._align(workers)
            yield _round_record(found, self._names[found.fragment], workers)

    def _align(self, workers: Sequence[dict[str, float]]) -> None:
        """Shift the moments of all workers to worker 0's clock, by the shift of the round before
        where the headers' arrival is not known."""
        for worker, numbers in enumerate(workers):
            shift = workers[0]["heard_at_seconds"] - numbers["heard_at_seconds"]
            stopped = numbers["stopped_seconds"] > 0 or workers[0]["stopped_seconds"] > 0
            if math.isfinite(shift) and not stopped:
                self._shifts[worker] = shift
            for key in numbers:
                numbers[key] += self._shifts[worker] if key.endswith("_at_seconds") else 0.0


def _round_record(found: Round, name: str, workers: Sequence[Mapping[str, float]]) -> RoundRecord:
    tables = [_worker_round(numbers) for numbers in workers]
    waited = [max(known(table.heard_after_seconds), default=NAN) for table in tables]
    for table, ahead in zip(tables, ahead_of_last(waited), strict=True):
        table.ahead_of_last_seconds = ahead
    last_worker, late_by = _last_to_arrive(tables)
    return RoundRecord(
        step=found.applied_step,
        fragment=found.fragment,
        fragment_name=name,
        outer_round=found.outer_round,
        sent_step=found.sent_step,
        applied_step=found.applied_step,
        parameters=round(workers[0]["parameters"]),
        participants=found.participants,
        update_norm=math.sqrt(workers[0]["update_square"]),
        last_worker=last_worker,
        late_by_seconds=late_by,
        workers=tables,
    )


def _worker_round(numbers: Mapping[str, float]) -> WorkerRound:
    """Return the sums over the ranks of a worker, and what follows from them."""

    def between(start: str, end: str) -> float:
        seconds = numbers[f"{end}_at_seconds"] - numbers[f"{start}_at_seconds"]
        return max(seconds, 0.0)  # a payload may arrive before the last header; NaN stays NaN

    def by_sender(name: str) -> list[float]:
        return [value for key, value in numbers.items() if key.startswith(f"{name}/")]

    waited = between("asked", "arrived")
    exposed = known([between("due", "taken"), waited, between("arrived", "applied")])
    norms = math.sqrt(numbers["delta_square"] * numbers["mean_square"])
    flags = round(numbers["flags"])
    return WorkerRound(
        **{key: value for key, value in numbers.items() if key in WorkerRound.__struct_fields__},
        left_out=[name for flag, name in FLAG_NAMES.items() if flags & flag],
        transfer_seconds=between("heard", "received"),
        exchange_seconds=between("begun", "ready"),
        waited_seconds=waited,
        exposed_seconds=math.fsum(exposed) if exposed else NAN,
        sent_bits_per_parameter=8 * numbers["sent_bytes"] / (numbers["parameters"] or NAN),
        outer_gradient_norm=math.sqrt(numbers["delta_square"]),
        cosine_to_mean=numbers["dot"] / norms if norms else NAN,
        drift_norm=math.sqrt(numbers["drift_square"]),
        heard_after_seconds=by_sender("heard_after"),
        received_bits_per_second_from=by_sender("rate_from"),
    )


def ahead_of_last(waited: Sequence[float]) -> list[float]:
    """Return how much earlier than the last worker each one arrived.

    `waited` is how long each worker waited for the headers of the others.
    """
    shortest = min(known(waited), default=NAN) if len(known(waited)) > 1 else NAN
    return [seconds - shortest for seconds in waited]


def _last_to_arrive(tables: Sequence[WorkerRound]) -> tuple[int | None, float]:
    """Return the worker that held up the round, if it is known, and for how long."""
    ahead = [table.ahead_of_last_seconds for table in tables]
    last = ahead.index(0.0) if 0.0 in ahead else None
    others = known(seconds for worker, seconds in enumerate(ahead) if worker != last)
    late_by = min(others, default=NAN)
    stops = [max(0.0, table.stopped_seconds) for table in tables]  # 0 for NaN
    if len(tables) > 1 and max(stops) > max(0.0, late_by):
        return stops.index(max(stops)), max(stops)
    return last, late_by


def known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def percent_without(part: float, whole: float) -> float:
    return max(100 - 100 * part / whole, 0.0) if whole else NAN  # NaN stays NaN


def round_scalars(record: RoundRecord) -> Record:
    """Return the numbers of a round by TensorBoard tag: means over workers, without moments."""
    scalars: dict[str, float] = {}
    for key in WorkerRound.__struct_fields__:
        values = [getattr(worker, key) for worker in record.workers]
        if not isinstance(values[0], list) and not key.endswith("_at_seconds"):
            scalars[f"{key}_mean_over_workers"] = _mean(values)
    waited, exchange = (
        scalars[f"{key}_seconds_mean_over_workers"] for key in ("waited", "exchange")
    )
    scalars["hidden_percent_mean_over_workers"] = percent_without(waited, exchange)
    for key in ("update_norm", "late_by_seconds", "participants"):
        scalars[key] = getattr(record, key)
    tags = {f"round_{key}/fragment_{record.fragment}": value for key, value in scalars.items()}
    return {tag: value if math.isfinite(value) else None for tag, value in tags.items()}


def _mean(values: Iterable[float]) -> float:
    return math.fsum(known(values)) / len(known(values)) if known(values) else NAN


def peak_mbit_per_second(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the rate of the busiest worker in a transfer, in its busier direction."""
    rates = [
        8e-6 * max(worker.sent_bytes, worker.received_bytes) / worker.transfer_seconds
        for record in rounds
        for worker in record.workers
        if worker.transfer_seconds > 0 and worker.sent_bytes >= 0
    ]
    return max(rates, default=0.0 if rounds else None)
