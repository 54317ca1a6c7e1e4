"""Loss on held-out text: sum over tokens / number of tokens, over all ranks."""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.metrics import MetricsWriter, Record
from torchtitan_diloco.config.schema import Validation
from torchtitan_diloco.diloco.fragments import drop_gathered
from torchtitan_diloco.distributed.reductions import sum_over_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import logger


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
    drop_gathered(model)
    cross_entropy, tokens = sum_over_ranks(world, totals.tolist(), "in a validation")
    return ValidationResult(cross_entropy / tokens, int(tokens))


class SharedModel(Protocol):
    def global_parameters(self) -> AbstractContextManager[None]: ...


class Validator:
    """Validates the shared parameters, which are what a run is judged by; the workers' own only on request."""

    def __init__(
        self,
        config: Validation,
        model: nn.Module,
        outer: SharedModel,
        batches: Sequence[tuple[Tensor, Tensor]],
        world: World,
        *,
        chunk_tokens: int,
        precision: AbstractContextManager[object],
        last_step: int,
        validated: tuple[int, float] | None = None,
    ) -> None:
        """`validated`: what a run that goes on has behind it."""
        self._config, self._model, self._outer, self._batches, self._world = (
            config,
            model,
            outer,
            batches,
            world,
        )
        self._chunk_tokens, self._precision, self._last_step = chunk_tokens, precision, last_step
        self.validated = validated
        """The step of the last validation and its loss."""

    def due(self, step: int) -> bool:
        return bool(self._config.every) and (
            step % self._config.every == 0 or step == self._last_step
        )

    def missed(self, step: int) -> bool:
        """A signal came between the step and its validation."""
        return self.due(step) and (self.validated or (0,))[0] < step

    def validate(self, step: int, metrics: MetricsWriter) -> float:
        """Returns the seconds it took."""
        started = time.perf_counter()
        with self._outer.global_parameters():
            shared = self._result()
        self.validated = step, shared.loss
        record: Record = {
            "validation/loss_nats_per_token_global": shared.loss,
            "validation/perplexity_global": shared.perplexity,
            "validation/tokens_global": shared.tokens,
        }
        local = ""
        if self._config.local:
            own = self._result()
            record["validation/local_loss_nats_per_token_mean_over_workers"] = own.loss
            local = f" (the workers' own parameters: {own.loss:.4f})"
        metrics.write(step, record)
        metrics.draw(step)
        logger.info(
            f"validation after step {step}: loss {shared.loss:.4f}{local}, perplexity {shared.perplexity:,.2f} "
            f"over {shared.tokens:,} held-out tokens"
        )
        return time.perf_counter() - started

    def _result(self) -> ValidationResult:
        return validate(
            self._model,
            self._batches,
            self._world,
            chunk_tokens=self._chunk_tokens,
            precision=self._precision,
        )
