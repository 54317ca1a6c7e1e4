"""The records of a logged step, while the numbers of other ranks arrive."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from torchtitan_diloco.components.metrics import (
    LARGEST_OF_JOB,
    MERGED_IN_WORKER,
    METRICS,
    OF_JOB,
    SUMMED_OVER_JOB,
    Record,
)
from torchtitan_diloco.components.records import RoundRecord
from torchtitan_diloco.diloco.metrics import OUTER_METRICS, Merge, merge_parts
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.distributed.collectives import (
    Asked,
    PendingMax,
    PendingRows,
    PendingSum,
)
from torchtitan_diloco.distributed.world import World


class JobSums(NamedTuple):
    """Numbers of a rank since the last logged step that are summed over all ranks, before those of
    `SUMMED_OVER_JOB`."""

    cross_entropy: float = 0.0
    tokens: float = 0.0


def summands(sums: JobSums, numbers: Mapping[str, float]) -> list[float]:
    """Return what a rank adds to the sums over all ranks. `numbers`: its own."""
    return [*sums, *(numbers.get(OF_JOB.get(name, name), 0.0) for name in SUMMED_OVER_JOB)]


class LoggedStep:
    """A logged step, and the rounds since the last one, whose numbers are merged over ranks.

    All ranks create it after the same steps. `record`: the numbers of this rank. `rounds`: the
    records of `exchanges`, without their numbers and rates. `sums`: those of `summands` over all
    ranks.
    """

    def __init__(
        self,
        world: World,
        record: Record,
        rounds: Sequence[RoundRecord],
        exchanges: Sequence[Round],
        sums: PendingSum,
    ) -> None:
        self.record = record
        self.rounds = rounds
        self._world = world
        self._sums = sums
        where = f"up to step {record['step']}"
        largest = [record.pop(name, -math.inf) for name in LARGEST_OF_JOB]
        self._largest = PendingMax(world, largest, where)
        of_worker = [record.get(name, math.nan) for name in MERGED_IN_WORKER]
        for exchange in exchanges:
            of_worker += (float(exchange.numbers.get(name, math.nan)) for name in OUTER_METRICS)
            of_worker += (8 * exchange.traffic.rate(other) for other in range(world.workers))
        self._of_worker = PendingRows(world, of_worker, where)

    @property
    def is_complete(self) -> bool:
        """Whether the numbers of the other ranks are there."""
        return all(part.is_complete for part in (self._sums, self._largest, self._of_worker))

    def merge(self) -> None:
        """Wait for the numbers of the other ranks, and put the merged ones into the records."""
        summed = self._sums.result()[len(Asked._fields) :]
        largest = self._largest.result()
        of_worker = self._merge_in_worker()
        self.record |= {name: of_worker[name] for name in of_worker if name in self.record}
        sums = JobSums(*summed[: len(JobSums._fields)])
        self.record["loss/train"] = sums.cross_entropy / (sums.tokens or math.nan)
        for name, total in zip(SUMMED_OVER_JOB, summed[len(JobSums._fields) :], strict=True):
            if OF_JOB.get(name, name) in self.record:
                is_sum = METRICS[name].ranks is Merge.SUM
                self.record[name] = total / (self._world.workers if is_sum else self._world.size)
        for name, value in zip(LARGEST_OF_JOB, largest, strict=True):
            if value > -math.inf:
                self.record[name] = value

    def _merge_in_worker(self) -> dict[str, float]:
        """Return the numbers of the worker from those of its ranks, after putting those of each
        round, and its rates, into its record."""
        ranks = list(map(iter, self._of_worker.result()))

        def take(count: int) -> list[list[float]]:
            """Return the next values of each rank."""
            return [list(islice(values, count)) for values in ranks]

        def merge(names: Sequence[str]) -> dict[str, float]:
            parts = [dict(zip(names, values, strict=True)) for values in take(len(names))]
            return merge_parts(parts, METRICS)

        of_worker = merge(MERGED_IN_WORKER)
        for record in self.rounds:
            record.set_numbers(merge(list(OUTER_METRICS)))
            record.set_rates(take(self._world.workers))
        return of_worker
