"""Gradients between backward pass and optimizer: when they are summed over workers, their global norm, clipping."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def reduce_over_workers(model: nn.Module, enabled: bool) -> None:
    """With gradient accumulation the sum over workers, whose links are slow, waits for the last micro-batch; inside a
    worker each micro-batch is reduced at once, so that gradients stay sharded."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(enabled)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup | None
) -> float:
    """Norm of the whole gradient, whose shards lie on the ranks of `group`; scales the gradient down to `max_norm`
    where it is longer (0: never). A norm that is not finite leaves everything as it is: the caller skips the step."""
    shards = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = global_norm(shards, group)
    if max_norm and math.isfinite(norm) and norm > max_norm:
        for shard in shards:
            shard.mul_(max_norm / norm)
    return norm


def global_norm(shards: list[Tensor], group: dist.ProcessGroup | None) -> float:
    norm = get_total_norm(shards)
    if group is not None and group.size() > 1:
        squared = norm.square()
        dist.all_reduce(squared, group=group)
        norm = squared.sqrt()
    return norm.item()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
