"""Mistakes of a training loop that would waste a run in silence."""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan_diloco.diloco.healing import log_left_out
from torchtitan_diloco.diloco.outer_state import checksum
from torchtitan_diloco.diloco.transport import NOT_FINITE, WENT_WRONG, Header
from torchtitan_diloco.utils import logger

ROUNDS = 3
"""Rounds of every fragment in which a worker sends nothing finite, until the run ends."""


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise if the collectives of torch.distributed cannot use a group."""
    try:
        if group is not None:
            dist.get_backend(group)
    except ValueError as error:
        raise ValueError(
            "group: torch.distributed does not know it, or this rank is not in it. Start all "
            "workers in one world (torchrun --nnodes) and hand in dist.new_group(ranks), which all "
            "ranks call; jobs of their own are joined by torchtitan_diloco.islands"
        ) from error


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise if the model's gradients are averaged over workers; warn if buffers will differ."""
    if group is None or group.size() == 1:
        return
    workers = set(dist.get_process_group_ranks(group))
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            _check_ranks(workers, ranks, f'DistributedDataParallel "{name}"')
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            _check_ranks(workers, ranks, f"the mesh of {name}")
    statistics = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
    if statistics and group.rank() == 0:
        logger.warning(
            f"running statistics such as {statistics[0]} are not exchanged: every worker keeps its "
            "own, and global_state_dict() returns this one's. Use a norm without them (LayerNorm, "
            "GroupNorm), or average them with dist.all_reduce before you save or evaluate"
        )


def _check_ranks(workers: set[int], ranks: list[int], what: str) -> None:
    if len(workers.intersection(ranks)) > 1:
        raise ValueError(
            f"{what} joins the ranks {ranks}, which are of several workers ({sorted(workers)} are "
            "joined by the group between workers): gradients would be averaged over workers in "
            "every step. Make it over the ranks of this worker only, or leave it out if a worker "
            "has one rank"
        )


class Watch:
    """Ends a run in which nothing is gained by exchanges."""

    def __init__(self, workers: int, fragments: int) -> None:
        self._fragments, self._same, self._compares = fragments, 0, workers > 1
        self._broken = [0] * workers
        self._left_out = set[int]()

    def checksum(self, delta: Tensor) -> int:
        """Return the checksum of a delta until workers are known to train apart, then 0."""
        return checksum(delta) if self._compares else 0

    def note(self, headers: list[Header], norm_limit: float) -> None:
        """Log who is left out, once for exchanges in a row.

        Raise if workers send equal deltas only, or one no finite one.
        """
        left_out = {worker for worker, header in enumerate(headers) if header.flags & WENT_WRONG}
        if left_out - self._left_out:
            log_left_out(headers, norm_limit)
        self._left_out = left_out
        sums = {header.delta for header in headers}
        finite = not any(header.flags & NOT_FINITE for header in headers)
        if self._compares and finite and sums != {0}:  # 0: nothing has changed
            self._compares, self._same = len(sums) == 1, self._same + 1
            if self._compares and self._same >= max(ROUNDS, self._fragments):
                raise ValueError(
                    f"all workers have sent the same bits in all {self._same} exchanges so far: "
                    "either their gradients are averaged over the workers in every step "
                    "(DistributedDataParallel, accelerate or FSDP over all ranks: make it over the "
                    "ranks of one worker), or they read the same data (give each its own part, or "
                    "its own seed), of which there may be too little for all"
                )
        for worker, header in enumerate(headers):
            self._broken[worker] = (self._broken[worker] + 1) * bool(header.flags & NOT_FINITE)
            if self._broken[worker] > ROUNDS * self._fragments:
                raise ValueError(
                    f"worker {worker} has not sent a finite delta in {self._broken[worker]} "
                    "exchanges: its loss stays NaN. Lower the learning rate or clip gradients, and "
                    "after a step whose gradient is not finite call StreamingDiLoCo.heal()"
                )
