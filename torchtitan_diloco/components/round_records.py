"""Round records: one record of each round of a fragment, gathered from all workers.

Durations are compared between machines, moments are not: every machine has a clock of its own. The
last worker to arrive at an exchange waits the shortest time for the headers of the others, so how
late it was is a difference of durations. A worker whose process stopped during the exchange found
the others' headers late, and held up the round all the same: it counts as the last.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.distributed.collectives import PendingReduction
from torchtitan_diloco.distributed.world import World

RoundRecord = dict[str, Any]


class Field(NamedTuple):
    """Number that every rank measures in a round."""

    combine: Literal["sum", "first", "moment"]
    """Over the ranks of a worker: their sum, or the value of the first one. A moment is the first
    rank's as well, in seconds since `clock_start`."""
    read: Callable[[Round], float]


FIELDS: dict[str, Field] = {
    "parameters": Field("sum", lambda r: r.values),
    "sent_bytes": Field("sum", lambda r: r.traffic.bytes_sent),
    "received_bytes": Field("sum", lambda r: r.traffic.bytes_received),
    "delta_square": Field("sum", lambda r: r.delta_square),
    "mean_square": Field("sum", lambda r: r.mean_square),
    "dot": Field("sum", lambda r: r.traffic.dot),
    "drift_square": Field("sum", lambda r: float(r.drift) ** 2),
    "update_square": Field("sum", lambda r: r.update_square),
    "weight": Field("first", lambda r: r.weight),
    "stopped_seconds": Field("first", lambda r: r.stopped),
    "encoding_seconds": Field("first", lambda r: r.traffic.encoding_seconds),
    "decoding_seconds": Field("first", lambda r: r.traffic.decoding_seconds),
    "due_at_seconds": Field("moment", lambda r: r.due),
    "taken_at_seconds": Field("moment", lambda r: r.taken),
    "begun_at_seconds": Field("moment", lambda r: r.begun),
    "encoded_at_seconds": Field("moment", lambda r: r.traffic.encoded),
    "heard_at_seconds": Field("moment", lambda r: max(r.traffic.heard.values(), default=math.nan)),
    "received_at_seconds": Field("moment", lambda r: r.traffic.received),
    "ready_at_seconds": Field("moment", lambda r: r.ready),
    "asked_at_seconds": Field("moment", lambda r: r.asked),
    "arrived_at_seconds": Field("moment", lambda r: r.fetched),
    "applied_at_seconds": Field("moment", lambda r: r.applied),
}
LINK_FIELDS: dict[str, Callable[[Traffic, int], float]] = {
    "heard_after_seconds": Traffic.heard_after,
    "link_bytes": lambda traffic, other: traffic.link_bytes.get(other, 0),
    "link_seconds": Traffic.link_seconds,
}
"""Numbers that the first rank of a worker measures for every other worker."""

LEAST_LINK_BYTES = 16_384
"""The time of a smaller message shows when a thread woke up, not how fast the link is."""


class PendingRounds:
    """Rounds whose numbers are being summed over all ranks in the background.

    A rank fills in its own worker's numbers and leaves those of other workers zero, so that the sum
    is a table of all workers. Every rank starts it at the same step, with the same rounds.
    """

    def __init__(
        self,
        world: World,
        rounds: Sequence[Round],
        names: Sequence[str],
        *,
        clock_start: float,
        where: str,
    ) -> None:
        """`names`: of all fragments. `clock_start`: the `time.perf_counter()` at moment zero."""
        self._rounds, self._names, self._workers = rounds, names, world.workers
        measured = [_measured(world, facts, clock_start) for facts in rounds]
        self._keys = list(measured[0]) if rounds else []
        table = [
            value if worker == world.worker else 0.0
            for numbers in measured
            for worker in range(world.workers)
            for value in numbers.values()
        ]
        self._sums = PendingReduction(world, table, where)

    def records(self) -> list[RoundRecord]:
        """Wait for the sums and return one record for each round."""
        values, records = iter(self._sums.result()), []
        for facts in self._rounds:
            workers = [{key: next(values) for key in self._keys} for _ in range(self._workers)]
            records.append(_round_record(facts, self._names[facts.fragment], workers))
        return records


def _measured(world: World, facts: Round, clock_start: float) -> dict[str, float]:
    """Return this rank's numbers: FIELDS by name, and LINK_FIELDS by NAME/WORKER."""
    first = world.rank_in_worker == 0
    numbers = {}
    for name, field in FIELDS.items():
        start = clock_start if field.combine == "moment" else 0.0
        numbers[name] = field.read(facts) - start if first or field.combine == "sum" else 0.0
    for name, read in LINK_FIELDS.items():
        for other in range(world.workers):
            numbers[f"{name}/{other}"] = read(facts.traffic, other) if first else 0.0
    return numbers


def _round_record(facts: Round, name: str, workers: Sequence[Mapping[str, float]]) -> RoundRecord:
    """Return a record of the numbers of each worker. Those that are not known are NaN there and
    None in the record."""
    waited = [_known(_links(numbers, "heard_after_seconds")) for numbers in workers]
    ahead = ahead_of_last([max(seconds, default=None) for seconds in waited])
    last_worker = ahead.index(0.0) if 0.0 in ahead else None
    late_by = min(
        _known(seconds for worker, seconds in enumerate(ahead) if worker != last_worker),
        default=None,
    )
    stops = [numbers["stopped_seconds"] for numbers in workers]
    if max(stops) > (late_by or 0.0) and len(workers) > 1:
        last_worker, late_by = stops.index(max(stops)), max(stops)
    return {
        "kind": "round",
        "step": facts.applied_step,
        "fragment": facts.fragment,
        "fragment_name": name,
        "outer_round": facts.outer_round,
        "sent_step": facts.sent_step,
        "applied_step": facts.applied_step,
        "parameters": round(workers[0]["parameters"]),
        "participants": facts.participants,
        "update_norm": _finite(math.sqrt(workers[0]["update_square"])),
        "last_worker": last_worker,
        "late_by_seconds": late_by,
        "workers": [_worker_record(*pair) for pair in zip(workers, ahead, strict=True)],
    }


