"""Loss on held-out text: the mean over the tokens of all ranks."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.telemetry import Batch, Telemetry
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.diloco.fragments import drop_gathered
from torchtitan_diloco.diloco.streaming import OuterLoop
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import logger


class ValidationResult(NamedTuple):
    loss: float
    """Mean cross-entropy in nats per token."""
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Loss by which models with other tokenizers compare."""
        return self.loss * self.tokens / (math.log(2) * max(1, self.text_bytes))

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[Batch], world: World, text_bytes: int
) -> ValidationResult:
    """Return the loss of the model. Every rank must have the same number of batches.

    `text_bytes`: of the targets of this rank.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in batches:
        inputs, targets = inputs.to(world.device), targets.to(world.device)
        sums = model(inputs, head=loss_head(targets, z_loss=0.0))
        totals += torch.stack([sums.cross_entropy.double(), sums.tokens.double()]).cpu()
    model.train(was_training)
    drop_gathered(model)
    sums = PendingSum(world, [*totals.tolist(), float(text_bytes)], "in a validation")
    cross_entropy, tokens, text = sums.result()
    return ValidationResult(cross_entropy / tokens, int(tokens), int(text))


def count_text_bytes(batches: Iterable[Batch], tokenizer: Tokenizer) -> int:
    """Return the bytes of the text of all targets."""
    rows = (row[row >= 0].tolist() for _, targets in batches for row in targets)  # not padding
    return sum(map(tokenizer.text_bytes, rows))


@dataclass
class Validator:
    """Validates the shared parameters."""

    model: nn.Module
    batches: Iterable[Batch]
    world: World
    outer: OuterLoop
    validated: tuple[int, float, float] | None
    """Step, loss and bits per byte of the last validation."""
    text_bytes: int

    def validate(self, step: int, telemetry: Telemetry) -> float:
        """Validate, report the result, and return the duration in seconds."""
        started = time.perf_counter()
        with self.outer.global_parameters():
            result = validate(self.model, self.batches, self.world, self.text_bytes)
        self.validated = step, result.loss, result.bits_per_byte
        telemetry.write(step, {"loss/val": result.loss, "loss/bits_per_byte": result.bits_per_byte})
        logger.info(
            f"validation after step {step}: loss {result.loss:.4f}, "
            f"{result.bits_per_byte:.4f} bits per byte over {result.tokens:,} held-out tokens"
        )
        return time.perf_counter() - started
