"""Deltas that are left out of a mean: not finite, or outliers by their norm."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import TransferError, transfers
from torchtitan_diloco.base.user import UserError, cause_of
from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER, WENT_WRONG
from torchtitan_diloco.diloco.transport import Header, WorkerLostError

LATEST = 32  # norms in the median
FEWEST = 5  # norms that are needed to find an outlier
ROUNDS = 3
"""Consecutive rounds of a fragment in which a worker may send a delta that is not finite."""


class DeltaNorms:
    """Latest norms of a worker's deltas of one fragment."""

    def __init__(self, latest: Iterable[float] = ()) -> None:
        self.latest = deque(latest, maxlen=LATEST)

    def judge(self, square: float, limit: float) -> int:
        """Return the flag of a delta with this squared norm, and record the norm.

        Outliers are recorded too, or the deltas after a lasting change would all be outliers.
        `limit`: DiLoCoConfig.delta_norm_limit.
        """
        if not math.isfinite(square):
            return NOT_FINITE
        norm = math.sqrt(square)
        usual = statistics.median(self.latest) if len(self.latest) >= FEWEST else math.inf
        if norm:
            self.latest.append(norm)
        return OUTLIER if limit and norm > limit * usual else 0


def settle_weights(headers: list[Header]) -> list[Header]:
    """Set the weight of flagged workers to 0, but ignore outliers that all workers have.

    Such outliers have a common cause, such as a higher learning rate.
    """
    if all(header.flags & OUTLIER for header in headers):
        headers = [replace(header, flags=header.flags & ~OUTLIER) for header in headers]
    return [replace(header, weight=0.0) if header.flags else header for header in headers]


def sum_over_ranks(value: float, group: dist.ProcessGroup | None, worker: int) -> float:
    """Return the sum over the ranks of a worker. `group`: a gloo group of them."""
    if group is None or group.size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    try:
        with transfers():
            dist.all_reduce(total, group=group)
    except TransferError as error:
        reason = f"one of the ranks of worker {worker}: {cause_of(error)}"
        raise WorkerLostError([worker], reason) from error
    return total.item()


class LeftOut:
    """Raises an error if a worker's deltas remain unusable."""

    def __init__(self, workers: int, fragments: int) -> None:
        self._broken = [[0] * workers for _ in range(fragments)]
        self._left_out = set[int]()

    def note(self, headers: list[Header], norm_limit: float) -> None:
        """Log workers that are newly left out. Raise an error if the deltas of one stay
        non-finite."""
        reasons = {
            NOT_FINITE: "is not finite",
            OUTLIER: f"is more than diloco.delta_norm_limit = {norm_limit:g} times its usual norm",
        }
        first = headers[0]
        broken = self._broken[first.fragment]
        left_out = [worker for worker, header in enumerate(headers) if header.flags & WENT_WRONG]
        is_new = bool(set(left_out) - self._left_out)
        for flag, reason in reasons.items():
            culprits = [str(worker) for worker in left_out if headers[worker].flags & flag]
            if is_new and culprits:
                logger.warning(
                    f"fragment {first.fragment}, outer round {first.outer_round}: the delta of "
                    f"worker {' and of '.join(culprits)} after step {first.step} {reason}; it is "
                    "left out of this round, and its worker takes the shared parameters"
                )
        self._left_out = set(left_out)
        for worker, header in enumerate(headers):
            broken[worker] = broken[worker] + 1 if header.flags & NOT_FINITE else 0
            if broken[worker] > ROUNDS:
                raise UserError(
                    f"worker {worker} has not sent a finite delta of fragment "
                    f"{first.fragment} in {broken[worker]} rounds: its loss stays "
                    "NaN. Lower the learning rate or clip gradients, and call "
                    "StreamingDiLoCo.heal() after a step whose gradient is not finite"
                )
