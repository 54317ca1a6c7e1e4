"""Cross-entropy and z-loss as sums over tokens, in chunks of tokens.

The logits of a batch are by far its largest tensor (8 x 2,048 tokens x 32,000 words x 4 bytes =
2.1 GB). Here only the logits of CHUNK_TOKENS tokens exist at a time. The gradients of a chunk are
computed in the forward pass, so that its logits are neither kept nor recomputed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan_diloco.data.batch import IGNORE_INDEX

CHUNK_TOKENS = 2048


class LossSums(NamedTuple):
    """Sums over the tokens whose target is not IGNORE_INDEX."""

    objective: Tensor
    """Cross-entropy + z-loss, on which to call backward."""
    cross_entropy: Tensor
    """Cross-entropy in nats, for reports."""
    tokens: Tensor
    """Number of these tokens."""


def loss_head(
    targets: Tensor, *, z_loss: float, chunk_tokens: int = CHUNK_TOKENS
) -> Callable[[Tensor, Tensor], LossSums]:
    """Return the `head` to call a model with, for targets [batch, length]."""

    def head(hidden: Tensor, weight: Tensor) -> LossSums:
        # A parameter requires its gradient even under `torch.no_grad()`.
        needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        objective, cross_entropy = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight, targets.flatten(), z_loss, chunk_tokens, needs_gradient
        )
        tokens = (targets != IGNORE_INDEX).sum()
        return LossSums(objective=objective, cross_entropy=cross_entropy, tokens=tokens)

    return head


class _ChunkedLoss(torch.autograd.Function):
    """The objective and the cross-entropy. The forward pass also computes the gradients of the
    objective, and the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: float,
        chunk_tokens: int,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        objective = torch.zeros((), device=hidden.device, dtype=torch.float32)
        cross_entropy = torch.zeros_like(objective)
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient else None

        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            counts = targets[part] != IGNORE_INDEX
            index = targets[part].clamp(min=0).unsqueeze(1)
            logits = (hidden[part] @ weight.t()).float()
            log_probability = torch.log_softmax(logits, dim=-1)
            log_partition = logits[:, 0] - log_probability[:, 0]
            chunk_entropy = torch.where(counts, -log_probability.gather(1, index).squeeze(1), 0.0)
            cross_entropy += chunk_entropy.sum()
            squares = torch.where(counts, log_partition, 0.0).square()
            objective += (chunk_entropy + z_loss * squares).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d objective / d logits = softmax * (1 + 2 z log_partition) - one_hot
            scale = torch.where(counts, 1 + 2 * z_loss * log_partition, 0.0).unsqueeze(1)
            grad_logits = log_probability.exp_().mul_(scale)
            grad_logits.scatter_add_(1, index, -counts.unsqueeze(1).to(grad_logits.dtype))
            grad_logits = grad_logits.to(hidden.dtype)
            torch.matmul(grad_logits, weight, out=grad_hidden[part])
            if grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden[part])
            else:
                grad_weight.add_(grad_logits.t() @ hidden[part])

        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_objective: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        of_inputs = grad_hidden * grad_objective, grad_weight * grad_objective
        return *of_inputs, None, None, None, None
