"""Muon for the matrices of a model's blocks, AdamW for its other parameters.

Muon (arXiv 2502.16982) makes the momentum of a matrix nearly orthogonal before it is applied. That
needs the whole matrix. With FSDP2 each is sent to one rank, which works on it alone and sends back
the rows of the others: the same result with any number of ranks, and no work is done twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, as in torch.optim.Muon."""
ITERATIONS = 5
EPSILON = 1e-7
ADAMW_RMS = 0.2
"""Usual root mean square of AdamW's updates: with the same one, its learning rates transfer."""


class Muon(torch.optim.Optimizer):
    """One optimizer for training, healing and checkpoints. Its first group is Muon's.

    Like fused AdamW it divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: AdamW, **settings: float) -> None:
        """`settings`: lr, momentum and weight_decay of the matrices."""
        super().__init__([{"params": list(matrices)}], dict(settings))
        self._others = others
        device = matrices[0].device
        self.grad_scale, self.found_inf = (
            torch.ones((), device=device),
            torch.zeros((), device=device),
        )
        self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        group, applied = self.param_groups[0], 1 - self.found_inf
        matrices = [one for one in group["params"] if one.grad is not None]
        updates = orthogonalise(matrices, [self._nesterov(one, group) for one in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            scale = ADAMW_RMS * max(matrix.shape) ** 0.5
            local = local_of(matrix)
            local.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            local.sub_(update * (group["lr"] * scale * applied))
        self._others.state, self._others.param_groups = self.state, self.param_groups[1:]
        self._others.grad_scale, self._others.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self._others.step()

    def _nesterov(self, matrix: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum and return the direction to orthogonalise, of this rank's rows."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state.update(initial_state(group, matrix))
        gradient, momentum = local_of(matrix.grad), local_of(state["momentum_buffer"])
        gradient = (gradient / self.grad_scale).where(self.found_inf == 0, 0.0)
        momentum.lerp_(gradient, (1 - group["momentum"]) * (1 - self.found_inf))
        update = gradient.lerp(momentum, group["momentum"])
        # bf16 is enough for the iteration; most CPUs are far slower in it.
        return update.bfloat16() if update.is_cuda else update


def initial_state(group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step, as AdamW and Muon create it."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter.detach())

    if "momentum" in group:
        return {"momentum_buffer": zeros()}
    on_device = group["fused"] or group["capturable"]
    step = torch.zeros((), device=parameter.device if on_device else "cpu")
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def local_of(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonalise(matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of the orthogonalised matrices. `rows`: those before."""
    first = matrices[0] if matrices else None
    ranks = first.device_mesh.size(-1) if isinstance(first, DTensor) else 1
    if not isinstance(first, DTensor) or ranks == 1:
        return [newton_schulz(one) for one in rows]
    group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
    owned = share_out(matrices, ranks)
    mine = [matrices[index] for index in owned[group.rank()]]

    # Rows go to the owners of their matrices in this order, and come back in it.
    order = [index for indices in owned for index in indices]
    sent = [sum(rows[index].numel() for index in indices) for indices in owned]
    sizes = [
        [len(shard_rows(len(one), rank, ranks)) * one.shape[1] for one in mine]
        for rank in range(ranks)
    ]
    received = [sum(of_rank) for of_rank in sizes]
    packed = torch.cat([rows[index].flatten() for index in order])
    arrived = packed.new_empty(sum(received))
    dist.all_to_all_single(arrived, packed, received, sent, group)

    shards = [
        part.split(of_rank) for part, of_rank in zip(arrived.split(received), sizes, strict=True)
    ]
    for number, matrix in enumerate(mine):
        whole = torch.cat([of_rank[number] for of_rank in shards]).view(matrix.shape)
        parts = newton_schulz(whole).flatten().split([of_rank[number] for of_rank in sizes])
        for of_rank, part in zip(shards, parts, strict=True):
            of_rank[number].copy_(part)
    dist.all_to_all_single(packed, arrived, sent, received, group)
    found = dict(zip(order, packed.split([rows[index].numel() for index in order]), strict=True))
    return [found[index].view(before.shape) for index, before in enumerate(rows)]


def share_out(matrices: Sequence[Tensor], ranks: int) -> list[list[int]]:
    """Return the matrices that each rank works on: about as many values for each."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(matrices)), key=lambda index: -matrices[index].numel()):
        owner = load.index(min(load))
        owned[owner].append(index)
        load[owner] += matrices[index].numel()
    return owned


def shard_rows(rows: int, rank: int, ranks: int) -> range:
    """Return the rows of a rank under FSDP2: equal runs, the last ones short or empty."""
    size = -(-rows // ranks)
    return range(min(rows, rank * size), min(rows, (rank + 1) * size))


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with equal singular values, roughly: they end near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
