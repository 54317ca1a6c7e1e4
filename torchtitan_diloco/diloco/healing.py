"""Fragments whose parameters or inner optimizer state are not finite."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.fragments import Fragment, local_rows


def is_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values and the sums of their squares are finite, as a tensor."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()


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
                    tensors.append(local_rows(part.name, value))
        finite.append(is_finite(tensors))
    broken = (~torch.stack(finite)).to(torch.int32)
    if group is not None and group.size() > 1:
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=group)
    return broken.nonzero().flatten().tolist()
