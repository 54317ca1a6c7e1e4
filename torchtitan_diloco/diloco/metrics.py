"""Numbers that are reported: how they are declared and merged, and those of the outer loop.

A metric is declared once, with what it says and how its values merge. To add one of the outer loop,
declare it in `OUTER_METRICS`, and set it where it is computed: in `Round.numbers`, or in the
numbers that a function returns for it, such as `OuterState.advance`.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Scope(Enum):
    """Whose number it is."""

    WORKER = "worker"
    """One worker: all its ranks."""
    JOB = "job"
    """All workers that were started together. An island is alone."""
    RUN = "run"
    """The whole run, in which all workers have the same number."""


class Merge(Enum):
    """How several values of a metric become one."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    LAST = "last"
    NORM = "norm"
    """Root of the sum of squares: the norm of a vector from those of its parts."""

    def with_next(self, before: float, value: float, count: float) -> float:
        """Return the merged value of `count` values, of which `value` is the last and `before` the
        merged value of the others."""
        match self:
            case Merge.SUM:
                return before + value
            case Merge.MEAN:
                return before + (value - before) / count
            case Merge.MAX:
                return max(before, value)
            case Merge.LAST:
                return value
            case Merge.NORM:
                return math.hypot(before, value)

    def of(self, values: Sequence[float]) -> float:
        """Return the merged value, NaN if one of the values is NaN: it is not known."""
        if any(map(math.isnan, values)):
            return math.nan
        merged = values[0]
        for count, value in enumerate(values[1:], start=2):
            merged = self.with_next(merged, value, count)
        return merged


class Metric(NamedTuple):
    """What a metric says, and how its values merge: first those of rounds, then those of steps, and
    at a logged step those of ranks."""

    unit: str
    meaning: str
    scope: Scope = Scope.WORKER
    fragments: Merge | None = None
    """Over rounds, which are of one fragment each, into the numbers of a step. None: it is only in
    the records of rounds, or not a number of rounds."""
    steps: Merge | None = None
    """Over the steps of a record, and over records into totals. None: it has no total."""
    ranks: Merge | None = None
    """Over the ranks of the scope. For the job, `SUM` (the mean over workers of their sums), `MEAN`
    or `MAX`. None: it is the same on all ranks, or computed from numbers that are merged."""
    of_job: bool = False
    """Whether it is recorded for the job too: the mean over all workers, under world/."""
    is_slow_at_first: bool = False
    """Whether the first step of a process, which also prepares, would be an outlier on a board."""

    @property
    def merging(self) -> str:
        """Return how it merges, for the documentation."""
        dimensions = {"rounds": self.fragments, "steps": self.steps, "ranks": self.ranks}
        texts = list[str]()
        for merge in Merge:
            if names := [name for name, how in dimensions.items() if how is merge]:
                texts.append(f"{merge.value} over {', '.join(names)}")
        return "; ".join(texts)


class Merging:
    """Merges numbers that come one after the other.

    `merges`: how, by name. Numbers that are not known (NaN) are left out. `sums_from_zero`: sums
    are 0 as long as nothing was added to them, not unknown.
    """

    def __init__(self, merges: Mapping[str, Merge], *, sums_from_zero: bool = False) -> None:
        self._merges = merges
        sums = [name for name, merge in merges.items() if merge is Merge.SUM]
        self._sums = frozenset(sums)
        self._zeros = dict.fromkeys(sums if sums_from_zero else (), 0.0)
        self._begin()

    def _begin(self) -> None:
        self.values: dict[str, float] = dict(self._zeros)
        """Merged values by name."""
        self._counts = dict[str, int]()

    def add(self, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if math.isnan(value):
                continue
            if name in self._sums:  # fast, as nearly all are sums
                self.values[name] = self.values.get(name, 0.0) + value
                continue
            merge = self._merges[name]
            count = self._counts.get(name, 0) + 1
            self._counts[name] = count
            before = self.values.get(name)
            self.values[name] = value if before is None else merge.with_next(before, value, count)

    def take(self) -> dict[str, float]:
        """Return the merged values, and begin anew."""
        values = self.values
        self._begin()
        return values


def merge_parts(
    parts: Sequence[Mapping[str, float]], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return the numbers of a whole from those of its parts, which have the same names.

    Parts are the ranks of a worker, or the blocks of a shard, which merge alike.
    """
    merged = dict[str, float]()
    for name, first in parts[0].items():
        ranks = metrics[name].ranks
        merged[name] = first if ranks is None else ranks.of([part[name] for part in parts])
    return merged


# --- metrics of the outer loop --------------------------------------------------------------------


def _summed(unit: str, meaning: str, ranks: Merge | None = None, *, of_job: bool = False) -> Metric:
    """Return a metric that is added up over rounds and steps."""
    return Metric(
        unit,
        meaning,
        fragments=Merge.SUM,
        steps=Merge.SUM,
        ranks=ranks,
        of_job=of_job,
    )


OUTER_METRICS = {
    # Those under round/ are only in the records of rounds.
    "round/cosine_to_mean": Metric("cosine", "between the delta and the mean of all deltas"),
    "round/delta_norm": Metric("norm", "of the delta", ranks=Merge.NORM),
    "round/dot_with_mean": Metric(
        "product", "scalar product of the delta and the mean of all deltas", ranks=Merge.SUM
    ),
    "round/drift_norm": Metric(
        "norm", "distance of the parameters from the new shared ones", ranks=Merge.NORM
    ),
    "round/mean_norm": Metric("norm", "of the mean of all deltas", ranks=Merge.NORM),
    "sync/largest_mean_delta": Metric(
        "magnitude",
        "largest value of an averaged delta, in measured rounds",
        Scope.JOB,
        fragments=Merge.MAX,
        steps=Merge.MAX,
        ranks=Merge.MAX,
    ),
    "worker/coding_seconds": _summed(
        "seconds", "of the exchange thread, encoding and decoding", Merge.MEAN
    ),
    "worker/exchange_seconds": _summed(
        "seconds", "of exchanges in the background", Merge.MEAN, of_job=True
    ),
    "worker/exposed_seconds": _summed(
        "seconds", "taking, waiting for and merging fragments", Merge.MEAN, of_job=True
    ),
    "worker/exposed_waiting_seconds": _summed(
        "seconds", "waiting for fragments", Merge.MEAN, of_job=True
    ),
    "worker/fragments_applied": _summed("fragments", "applied"),
    "worker/fragments_in_flight": Metric(
        "fragments", "in flight at the end of the interval", steps=Merge.LAST
    ),
    "worker/healed_fragments": _summed("fragments", "reset to the shared parameters"),
    "worker/participants": _summed("workers", "in the applied fragments, added up"),
    "worker/received_bytes": _summed("bytes", "received from other workers, counted", Merge.SUM),
    "worker/sent_bytes": _summed("bytes", "sent to other workers, counted", Merge.SUM, of_job=True),
    "worker/transfer_waiting_seconds": _summed(
        "seconds", "of the exchange thread, for messages", Merge.MEAN
    ),
}
OVER_FRAGMENTS = {
    name: metric.fragments for name, metric in OUTER_METRICS.items() if metric.fragments is not None
}
