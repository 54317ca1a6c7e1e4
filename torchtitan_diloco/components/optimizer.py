"""The inner optimizer."""

from torch import nn
from torch.optim import AdamW

from torchtitan_diloco.config.schema import Optimizer


def build_optimizer(model: nn.Module, config: Optimizer, total_steps: int) -> AdamW:
    """AdamW that decays matrices only: norms are few, and pulling them to zero serves nothing."""
    matrices = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() > 1
    ]
    others = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() <= 1
    ]
    decay = 1 / total_steps if isinstance(config.weight_decay, str) else config.weight_decay
    return AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def set_lr(optimizer: AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
