"""Inner optimization: compute dtype, gradient clipping, the optimizer and its learning rate."""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from torchtitan_diloco.components.muon import Muon, local_of
from torchtitan_diloco.config.schema import LrSchedule, Optimizer
from torchtitan_diloco.utils import logger


def compute_dtype(choice: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products for `parallel.compute_dtype`. Parameters, gradients and
    optimizer state stay fp32."""
    if choice == "auto":
        choice = "bfloat16" if device.type == "cuda" else "float32"
    if choice == "bfloat16" and device.type != "cuda":
        raise ValueError(
            'parallel.compute_dtype = "bfloat16" needs a GPU, and there is none: use "auto" or '
            '"float32"'
        )
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[choice]


def build_optimizer(model: nn.Module, config: Optimizer, total_steps: int) -> torch.optim.Optimizer:
    """Build AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

    Weight decay is for matrices only, not for the gains of norms.
    """
    blocks = model.blocks.parameters() if config.name == "muon" else ()  # type: ignore[union-attr]
    in_blocks = [one for one in blocks if one.requires_grad and one.dim() == 2]
    parameters = [one for one in model.parameters() if one.requires_grad]
    others = [one for one in parameters if all(one is not matrix for matrix in in_blocks)]
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
    """Return the share of the peak learning rate in `step`, from 1 to `total_steps`. It is a pure
    function, so a resumed run has nothing to restore."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    start = config.warmup_steps
    if config.decay == "wsd":
        start = max(start, total_steps - round(config.decay_fraction * total_steps))
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.floor + (1 - config.floor) * shape


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to this share of its peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def reduce_over_workers(model: nn.Module, enabled: bool) -> None:
    """Turn the sum of gradients over workers on or off, in data parallelism.

    With gradient accumulation it waits for the last micro-batch, as links between workers are
    slow. In a worker every micro-batch is reduced at once, so that gradients stay sharded.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(enabled)


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the norm of the gradient, which is sharded over `group`, as a tensor on its device."""
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
    """Step with the gradient of this norm scaled down to `max_norm` (0: never). Change nothing if
    the norm is not finite.

    Both happen in the kernels of the optimizer, as GradScaler has them do it: the host does not
    wait for the norm, so a GPU always has work.
    """
    optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.grad_scale = (norm / (max_norm or math.inf)).clamp(min=1)  # type: ignore[attr-defined]
    optimizer.step()


def read_later(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a small tensor to the host. The returned function waits for it, but not for
    work that is queued on the GPU after this call."""
    if not values.is_cuda:
        return values.tolist
    host, copied = values.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        found: list[float] = host.tolist()
        return found

    return read


class SkippedSteps:
    """Counts the steps in a row whose gradient is not finite, and ends the run after too many."""

    def __init__(self, limit: int, in_a_row: int = 0) -> None:
        self._limit, self.in_a_row = limit, in_a_row

    def count(self, step: int, norm: float) -> bool:
        """Return whether to skip the step."""
        if math.isfinite(norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        if self.in_a_row == 1:
            logger.warning(f"step {step}: gradient norm is {norm}; skip steps until it is finite")
        if self.in_a_row > self._limit:
            raise ValueError(
                f"{self.in_a_row} steps in a row, up to step {step}, had gradients that are not "
                f"finite, more than training.max_skipped_steps = {self._limit}: lower "
                "optimizer.lr, lengthen lr_schedule.warmup_steps, or look at the data; the last "
                "checkpoint has only finite values"
            )
        return True
