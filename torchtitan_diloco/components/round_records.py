"""Round records: one record of each round of a fragment, with the numbers of all workers.

Every machine has a clock of its own. The last header of a round arrives at all workers at the same
moment, up to its latency, so the moments of a worker are shifted until this one is worker 0's. How
late a worker was is a difference of durations, which needs no common clock: the last worker to
arrive waits the shortest time for the headers of the others. A worker whose process stopped during
the exchange found them late, and held up the round all the same: it counts as the last.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.transport import FLAG_NAMES
from torchtitan_diloco.distributed.world import World

RoundRecord = dict[str, Any]
LEAST_LINK_BYTES = 16_384
"""The time of a smaller message shows when a thread woke up, not how fast the link is."""


def _of_every_rank(found: Round) -> dict[str, float]:
    """Return the numbers of a round that are summed over the ranks of a worker."""
    return {
        "parameters": found.values,
        "sent_bytes": found.traffic.bytes_sent,
        "received_bytes": found.traffic.bytes_received,
        "delta_square": found.delta_square,
        "mean_square": found.mean_square,
        "dot": found.traffic.dot,
        "drift_square": float(found.drift) ** 2,
        "update_square": found.update_square,
    }


def _of_first_rank(found: Round, start: float) -> dict[str, float]:
    """Return the numbers of a round that the first rank of a worker measures for it, as they are
    in the record. A new one is added here. Moments are seconds since `start`."""
    traffic = found.traffic
    return {
        "weight": found.weight,
        "stopped_seconds": found.stopped,
        "encoding_seconds": traffic.encoding_seconds,
        "decoding_seconds": traffic.decoding_seconds,
        "due_at_seconds": found.due - start,
        "taken_at_seconds": found.taken - start,
        "begun_at_seconds": found.begun - start,
        "encoded_at_seconds": traffic.encoded - start,
        "heard_at_seconds": max(traffic.heard.values(), default=math.nan) - start,
        "received_at_seconds": traffic.received - start,
        "ready_at_seconds": found.ready - start,
        "asked_at_seconds": found.asked - start,
        "arrived_at_seconds": found.fetched - start,
        "applied_at_seconds": found.applied - start,
    }


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
        own = _of_first_rank(found, self._clock_start)
        own["flags"] = found.flags
        for other in range(self._world.workers):
            own[f"heard_after/{other}"] = found.traffic.heard_after(other)
            own[f"rate_from/{other}"] = _link_rate(found, other)
        if self._world.rank_in_worker != 0:
            own = dict.fromkeys(own, 0.0)
        return _of_every_rank(found) | own

    def records(self, rounds: Sequence[Round], table: NDArray[np.float64]) -> Iterator[RoundRecord]:
        """Yield a record for each round. `table` has a row for each worker."""
        parts = np.split(table, len(rounds), axis=1) if rounds else []
        for found, part in zip(rounds, parts, strict=True):
            workers = [dict(zip(self._keys, row, strict=True)) for row in part.tolist()]
            self._align(workers)
            yield _without_nan(_round_record(found, self._names[found.fragment], workers))

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


def _link_rate(found: Round, sender: int) -> float:
    """Return the bit/s of another worker's payload, NaN where it could not be measured."""
    size, seconds = found.traffic.link_bytes.get(sender, 0), found.traffic.link_seconds(sender)
    return 8 * size / seconds if size >= LEAST_LINK_BYTES and seconds > 0 else math.nan


def ahead_of_last(waited: Sequence[float]) -> list[float]:
    """Return how much earlier than the last worker each one arrived.

    `waited` is how long each worker waited for the headers of the others.
    """
    known = _known(waited)
    return [seconds - min(known) if len(known) > 1 else math.nan for seconds in waited]


