"""What the workers know of a round each, made one record: norms and angles, times, who came last, how fast the links were.

Durations are compared between machines, moments never are: the clocks of two machines have nothing in common. The last worker
to arrive at an exchange waits the shortest for the others' headers, so by how much it was late is a difference of durations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.distributed.collectives import PendingReduction, start_sum
from torchtitan_diloco.distributed.world import World

RoundRecord = dict[str, Any]

MOMENTS = (
    "due",
    "taken",
    "begun",
    "encoded",
    "heard",
    "received",
    "ready",
    "asked",
    "arrived",
    "applied",
)
ALONE = (*MOMENTS, "weight", "encoding", "decoding")
"""Of the first rank of a worker."""
ADDED = (
    "values",
    "sent_bytes",
    "received_bytes",
    "delta_square",
    "mean_square",
    "dot",
    "drift_square",
    "update_square",
)
"""Summed over the ranks of a worker."""
BY_OTHER = ("heard_after", "link_bytes", "link_seconds")
"""Of the first rank of a worker, for every other worker."""

LEAST_BYTES = 16_384
"""Of a message whose way tells how fast a link is; with fewer it tells when a thread woke up."""


class PendingRounds:
    """The same rounds of all ranks, on their way to become records. Every rank begins them at the same step."""

    def __init__(
        self,
        world: World,
        rounds: Sequence[Round],
        names: Sequence[str],
        *,
        clock_start: float,
        where: str,
    ) -> None:
        """`names`: of the fragments; `clock_start`: where this process's clock (time.perf_counter) begins to count."""
        self._workers, self._rounds, self._names = world.workers, rounds, names
        self._sums: PendingReduction | None = None
        if rounds:
            self._sums = start_sum(world, self._own_part(world, clock_start), where)

    @property
    def _width(self) -> int:
        return len(ALONE) + len(ADDED) + len(BY_OTHER) * self._workers

    def _own_part(self, world: World, clock_start: float) -> list[float]:
        """Zeros but for this rank's worker, so that the sum over ranks is a table of all."""
        speaks = world.rank_in_worker == 0
        values: list[float] = []
        for facts in self._rounds:
            mine = own_values(facts, clock_start, self._workers)
            if not speaks:
                mine[len(ADDED) :] = [0.0] * (self._width - len(ADDED))
            for worker in range(self._workers):
                values += mine if worker == world.worker else [0.0] * self._width
        return values

    def records(self) -> list[RoundRecord]:
        if self._sums is None:
            return []
        values = self._sums.result()
        found = []
        for number, facts in enumerate(self._rounds):
            tables = []
            for worker in range(self._workers):
                start = (number * self._workers + worker) * self._width
                tables.append(named(values[start : start + self._width], self._workers))
            found.append(round_record(facts, self._names[facts.fragment], tables))
        return found


def own_values(facts: Round, clock_start: float, workers: int) -> list[float]:
    """What a rank knows of a round, in the order of ADDED, ALONE and BY_OTHER."""
    traffic = facts.traffic
    known = {
        "values": float(facts.values),
        "sent_bytes": float(traffic.bytes_sent),
        "received_bytes": float(traffic.bytes_received),
        "delta_square": facts.delta_square,
        "mean_square": facts.mean_square,
        "dot": traffic.dot,
        "drift_square": float(facts.drift) ** 2,
        "update_square": facts.update_square,
        "weight": facts.weight,
        "encoding": traffic.encoding_seconds,
        "decoding": traffic.decoding_seconds,
    }
    moments = {
        "due": facts.due,
        "taken": facts.taken,
        "begun": facts.begun,
        "encoded": traffic.encoded,
        "heard": max(traffic.heard.values(), default=math.nan),
        "received": traffic.received,
        "ready": facts.ready,
        "asked": facts.asked,
        "arrived": facts.fetched,
        "applied": facts.applied,
    }
    known |= {name: moment - clock_start for name, moment in moments.items()}
    by_other: dict[str, Callable[[int], float]] = {
        "heard_after": traffic.heard_after,
        "link_bytes": lambda worker: traffic.link_bytes.get(worker, 0),
        "link_seconds": traffic.link_seconds,
    }
    alone = [known[name] for name in (*ADDED, *ALONE)]
    return alone + [by_other[name](worker) for name in BY_OTHER for worker in range(workers)]


