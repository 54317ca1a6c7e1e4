"""Muon (arXiv 2502.16982), with each matrix orthogonalized by one of the ranks that share it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from torchtitan_diloco.base.tensors import local_of, shard_rows

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, as in torch.optim.Muon."""
ITERATIONS = 5
EPSILON = 1e-7
ADAMW_RMS = 0.2
"""Typical root mean square of AdamW's updates, so that its learning rates can be used."""


class Muon(torch.optim.Optimizer):
    """Muon for its first group, and AdamW for the others.

    Muon orthogonalizes the momentum of a matrix, for which it needs the whole matrix. With FSDP2,
    one rank gathers it, orthogonalizes it and sends the other ranks their rows. The result does not
    depend on the number of ranks, and no work is done twice.

    Like fused AdamW, it divides gradients by `grad_scale` and changes nothing if `found_inf` is 1.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: AdamW, **settings: float) -> None:
        """Build the optimizer. `settings`: lr, momentum and weight_decay of the matrices."""
        super().__init__([{"params": list(matrices)}], dict(settings))
        self._others = others
        self.grad_scale = torch.ones((), device=matrices[0].device)
        self.found_inf = torch.zeros_like(self.grad_scale)
        self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        group = self.param_groups[0]
        applied = 1 - self.found_inf
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        updates = orthogonalize(matrices, [self._nesterov(matrix, group) for matrix in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            scale = ADAMW_RMS * max(matrix.shape) ** 0.5
            local = local_of(matrix)
            local.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            local.sub_(update * (group["lr"] * scale * applied))
        self._step_others()

    def _step_others(self) -> None:
        """Let AdamW update the other groups, with the state that this optimizer saves and loads."""
        others = self._others
        others.state = self.state
        others.param_groups = self.param_groups[1:]
        others.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        others.found_inf = self.found_inf  # type: ignore[attr-defined]
        others.step()

    def _nesterov(self, matrix: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum, and return this rank's rows of the matrix to orthogonalize."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.detach())
        momentum = local_of(state["momentum_buffer"])
        gradient = local_of(matrix.grad) / self.grad_scale
        gradient = gradient.where(self.found_inf == 0, 0.0)
        momentum.lerp_(gradient, (1 - group["momentum"]) * (1 - self.found_inf))
        update = gradient.lerp(momentum, group["momentum"])
        # bf16 is enough for the iteration, but much slower on most CPUs.
        return update.bfloat16() if update.is_cuda else update


def orthogonalize(matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of the orthogonalized matrices, given its rows of each matrix.

    Every matrix has an owner among the ranks. In one all-to-all, each rank sends its rows of each
    matrix to the owner, who then has the whole matrix and orthogonalizes it. A second all-to-all,
    the first one backwards, returns the rows. A rank packs what it sends by destination.
    """
    first = matrices[0] if matrices else None
    ranks = first.device_mesh.size(-1) if isinstance(first, DTensor) else 1
    if not isinstance(first, DTensor) or ranks == 1:
        return [newton_schulz(whole) for whole in rows]
    group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
    owned = assign_owners(matrices, ranks)
    own_matrices = [matrices[index] for index in owned[group.rank()]]

    # To each owner: this rank's rows of its matrices, one matrix after the other.
    order = [index for indices in owned for index in indices]
    sent = [sum(rows[index].numel() for index in indices) for indices in owned]
    packed = torch.cat([rows[index].flatten() for index in order])
    # From each rank: its rows of the matrices that this rank owns, also one after the other.
    sizes = [
        [len(shard_rows(len(matrix), rank, ranks)) * matrix.shape[1] for matrix in own_matrices]
        for rank in range(ranks)
    ]
    received = [sum(sizes_of_rank) for sizes_of_rank in sizes]
    arrived = packed.new_empty(sum(received))
    dist.all_to_all_single(
        arrived, packed, output_split_sizes=received, input_split_sizes=sent, group=group
    )

    # The shards are views of `arrived`: the result is written to where the rows have come from.
    from_ranks = zip(arrived.split(received), sizes, strict=True)
    shards_of_ranks = [part.split(sizes_of_rank) for part, sizes_of_rank in from_ranks]
    for matrix, shards in zip(own_matrices, zip(*shards_of_ranks, strict=True), strict=True):
        whole = torch.cat(shards).view(matrix.shape)
        update = newton_schulz(whole).flatten()
        parts = update.split([len(shard) for shard in shards])
        for shard, part in zip(shards, parts, strict=True):
            shard.copy_(part)
    dist.all_to_all_single(
        packed, arrived, output_split_sizes=sent, input_split_sizes=received, group=group
    )

    returned = packed.split([rows[index].numel() for index in order])
    updates = dict(zip(order, returned, strict=True))
    return [updates[index].view(before.shape) for index, before in enumerate(rows)]


def assign_owners(matrices: Sequence[Tensor], ranks: int) -> list[list[int]]:
    """Return the matrices of each rank, balanced by their number of values."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(matrices)), key=lambda index: -matrices[index].numel()):
        owner = load.index(min(load))
        owned[owner].append(index)
        load[owner] += matrices[index].numel()
    return owned


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return roughly the nearest orthogonal matrix, with all singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        # X becomes a X + (b A + c A A) X with A = X X^T: a polynomial of its singular values.
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.T if is_tall else wide
