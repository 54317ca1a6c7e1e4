"""Inner optimization: compute dtype, AdamW and Muon, the learning rate, and gradient clipping."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from torchtitan_diloco.config.schema import LrSchedule, Optimizer
from torchtitan_diloco.diloco.fields import steps_of
from torchtitan_diloco.diloco.fragments import local_of, shard_rows
from torchtitan_diloco.log import UserError, logger
from torchtitan_diloco.models.interface import blocks_of


def compute_dtype(choice: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products. Parameters, gradients and optimizer state stay fp32."""
    if choice == "auto":
        choice = "bfloat16" if device.type == "cuda" else "float32"
    if choice == "bfloat16" and device.type != "cuda":
        raise UserError('parallel.compute_dtype = "bfloat16" needs a GPU: use "auto" or "float32"')
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[choice]


def build_optimizer(model: nn.Module, config: Optimizer, total_steps: int) -> torch.optim.Optimizer:
    """Build AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

    Weight decay applies to matrices, not to the gains of norms.
    """
    blocks = blocks_of(model).parameters() if config.name == "muon" else ()
    in_blocks = [one for one in blocks if one.requires_grad and one.dim() == 2]
    for_muon = set(in_blocks)
    others = [one for one in model.parameters() if one.requires_grad and one not in for_muon]
    decay = 1 / total_steps if isinstance(config.weight_decay, str) else config.weight_decay
    groups = [
        {"params": [one for one in others if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in others if one.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = config.beta1, config.beta2
    optimizer: torch.optim.Optimizer
    optimizer = adamw = AdamW(groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=True)
    if in_blocks:
        lr = config.matrix_lr or config.lr
        optimizer = Muon(in_blocks, adamw, lr=lr, momentum=config.momentum, weight_decay=decay)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def lr_factor(step: float, total_steps: int, config: LrSchedule) -> float:
    """Return the share of the peak learning rate in `step`, which is 1 to `total_steps`. It is
    without state, so a resumed run has nothing to restore."""
    start = steps_of(config.warmup, total_steps)
    if step < start:
        return step / start
    if config.decay == "constant":
        return 1.0
    if config.decay == "wsd":
        start = max(start, total_steps - round(config.decay_fraction * total_steps))
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.floor + (1 - config.floor) * shape


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to this share of its peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the norm of a gradient that is sharded over `group`, on the device of the gradient."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = get_total_norm([local_of(gradient) for gradient in gradients])
    total = total.to(parameters[0].device)  # without gradients it is on the CPU
    if group is not None and group.size() > 1:
        squared = total.square()
        dist.all_reduce(squared, group=group)
        total = squared.sqrt()
    return total


def clipped_step(optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float) -> None:
    """Clip the gradient to `max_norm` (0: no limit) and step, unless `norm` is not finite.

    As with GradScaler, the kernels of the optimizer do both, so that the host does not wait for the
    norm.
    """
    optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.grad_scale = (norm / (max_norm or math.inf)).clamp(min=1)  # type: ignore[attr-defined]
    optimizer.step()


def read_later(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a small tensor to the host. The returned function waits only for the copy, not
    for kernels that are queued later."""
    if not values.is_cuda:
        return values.tolist
    host, copied = values.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        found: list[float] = host.tolist()
        return found

    return read


@dataclass
class SkippedSteps:
    """Counts consecutive steps whose gradient is not finite, and raises after too many."""

    limit: int
    in_a_row: int = 0

    def count(self, step: int, norm: float) -> bool:
        """Return whether to skip the step."""
        if math.isfinite(norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        if self.in_a_row == 1:
            logger.warning(f"step {step}: gradient norm is {norm}; skip steps until it is finite")
        if self.in_a_row > self.limit:
            raise UserError(
                f"more than training.max_skipped_steps = {self.limit} steps up to step {step} had "
                "gradients that are not finite: lower optimizer.lr, or lengthen the warm-up"
            )
        return True


# --- Muon -----------------------------------------------------------------------------------------

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, as in torch.optim.Muon."""
ITERATIONS = 5
EPSILON = 1e-7
ADAMW_RMS = 0.2
"""Typical root mean square of AdamW's updates, so that its learning rates can be used."""


class Muon(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982) for its first group, and AdamW for the others.

    Muon orthogonalises the momentum of a matrix, for which it needs the whole matrix. With FSDP2,
    one rank gathers it, orthogonalises it and sends the other ranks their rows. The result does not
    depend on the number of ranks, and no work is done twice.

    Like fused AdamW, it divides gradients by `grad_scale` and changes nothing if `found_inf` is 1.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: AdamW, **settings: float) -> None:
        """`settings`: lr, momentum and weight_decay of the matrices."""
        super().__init__([{"params": list(matrices)}], dict(settings))
        self._others = others
        self.grad_scale = torch.ones((), device=matrices[0].device)
        self.found_inf = torch.zeros_like(self.grad_scale)
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
        """Update the momentum, and return this rank's rows of the matrix to orthogonalise."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state.update(initial_state(group, matrix))
        gradient, momentum = local_of(matrix.grad), local_of(state["momentum_buffer"])
        gradient = (gradient / self.grad_scale).where(self.found_inf == 0, 0.0)
        momentum.lerp_(gradient, (1 - group["momentum"]) * (1 - self.found_inf))
        update = gradient.lerp(momentum, group["momentum"])
        # bf16 is enough for the iteration, but much slower on most CPUs.
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


def orthogonalise(matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of the orthogonalised matrices, given its rows of each matrix."""
    first = matrices[0] if matrices else None
    ranks = first.device_mesh.size(-1) if isinstance(first, DTensor) else 1
    if not isinstance(first, DTensor) or ranks == 1:
        return [newton_schulz(one) for one in rows]
    group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
    owned = assign_owners(matrices, ranks)
    mine = [matrices[index] for index in owned[group.rank()]]

    # Rows are sent to the owners of their matrices in this order, and returned in it.
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

    by_rank = zip(arrived.split(received), sizes, strict=True)
    by_matrix = zip(*(part.split(of_rank) for part, of_rank in by_rank), strict=True)
    for matrix, shards in zip(mine, by_matrix, strict=True):
        update = newton_schulz(torch.cat(shards).view(matrix.shape)).flatten()
        for shard, part in zip(shards, update.split([len(one) for one in shards]), strict=True):
            shard.copy_(part)
    dist.all_to_all_single(packed, arrived, sent, received, group)
    found = dict(zip(order, packed.split([rows[index].numel() for index in order]), strict=True))
    return [found[index].view(before.shape) for index, before in enumerate(rows)]


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
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