def named(values: Sequence[float], workers: int) -> dict[str, Any]:
    """The same, by name."""
    names = (*ADDED, *ALONE)
    table: dict[str, Any] = dict(zip(names, values[: len(names)], strict=True))
    for number, name in enumerate(BY_OTHER):
        start = len(names) + number * workers
        table[name] = values[start : start + workers]
    return table


def round_record(facts: Round, name: str, workers: Sequence[dict[str, Any]]) -> RoundRecord:
    """`workers`: the tables of all. Values that are not known are None."""
    ahead = ahead_of_last([_longest(table["heard_after"]) for table in workers])
    last_worker = next((worker for worker, seconds in enumerate(ahead) if seconds == 0.0), None)
    late = [
        seconds
        for worker, seconds in enumerate(ahead)
        if worker != last_worker and seconds is not None
    ]
    return {
        "kind": "round",
        "step": facts.applied_step,
        "fragment": facts.fragment,
        "fragment_name": name,
        "outer_round": facts.outer_round,
        "sent_step": facts.sent_step,
        "applied_step": facts.applied_step,
        "parameters": round(workers[0]["values"]),
        "participants": facts.participants,
        "update_norm": _root(workers[0]["update_square"]),
        "last_worker": last_worker,
        "late_by_seconds": min(late, default=None),
        "workers": [
            _worker_record(table, seconds) for table, seconds in zip(workers, ahead, strict=True)
        ],
    }


def ahead_of_last(waited: Sequence[float | None]) -> list[float | None]:
    """How much earlier than the last one each worker arrived, from how long each waited for the others: the last waited the
    shortest."""
    known = [seconds for seconds in waited if seconds is not None]
    if len(known) < 2:
        return [None] * len(waited)
    return [None if seconds is None else seconds - min(known) for seconds in waited]


def _worker_record(table: dict[str, Any], ahead: float | None) -> dict[str, Any]:
    moments = {name: _known(table[name]) for name in MOMENTS}
    norms = (
        math.sqrt(table["delta_square"] * table["mean_square"])
        if table["delta_square"] >= 0
        else math.nan
    )
    rates = [
        8 * size / seconds if size >= LEAST_BYTES and seconds > 0 else None
        for size, seconds in _pairs(table)
    ]
    sent, received = _known(table["sent_bytes"]), _known(table["received_bytes"])
    taking, merging = _between(moments, "due", "taken"), _between(moments, "arrived", "applied")
    waited = _between(moments, "asked", "arrived")
    exposed = [seconds for seconds in (taking, waited, merging) if seconds is not None]
    return {
        "weight": _known(table["weight"]),
        **{f"{name}_at_seconds": moment for name, moment in moments.items()},
        "encoding_seconds": _known(table["encoding"]),
        "decoding_seconds": _known(table["decoding"]),
        "transfer_seconds": _between(moments, "heard", "received"),
        "exchange_seconds": _between(moments, "begun", "ready"),
        "waited_seconds": waited,
        "exposed_seconds": math.fsum(exposed) if exposed else None,
        "ahead_of_last_seconds": ahead,
        "sent_bytes": None if sent is None else round(sent),
        "received_bytes": None if received is None else round(received),
        "sent_bits_per_parameter": 8 * sent / table["values"]
        if sent is not None and table["values"]
        else None,
        "outer_gradient_norm": _root(table["delta_square"]),
        "cosine_to_mean": _known(table["dot"] / norms) if norms > 0 else None,
        "drift_norm": _root(table["drift_square"]),
        "heard_after_seconds": [_known(seconds) for seconds in table["heard_after"]],
        "received_bits_per_second_from": rates,
    }


def _pairs(table: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(table["link_bytes"], table["link_seconds"], strict=True))


def _between(moments: dict[str, float | None], start: str, end: str) -> float | None:
    """At least 0: what was there before all headers had been heard needed no transfer after it."""
    first, last = moments[start], moments[end]
    return None if first is None or last is None else max(0.0, last - first)


def _longest(seconds: Sequence[float]) -> float | None:
    known = [value for value in seconds if math.isfinite(value)]
    return max(known) if known else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _root(square: float) -> float | None:
    return math.sqrt(square) if math.isfinite(square) and square >= 0 else None
