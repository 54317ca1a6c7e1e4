"""Inner optimization: AdamW and Muon, the learning rate, and gradient clipping."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from torchtitan_diloco.base.settings import steps_of
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.components.muon import Muon, initial_momentum
from torchtitan_diloco.config.schema import LrSchedule, Optimizer
from torchtitan_diloco.models.interface import blocks_of


def build_optimizer(model: nn.Module, config: Optimizer, total_steps: int) -> torch.optim.Optimizer:
    """Build AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

    Weight decay applies to matrices, not to the gains of norms.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_blocks = blocks_of(model).parameters() if config.name == "muon" else ()
    for_muon = [matrix for matrix in in_blocks if matrix.requires_grad and matrix.dim() == 2]
    with_muon = set(for_muon)
    others = [parameter for parameter in trained if parameter not in with_muon]
    decay = 1 / total_steps if isinstance(config.weight_decay, str) else config.weight_decay
    matrices = [parameter for parameter in others if parameter.dim() > 1]
    gains = [parameter for parameter in others if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer: torch.optim.Optimizer
    optimizer = adamw = AdamW(groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=True)
    if for_muon:
        lr = config.matrix_lr or config.lr
        optimizer = Muon(for_muon, adamw, lr=lr, momentum=config.momentum, weight_decay=decay)
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
    # Gradients are divided by grad_scale: by norm / max_norm if the norm is above, else by 1.
    optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.grad_scale = (norm / (max_norm or math.inf)).clamp(min=1)  # type: ignore[attr-defined]
    optimizer.step()


def read_later(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a small tensor to the host. The returned function waits only for the copy, not
    for kernels that are queued later."""
    if not values.is_cuda:
        return values.tolist
    host = values.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        numbers: list[float] = host.tolist()
        return numbers

    return read


def initial_state(group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step, as AdamW and Muon create it."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter.detach())

    if "momentum" in group:
        return initial_momentum(parameter)
    on_device = group["fused"] or group["capturable"]
    step = torch.zeros((), device=parameter.device if on_device else "cpu")
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}