def _round_record(found: Round, name: str, workers: Sequence[Mapping[str, float]]) -> RoundRecord:
    heard_after = [_links(numbers, "heard_after") for numbers in workers]
    ahead = ahead_of_last([max(_known(own), default=math.nan) for own in heard_after])
    last_worker = ahead.index(0.0) if 0.0 in ahead else None
    late = _known(seconds for worker, seconds in enumerate(ahead) if worker != last_worker)
    late_by = min(late, default=None)
    stops = [max(0.0, numbers["stopped_seconds"]) for numbers in workers]  # 0 for NaN
    if max(stops) > (late_by or 0.0) and len(workers) > 1:
        last_worker, late_by = stops.index(max(stops)), max(stops)
    return {
        "kind": "round",
        "step": found.applied_step,
        "fragment": found.fragment,
        "fragment_name": name,
        "outer_round": found.outer_round,
        "sent_step": found.sent_step,
        "applied_step": found.applied_step,
        "parameters": round(workers[0]["parameters"]),
        "participants": found.participants,
        "update_norm": math.sqrt(workers[0]["update_square"]),
        "last_worker": last_worker,
        "late_by_seconds": late_by,
        "workers": [
            {key: numbers[key] for key in _of_first_rank(found, 0.0)}
            | _derived(numbers)
            | {"ahead_of_last_seconds": seconds}
            for numbers, seconds in zip(workers, ahead, strict=True)
        ],
    }


def _derived(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return what follows from the numbers of a worker."""

    def between(start: str, end: str) -> float:
        seconds = numbers[f"{end}_at_seconds"] - numbers[f"{start}_at_seconds"]
        return max(seconds, 0.0)  # a payload may arrive before the last header; NaN stays NaN

    waited = between("asked", "arrived")
    exposed = _known([between("due", "taken"), waited, between("arrived", "applied")])
    flags = round(numbers["flags"])
    norms = math.sqrt(numbers["delta_square"] * numbers["mean_square"])
    return {
        "transfer_seconds": between("heard", "received"),
        "exchange_seconds": between("begun", "ready"),
        "waited_seconds": waited,
        "exposed_seconds": math.fsum(exposed) if exposed else None,
        "sent_bytes": numbers["sent_bytes"],
        "received_bytes": numbers["received_bytes"],
        "sent_bits_per_parameter": 8 * numbers["sent_bytes"] / (numbers["parameters"] or math.nan),
        "outer_gradient_norm": math.sqrt(numbers["delta_square"]),
        "left_out": [name for flag, name in FLAG_NAMES.items() if flags & flag],
        "cosine_to_mean": numbers["dot"] / norms if norms else None,
        "drift_norm": math.sqrt(numbers["drift_square"]),
        "heard_after_seconds": _links(numbers, "heard_after"),
        "received_bits_per_second_from": _links(numbers, "rate_from"),
    }


def _links(numbers: Mapping[str, float], name: str) -> list[float]:
    """Return a number for every other worker, in order."""
    return [value for key, value in numbers.items() if key.startswith(f"{name}/")]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _without_nan(value: Any) -> Any:
    """Replace floats that are not finite, which means not known, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def round_scalars(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers of a round by TensorBoard tag: means over workers, without moments."""
    scalars: dict[str, float | None] = {}
    for key, value in record["workers"][0].items():
        if not isinstance(value, list) and not key.endswith("_at_seconds"):
            known = _known(worker[key] for worker in record["workers"])
            mean = math.fsum(known) / len(known) if known else None
            scalars[f"{key}_mean_over_workers"] = mean
    waited, exchange = (
        scalars[f"{key}_seconds_mean_over_workers"] for key in ("waited", "exchange")
    )
    if waited is not None and exchange:
        scalars["hidden_percent_mean_over_workers"] = 100 * max(0.0, 1 - waited / exchange)
    scalars |= {key: record[key] for key in ("update_norm", "late_by_seconds", "participants")}
    return {f"round_{key}/fragment_{record['fragment']}": scalars[key] for key in scalars}


def peak_mbit_per_second(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the rate of the busiest worker in a transfer, in its busier direction."""
    rates = [
        8e-6 * max(worker["sent_bytes"], worker["received_bytes"]) / worker["transfer_seconds"]
        for record in rounds
        for worker in record["workers"]
        if worker["transfer_seconds"] and worker["sent_bytes"] is not None
    ]
    return max(rates, default=0.0 if rounds else None)
