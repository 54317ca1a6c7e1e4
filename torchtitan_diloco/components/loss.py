"""Cross-entropy and z-loss as sums over tokens, in chunks of tokens; the loss on held-out text.

The logits of a batch are by far its largest tensor (8 x 2,048 tokens x 32,000 words x 4 bytes =
2.1 GB). Here only the logits of CHUNK_TOKENS tokens exist at a time. The gradients of a chunk are
computed in the forward pass, so that its logits are neither kept nor recomputed.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_diloco.components.telemetry import Batch, Telemetry
from torchtitan_diloco.config.schema import WORKER_FIELD, Config
from torchtitan_diloco.data.corpus import open_corpora
from torchtitan_diloco.data.loader import IGNORE_INDEX, ValidationBatches
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.diloco.fragments import drop_gathered
from torchtitan_diloco.diloco.streaming import OuterLoop
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import logger

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
        objective, cross_entropy = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight, targets.flatten(), z_loss, chunk_tokens
        )
        return LossSums(objective, cross_entropy, (targets != IGNORE_INDEX).sum())

    return head


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        needs_gradient = hidden.requires_grad or weight.requires_grad
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
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_objective, grad_weight * grad_objective, None, None, None


# --- held-out text --------------------------------------------------------------------------------


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


class HeldOut(NamedTuple):
    """Held-out text of one corpus, kept in memory."""

    name: str
    batches: Sequence[Batch]
    text_bytes: int
    """Of this rank."""
    weight: float
    """In the mean over corpora."""


def open_held_out(
    config: Config, tokenizer: Tokenizer, world: World, *, own: bool
) -> list[HeldOut]:
    """Read the first held-out sequences of each corpus. `own`: each worker has its corpora."""
    found = []
    corpora = open_corpora(config.data, tokenizer, "validation", world.worker)
    sequences = max(1, config.validation.sequences // len(corpora))
    for name, shards in corpora.items():
        is_own = own and WORKER_FIELD in name
        batches = ValidationBatches(
            shards,
            sequence_length=config.training.sequence_length,
            batch_size=config.training.batch_size,
            rank=world.rank_in_worker if is_own else world.rank,
            ranks=world.ranks_per_worker if is_own else world.size,
            sequences=max(1, sequences // world.workers) if is_own else sequences,
        )
        read = list(batches)
        weight = config.data.weights.get(name, 1.0 if len(corpora) == 1 else 0.0)
        found.append(HeldOut(name, read, count_text_bytes(read, tokenizer), weight))
    return found


@dataclass
class Validator:
    """Validates the shared parameters."""

    model: nn.Module
    held_out: Sequence[HeldOut]
    world: World
    outer: OuterLoop
    validated: tuple[int, float, float] | None
    """Step, loss and bits per byte of the last validation."""

    def validate(self, step: int, telemetry: Telemetry) -> float:
        """Validate, report the result, and return the duration in seconds."""
        started = time.perf_counter()
        with self.outer.global_parameters():
            results = [
                validate(self.model, one.batches, self.world, one.text_bytes)
                for one in self.held_out
            ]
        total = math.fsum(one.weight for one in self.held_out)
        shares = [one.weight / total for one in self.held_out]
        pairs = list(zip(shares, results, strict=True))
        loss = math.fsum(share * result.loss for share, result in pairs)
        bits = math.fsum(share * result.bits_per_byte for share, result in pairs)
        self.validated = step, loss, bits
        record = {"loss/val": loss, "loss/bits_per_byte": bits}
        of_corpora = ""
        if len(results) > 1:
            losses = {
                one.name: result.loss for one, result in zip(self.held_out, results, strict=True)
            }
            record |= {f"loss/val/{name}": each for name, each in losses.items()}
            texts = [f"{name} {each:.4f}" for name, each in losses.items()]
            of_corpora = f" ({', '.join(texts)})"
        telemetry.write(step, record)
        tokens = sum(result.tokens for result in results)
        logger.info(
            f"validation after step {step}: loss {loss:.4f}{of_corpora}, "
            f"{bits:.4f} bits per byte over {tokens:,} held-out tokens"
        )
        return time.perf_counter() - started
