"""Fragments whose parameters or inner optimizer state are not finite."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.tensors import is_finite, local_of
from torchtitan_diloco.diloco.fragments import Fragment


def group_of_shards(fragments: Sequence[Fragment]) -> dist.ProcessGroup | None:
    """Return the group of the ranks over which parameters are sharded, if their mesh has one
    dimension. FSDP2 uses it in the thread that trains."""
    for fragment in fragments:
        for part in fragment.parts:
            parameter = part.parameter
            if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
                return parameter.device_mesh.get_group()
    return None


def find_broken(
    fragments: Sequence[Fragment],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None,
) -> list[int]:
    """Return the fragments whose values or inner moments are not finite on any rank of a group."""
    states = {} if optimizer is None else optimizer.state
    finite = list[Tensor]()
    for fragment in fragments:
        tensors = [part.local() for part in fragment.parts]
        for part in fragment.parts:
            state = states.get(part.parameter, {}).values()
            for value in state:
                if isinstance(value, Tensor) and value.is_floating_point():
                    tensors.append(local_of(value))
        finite.append(is_finite(tensors))
    broken = (~torch.stack(finite)).to(torch.int32)
    if group is not None and group.size() > 1:
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=group)
    return broken.nonzero().flatten().tolist()
