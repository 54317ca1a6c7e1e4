"""Workers that went wrong: deltas that are left out of a mean, and fragments that start afresh."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.fragments import Fragment, Part, local_rows
from torchtitan_diloco.diloco.transport import (
    NOT_FINITE,
    OUTLIER,
    WENT_WRONG,
    Header,
    WorkerLostError,
)
from torchtitan_diloco.utils import cause_of, logger

LATEST = 32  # norms that the median is taken of
FEWEST = 5  # norms without which no delta is an outlier
ROUNDS = 3
"""Rounds of a fragment in a row in which a worker may send nothing finite."""


class DeltaNorms:
    """The latest norms of a worker's deltas of one fragment."""

    def __init__(self, latest: Iterable[float] = ()) -> None:
        self.latest = deque(latest, maxlen=LATEST)

    def judge(self, square: float, limit: float, turns: float = 1.0) -> int:
        """Return the flag of a delta with this squared norm, and remember the norm.

        `limit` is that of DiLoCoConfig. `turns`: steps of the delta, in units of H. An island's are
        more after an outage, and fewer where it sends early. Outliers are remembered as well:
        otherwise a lasting change would be one for ever.
        """
        if not math.isfinite(square):
            return NOT_FINITE
        norm = math.sqrt(square) / max(1.0, turns)
        usual = statistics.median(self.latest) if len(self.latest) >= FEWEST else math.inf
        if norm:
            # With alpha, a delta of few steps also has a share of older ones: do not scale it up
            # where it is judged.
            self.latest.append(norm / min(1.0, turns))
        return OUTLIER if limit and norm > limit * usual else 0


def settle_weights(headers: list[Header]) -> list[Header]:
    """Give workers with a flag weight 0. If all have an outlier, nobody has.

    What changes the deltas of all workers alike, such as a higher learning rate, is no fault.
    """
    if all(header.flags & OUTLIER for header in headers):
        headers = [replace(header, flags=header.flags & ~OUTLIER) for header in headers]
    return [replace(header, weight=0.0) if header.flags else header for header in headers]


def log_left_out(headers: list[Header], limit: float) -> None:
    reasons = {
        NOT_FINITE: "is not finite",
        OUTLIER: f"is beyond diloco.delta_norm_limit = {limit:g} times its usual norm",
    }
    for flag, reason in reasons.items():
        found = [worker for worker, header in enumerate(headers) if header.flags & flag]
        if found:
            first = headers[found[0]]
            logger.warning(
                f"fragment {first.fragment}, outer round {first.outer_round}: the delta of worker "
                f"{' and of '.join(map(str, found))} after step {first.step} {reason}; it is left "
                "out of this round, and its worker takes the shared parameters"
            )


def is_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values are finite, as a tensor. The sum of their squares must be, too."""
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensors]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()


def find_broken(
    fragments: Sequence[Fragment],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
) -> list[int]:
    """Return the fragments that are not finite, or their inner moments, on any rank of a group."""

    def values_of(part: Part) -> Iterator[Tensor]:
        yield part.local()
        state = {} if optimizer is None else optimizer.state.get(part.parameter, {})
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield local_rows(part.name, value)

    finite = [
        is_finite(one for part in each.parts for one in values_of(part)) for each in fragments
    ]
    broken = (~torch.stack(finite)).to(torch.int32)
    if group is not None and group.size() > 1:
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=group)
    return broken.nonzero().flatten().tolist()


def sum_over_ranks(value: float, group: dist.ProcessGroup | None, worker: int) -> float:
    """Return the sum over the ranks of a worker, which a gloo group joins."""
    if group is None or group.size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        reason = f"one of the ranks of worker {worker}: {cause_of(error)}"
        raise WorkerLostError([worker], reason) from error
    return total.item()


class InnerSteps:
    """Counts steps of the inner optimizer, to find that a call of the outer loop's was left out:
    other workers could not tell that from a slow worker."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.restart()
        if optimizer is not None:
            optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._made += 1

    def restart(self) -> None:
        """Accept any number of steps before the next call."""
        self._made = -math.inf

    def check(self) -> None:
        made, self._made = self._made, 0
        if made > 1:
            raise ValueError(
                f"the inner optimizer has made {made} steps since the last call of "
                "StreamingDiLoCo.step(): call it after every step, equally often on all workers"
            )


def forget_moments(fragment: Fragment, optimizer: torch.optim.Optimizer | None) -> None:
    """Let the inner optimizer start from zero for the parameters of the fragment."""
    if optimizer is not None:
        for part in fragment.parts:
            optimizer.state.pop(part.parameter, None)


class Watch:
    """Ends a run in which nothing is gained by exchanges."""

    def __init__(self, workers: int, fragments: int) -> None:
        self._fragments, self._same, self.compares = fragments, 0, workers > 1
        """`compares`: workers are not known to train apart yet."""
        self._broken = [[0] * workers for _ in range(fragments)]
        self._left_out = set[int]()

    def note(self, headers: list[Header], norm_limit: float) -> None:
        """Log who is left out, once for exchanges in a row.

        Raise if workers send equal deltas only, or one no finite one.
        """
        left_out = {worker for worker, header in enumerate(headers) if header.flags & WENT_WRONG}
        if left_out - self._left_out:
            log_left_out(headers, norm_limit)
        self._left_out, fragment = left_out, headers[0].fragment
        sums = {header.delta for header in headers}
        finite = not any(header.flags & NOT_FINITE for header in headers)
        if self.compares and finite and sums != {0}:  # 0: nothing has changed
            self.compares, self._same = len(sums) == 1, self._same + 1
            if self.compares and self._same >= max(ROUNDS, self._fragments):
                raise ValueError(
                    f"all workers have sent the same bits in all {self._same} exchanges so far: "
                    "either their gradients are averaged over the workers in every step "
                    "(DistributedDataParallel, accelerate or FSDP over all ranks: make it over the "
                    "ranks of one worker), or they read the same data (give each its own part, or "
                    "its own seed), of which there may be too little for all"
                )
        broken = self._broken[fragment]
        for worker, header in enumerate(headers):
            broken[worker] = (broken[worker] + 1) * bool(header.flags & NOT_FINITE)
            if broken[worker] > ROUNDS:
                raise ValueError(
                    f"worker {worker} has not sent a finite delta of fragment {fragment} in "
                    f"{broken[worker]} rounds: its loss stays NaN. Lower the learning rate or "
                    "clip gradients, and after a step whose gradient is not finite call "
                    "StreamingDiLoCo.heal()"
                )