def ahead_of_last(waited: Sequence[float | None]) -> list[float | None]:
    """Return how much earlier than the last worker each one arrived.

    `waited` is how long each worker waited for the headers of the others.
    """
    known = _known(waited)
    if len(known) < 2:
        return [None] * len(waited)
    return [None if seconds is None else seconds - min(known) for seconds in waited]


def _worker_record(numbers: Mapping[str, float], ahead: float | None) -> dict[str, Any]:
    def between(start: str, end: str) -> float:
        seconds = numbers[f"{end}_at_seconds"] - numbers[f"{start}_at_seconds"]
        return max(seconds, 0.0)  # a payload may arrive before the last header; NaN stays NaN

    waited = between("asked", "arrived")
    exposed = _known([between("due", "taken"), waited, between("arrived", "applied")])
    norms = math.sqrt(numbers["delta_square"] * numbers["mean_square"])
    values = {
        **{name: numbers[name] for name, field in FIELDS.items() if field.combine != "sum"},
        "transfer_seconds": between("heard", "received"),
        "exchange_seconds": between("begun", "ready"),
        "waited_seconds": waited,
        "exposed_seconds": math.fsum(exposed) if exposed else math.nan,
        "sent_bytes": numbers["sent_bytes"],
        "received_bytes": numbers["received_bytes"],
        "sent_bits_per_parameter": 8 * numbers["sent_bytes"] / (numbers["parameters"] or math.nan),
        "outer_gradient_norm": math.sqrt(numbers["delta_square"]),
        "cosine_to_mean": numbers["dot"] / norms if norms else math.nan,
        "drift_norm": math.sqrt(numbers["drift_square"]),
    }
    sizes, seconds = _links(numbers, "link_bytes"), _links(numbers, "link_seconds")
    record: dict[str, Any] = {name: _finite(value) for name, value in values.items()}
    for name in ("sent_bytes", "received_bytes"):
        record[name] = None if record[name] is None else round(record[name])
    record["ahead_of_last_seconds"] = ahead
    record["heard_after_seconds"] = list(map(_finite, _links(numbers, "heard_after_seconds")))
    record["received_bits_per_second_from"] = [
        8 * size / time if size >= LEAST_LINK_BYTES and time > 0 else None
        for size, time in zip(sizes, seconds, strict=True)
    ]
    return record


def _links(numbers: Mapping[str, float], name: str) -> list[float]:
    """Return a number of LINK_FIELDS for every worker."""
    return [value for key, value in numbers.items() if key.startswith(f"{name}/")]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


OVERVIEW = {
    "1. Is the communication hidden?": {
        "share of time, percent": [r"time/share_.*_percent"],
        "hidden share of each round, percent": [r"round_hidden_percent_mean_over_workers/.*"],
        "exposed seconds of each round": [r"round_exposed_seconds_mean_over_workers/.*"],
    },
    "2. Does it learn?": {
        "loss, nats per token": [r"train/loss.*", r"validation/loss.*"],
        "tokens per second": [r"speed/tokens_per_second_global"],
    },
    "3. What goes over the links?": {
        "Mbit/s": [r"diloco/bandwidth_.*"],
        "transfer seconds of each round": [r"round_transfer_seconds_mean_over_workers/.*"],
    },
    "4. Do the workers agree?": {
        "cosine of each worker's change to the mean": [
            r"round_cosine_to_mean_mean_over_workers/.*"
        ],
        "norm of the outer gradient": [r"round_outer_gradient_norm_mean_over_workers/.*"],
        "drift from the shared parameters": [r"round_drift_norm_mean_over_workers/.*"],
        "who came last, seconds": [r"round_late_by_seconds/.*"],
    },
}
"""Custom scalars of TensorBoard: sections, their charts, and the tags in each chart."""

MEANS_OVER_WORKERS = (
    "outer_gradient_norm",
    "cosine_to_mean",
    "drift_norm",
    "exposed_seconds",
    "transfer_seconds",
    "encoding_seconds",
    "decoding_seconds",
    "sent_bytes",
    "received_bytes",
    "sent_bits_per_parameter",
    "weight",
)


def round_scalars(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers of a round by TensorBoard tag."""

    def mean(key: str) -> float | None:
        known = _known(worker[key] for worker in record["workers"])
        return math.fsum(known) / len(known) if known else None

    scalars = {f"round_{key}_mean_over_workers": mean(key) for key in MEANS_OVER_WORKERS}
    waited, exchange = mean("waited_seconds"), mean("exchange_seconds")
    if waited is not None and exchange:
        scalars["round_hidden_percent_mean_over_workers"] = 100 * max(0.0, 1 - waited / exchange)
    for key in ("update_norm", "late_by_seconds", "participants"):
        scalars[f"round_{key}"] = record[key]
    tag = "{}/fragment_" + str(record["fragment"])
    return {tag.format(key): value for key, value in scalars.items()}


def peak_mbit_per_second(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the rate of the busiest worker in a transfer, in its busier direction."""
    rates = [
        8e-6 * max(worker["sent_bytes"], worker["received_bytes"]) / worker["transfer_seconds"]
        for record in rounds
        for worker in record["workers"]
        if worker["transfer_seconds"] and worker["sent_bytes"] is not None
    ]
    return max(rates, default=0.0 if rounds else None)
