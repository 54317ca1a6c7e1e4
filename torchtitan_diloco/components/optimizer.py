"""Inner optimization: AdamW, Muon and those that others add, and gradient clipping."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.settings import options_of, steps_of
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.group_entries import copy_entries, restore_entries
from torchtitan_diloco.components.muon import Muon
from torchtitan_diloco.config.parts import OPTIMIZERS, SCHEDULES
from torchtitan_diloco.config.schema import LrSchedule, Optimizer
from torchtitan_diloco.models.interface import blocks_of


def build_optimizer(model: nn.Module, config: Optimizer, total_steps: int) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name."""
    entry = OPTIMIZERS[config.name]
    options = options_of(entry, config.options)
    optimizer: torch.optim.Optimizer = entry.load()(model, config, total_steps, **options)
    known = set(_parameters(optimizer))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            reason = f"it would not train {name}: give it all parameters of the model"
            raise UserError(f'optimizer.name = "{config.name}": {reason}')
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def build_adamw(model: nn.Module, config: Optimizer, total_steps: int) -> AdamW:
    return _adamw_of(model.parameters(), config, total_steps)


def build_muon(model: nn.Module, config: Optimizer, total_steps: int) -> torch.optim.Optimizer:
    """Build Muon for the matrices of the blocks, and AdamW for the rest."""
    in_blocks = blocks_of(model).parameters()
    matrices = [matrix for matrix in in_blocks if matrix.requires_grad and matrix.dim() == 2]
    with_muon = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in with_muon]
    adamw = _adamw_of(others, config, total_steps)
    if not matrices:
        return adamw
    return Muon(
        matrices,
        adamw,
        lr=config.matrix_lr or config.lr,
        momentum=config.momentum,
        weight_decay=weight_decay(config, total_steps),
    )


def _adamw_of(parameters: Iterable[nn.Parameter], config: Optimizer, total_steps: int) -> AdamW:
    optimizer = AdamW(
        decay_groups(parameters, weight_decay(config, total_steps)),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    # Its kernels divide by one, and do nothing if the other is 1: see `clipped_step`.
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = None  # type: ignore[attr-defined]
    return optimizer


def decay_groups(parameters: Iterable[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, without frozen parameters: weight decay applies to
    matrices, not to the gains of norms."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    gains = [parameter for parameter in trained if parameter.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": gains, "weight_decay": 0.0},
    ]


def weight_decay(config: Optimizer, total_steps: int) -> float:
    """Return the weight decay of matrices, in a run of so many steps."""
    return 1 / total_steps if isinstance(config.weight_decay, str) else config.weight_decay


def describe_inner(
    config: Optimizer, schedule: LrSchedule, total_steps: int, schedule_steps: int
) -> str:
    """Describe the inner optimizer and its learning rate, with the settings that they read.

    `schedule_steps`: length of the schedule, which may not be that of the run (`RunPlan`).
    """
    entry = OPTIMIZERS[config.name]
    numbers = {name: getattr(config, name) for name in entry.reads}
    chosen = {name: value for name, value in numbers.items() if value is not None}
    chosen |= {"weight decay": weight_decay(config, total_steps)}
    chosen |= options_of(entry, config.options)
    words = [f"{config.name} lr {config.lr:g}"]
    for name, value in chosen.items():
        words.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    warmup = counted(steps_of(schedule.warmup, schedule_steps), "step")
    shape = schedule.decay
    if "floor" in SCHEDULES[schedule.decay].reads:
        shape += f" to {100 * schedule.floor:g} % of the peak"
    return f"{' '.join(words)}; warm-up of {warmup}, then {shape}"


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

    As with GradScaler, the kernels of an optimizer that has `grad_scale` and `found_inf` do both,
    so that the host does not wait for the norm. For another optimizer it does.
    """
    # Gradients are divided by the scale: by norm / max_norm if the norm is above, else by 1.
    scale = (norm / (max_norm or math.inf)).clamp(min=1)
    if _clips(optimizer):
        optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
        optimizer.step()
    elif norm.isfinite():
        for gradient in _gradients(optimizer):
            local_of(gradient).div_(scale)
        optimizer.step()
        _check_state(optimizer)


def _clips(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "grad_scale") and hasattr(optimizer, "found_inf")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    gradients = (parameter.grad for parameter in _parameters(optimizer))
    return [gradient for gradient in gradients if gradient is not None]


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless a checkpoint can hold the state of an optimizer."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                problem = f"is of {type(value).__name__}, and not a tensor"
            elif isinstance(parameter, DTensor) and value.dim() and not isinstance(value, DTensor):
                problem = "is not sharded like its parameter, which is a DTensor"
            else:
                continue
            raise UserError(
                f"optimizer.name: the state {name} of {type(optimizer).__name__} {problem}, so it "
                "cannot be saved: create it with torch.zeros_like(parameter) or torch.zeros(())"
            )


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


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of parameters that have none, as the optimizer does it, to be filled.

    Only an optimizer knows its state, so it takes a step without gradients. The parameters and all
    of the state that is kept are to be loaded after it. Its groups stay as they are.
    """
    lacking = [parameter for parameter in _parameters(optimizer) if not optimizer.state[parameter]]
    if not lacking:
        return
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    entries = copy_entries(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if _clips(optimizer):
        optimizer.grad_scale = torch.ones((), device=lacking[0].device)  # type: ignore[attr-defined]
        optimizer.found_inf = optimizer.grad_scale  # type: ignore[attr-defined]
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    restore_entries(optimizer, entries)
    optimizer.zero_grad()
