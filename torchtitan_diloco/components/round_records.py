"""Round records: one record for each round of a fragment, with the numbers of all workers.

Every machine has its own clock. The last header of a round arrives at all workers at the same time,
up to its latency, so the moments of each worker are shifted to make this time equal to worker 0's.
How late a worker was needs no common clock: the last worker waits the shortest time for the headers
of the others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from torchtitan_diloco.components.records import NAN, RoundRecord, WorkerRound
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.transport import FLAG_NAMES
from torchtitan_diloco.distributed.world import World

LEAST_LINK_BYTES = 16_384
"""A smaller message is no measure of the link: it takes as long as a thread needs to wake up."""


class RoundTable:
    """Turns the rounds of all ranks into records. Moments are relative to `clock_start`.

    To add a field: declare it in `WorkerRound`, return it from `numbers` under its name, and
    describe it in docs/report.md.
    """

    def __init__(self, world: World, fragment_names: Sequence[str], clock_start: float) -> None:
        self._world, self._names, self._clock_start = world, fragment_names, clock_start
        self._shifts = [0.0] * world.workers

    def numbers(self, found: Round) -> dict[str, float]:
        """Return what this rank adds to the sums of its worker. Only the first rank adds times.

        Keys are fields of WorkerRound, or FIELD/ITEM for an item of a field.
        """
        traffic = found.traffic
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
        moments = {
            "due": found.due,
            "taken": found.taken,
            "begun": found.begun,
            "encoded": traffic.encoded,
            "heard": max(traffic.heard.values(), default=NAN),
            "received": traffic.received,
            "ready": found.ready,
            "asked": found.asked,
            "arrived": found.fetched,
            "applied": found.applied,
        }
        own = {
            "weight": found.weight,
            "flags": found.flags,
            "encoding_seconds": traffic.encoding_seconds,
            "decoding_seconds": traffic.decoding_seconds,
        }
        own |= {f"at_seconds/{name}": at - self._clock_start for name, at in moments.items()}
        for other in range(self._world.workers):
            size, seconds = traffic.link_bytes.get(other, 0), traffic.link_seconds(other)
            measured = size >= LEAST_LINK_BYTES and seconds > 0
            own[f"heard_after_seconds/{other}"] = traffic.heard_after(other)
            own[f"received_bits_per_second_from/{other}"] = 8 * size / seconds if measured else NAN
        return summed | (dict.fromkeys(own, 0.0) if self._world.rank_in_worker else own)

    def record(self, found: Round, numbers: Sequence[Mapping[str, float]]) -> RoundRecord:
        """Return the record of a round from the sums of each worker."""
        workers = list(map(_worker_round, numbers))
        self._align(workers)
        waited = [max(known(one.heard_after_seconds), default=NAN) for one in workers]
        last_worker, late_by = last_to_arrive(waited)
        return RoundRecord(
            step=found.applied_step,
            fragment=found.fragment,
            fragment_name=self._names[found.fragment],
            outer_round=found.outer_round,
            sent_step=found.sent_step,
            parameters=round(numbers[0]["parameters"]),
            participants=found.participants,
            update_norm=math.sqrt(numbers[0]["update_square"]),
            last_worker=last_worker,
            late_by_seconds=late_by,
            workers=workers,
        )

    def _align(self, workers: Sequence[WorkerRound]) -> None:
        """Shift the moments of all workers to worker 0's clock.

        Where the arrival of the headers is not known, use the shift of the previous round.
        """
        heard = workers[0].at_seconds["heard"]
        for worker, one in enumerate(workers):
            shift = heard - one.at_seconds["heard"]
            if math.isfinite(shift):
                self._shifts[worker] = shift
            for name in one.at_seconds:
                one.at_seconds[name] += self._shifts[worker]


def _worker_round(numbers: Mapping[str, float]) -> WorkerRound:
    def items(field: str) -> dict[str, float]:
        return {key.partition("/")[2]: numbers[key] for key in numbers if key.startswith(field)}

    norms = math.sqrt(numbers["delta_square"] * numbers["mean_square"])
    flags = round(numbers["flags"])
    return WorkerRound(
        **{key: value for key, value in numbers.items() if key in WorkerRound.__struct_fields__},
        left_out=[name for flag, name in FLAG_NAMES.items() if flags & flag],
        at_seconds=items("at_seconds/"),
        outer_gradient_norm=math.sqrt(numbers["delta_square"]),
        cosine_to_mean=numbers["dot"] / norms if norms else NAN,
        drift_norm=math.sqrt(numbers["drift_square"]),
        heard_after_seconds=list(items("heard_after_seconds/").values()),
        received_bits_per_second_from=list(items("received_bits_per_second_from/").values()),
    )


def last_to_arrive(waited: Sequence[float]) -> tuple[int | None, float]:
    """Return the worker that held up a round, or None if it is not known, and for how long.

    `waited`: the seconds for which each worker waited for the headers of the others.
    """
    if len(shortest := sorted(known(waited))) < 2:
        return None, NAN
    return waited.index(shortest[0]), shortest[1] - shortest[0]


def known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def percent_without(part: float, whole: float) -> float:
    return max(100 - 100 * part / whole, 0.0) if whole else NAN  # NaN stays NaN


def peak_mbit_per_second(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the highest rate of one worker during a transfer, in its busier direction."""
    rates = [
        8e-6 * max(worker.sent_bytes, worker.received_bytes) / worker.transfer_seconds
        for record in rounds
        for worker in record.workers
        if worker.transfer_seconds > 0 and worker.sent_bytes >= 0
    ]
    return max(rates, default=0.0 if rounds else None)
