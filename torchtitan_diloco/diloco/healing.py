"""Fragments whose parameters or inner optimizer state are not finite."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.tensors import is_finite, local_of
from torchtitan_diloco.diloco.fragments import Fragment


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
