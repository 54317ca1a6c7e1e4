"""Loss on held-out text: sum over tokens / number of tokens, over all ranks."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.distributed.reductions import sum_over_ranks
from torchtitan_diloco.distributed.world import World


class ValidationResult(NamedTuple):
    loss: float
    """Mean cross-entropy in nats per token."""
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def validate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
    *,
    chunk_tokens: int,
    precision: AbstractContextManager[object],
) -> ValidationResult:
    """Every rank must have the same number of batches: with FSDP2 a forward pass is a collective."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in batches:
        inputs, targets = inputs.to(world.device), targets.to(world.device)
        with precision:
            sums = model(inputs, head=loss_head(targets, z_loss=0.0, chunk_tokens=chunk_tokens))
        totals += torch.stack([sums.cross_entropy.double(), sums.tokens.double()]).cpu()
    model.train(was_training)
    if isinstance(model, FSDPModule):
        model.reshard()  # a forward pass without a backward pass leaves the root's full parameters behind
    cross_entropy, tokens = sum_over_ranks(world, totals.tolist(), "in a validation")
    return ValidationResult(cross_entropy / tokens, int(tokens))
