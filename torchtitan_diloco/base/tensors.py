"""Tensors of a rank: its shard of a DTensor, copies on the host, and whether values are finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def shard_rows(rows: int, rank: int, ranks: int) -> range:
    """Return the rows of a rank under FSDP2: equal ranges, of which the last may be shorter or
    empty."""
    size = -(-rows // ranks)
    return range(min(rows, rank * size), min(rows, (rank + 1) * size))


def local_of(value: Tensor) -> Tensor:
    """Return this rank's shard."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def drop_gathered(model: nn.Module) -> None:
    """Reshard FSDP2 modules, so that the next forward pass sees changes of the shards.

    A forward pass without a backward pass may leave gathered parameters behind.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values and the sums of their squares are finite, as a tensor."""
    finite = list[Tensor]()
    for tensor in tensors:
        dtype = None if tensor.dtype == torch.float64 else torch.float32
        finite.append(torch.linalg.vector_norm(tensor, dtype=dtype).isfinite())
    return torch.stack([flag.to(finite[0].device) for flag in finite]).all()


def copy_to_host(value: Tensor) -> Tensor:
    """Return a copy in host memory. From a GPU, it is only queued on the current stream."""
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copy.copy_(value, non_blocking=True)
