"""The loss on held-out text: of each corpus, and their mean by the weights of the mixture."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.run_plan import AfterStep
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.config.schema import WORKER_FIELD, Config
from torchtitan_diloco.data.batch import Batch
from torchtitan_diloco.data.corpus import open_split, own_name
from torchtitan_diloco.data.loader import ValidationBatches
from torchtitan_diloco.data.shards import TooLittleText
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.diloco.data_parallel import OuterLoop
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.distributed.world import World

# --- the text -------------------------------------------------------------------------------------


class HeldOut(NamedTuple):
    """The first held-out sequences of one corpus."""

    name: str
    """Name of the corpus, as in the settings."""
    batches: Iterable[Batch]
    sequences: int
    text_bytes: int
    """Bytes of the text of this rank's targets."""
    weight: float
    """Weight of the corpus in the mean over corpora."""

    def in_memory(self) -> "HeldOut":
        return self._replace(batches=list(self.batches))


def open_held_out(
    config: Config, tokenizer: Tokenizer, world: World, *, each_worker_has_its_own: bool
) -> list[HeldOut]:
    """Open the held-out text of each corpus, with equal parts of `validation.sequences`.

    `each_worker_has_its_own`: the ranks of a worker divide the corpora that have its number in
    their names; otherwise all ranks divide all of them.
    """
    worker = config.worker_name(world.worker)
    data = config.data
    names = data.held_out_corpora
    sequences = max(1, config.validation.sequences // len(names))
    held_out = []
    for name in names:
        is_divided_in_worker = each_worker_has_its_own and WORKER_FIELD in name
        weight = 1.0 if len(names) == 1 else data.weights.get(name, 0.0)
        try:
            batches = ValidationBatches(
                open_split(data, tokenizer, "validation", name=name, worker=worker),
                sequence_length=config.training.sequence_length,
                batch_size=config.training.batch_size,
                rank=world.rank_in_worker if is_divided_in_worker else world.rank,
                ranks=world.ranks_per_worker if is_divided_in_worker else world.size,
                sequences=max(1, sequences // world.workers) if is_divided_in_worker else sequences,
            )
        except TooLittleText as error:
            if weight or is_divided_in_worker:  # all workers validate the same corpora
                raise
            if world.is_first:
                logger.warning(f"{name} is only read in a phase, and is not validated: {error}")
            continue
        held_out.append(
            HeldOut(
                name=own_name(name, worker),
                batches=batches,
                sequences=batches.sequences,
                text_bytes=count_text_bytes(batches, tokenizer),
                weight=weight,
            )
        )
    return held_out


def count_text_bytes(batches: Iterable[Batch], tokenizer: Tokenizer) -> int:
    """Return the bytes of the text of all targets."""
    rows = (row[row >= 0].tolist() for _, targets in batches for row in targets)  # not padding
    return sum(map(tokenizer.text_bytes, rows))


# --- the loss -------------------------------------------------------------------------------------


class CorpusLoss(NamedTuple):
    """The loss on the held-out text of one corpus."""

    loss: float
    """Mean cross-entropy in nats per token."""
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Loss by which models with other tokenizers compare."""
        return self.loss * self.tokens / (math.log(2) * max(1, self.text_bytes))


class ValidationResult(NamedTuple):
    """The loss on all held-out text: the mean of the corpora by their weights."""

    loss: float
    bits_per_byte: float
    tokens: int
    of_corpora: dict[str, float]
    """Losses by the names of the corpora."""


def validate(model: nn.Module, held_out: Sequence[HeldOut], world: World) -> ValidationResult:
    """Return the loss of the model. Every rank must have the same number of batches."""
    results = [
        validate_corpus(model, corpus.batches, world, text_bytes=corpus.text_bytes)
        for corpus in held_out
    ]
    total = math.fsum(corpus.weight for corpus in held_out)
    shares = [corpus.weight / total for corpus in held_out]
    weighted = list(zip(shares, results, strict=True))
    names = [corpus.name for corpus in held_out]
    return ValidationResult(
        loss=math.fsum(share * result.loss for share, result in weighted),
        bits_per_byte=math.fsum(share * result.bits_per_byte for share, result in weighted),
        tokens=sum(result.tokens for result in results),
        of_corpora={name: result.loss for name, result in zip(names, results, strict=True)},
    )


@torch.no_grad()
def validate_corpus(
    model: nn.Module, batches: Iterable[Batch], world: World, text_bytes: int
) -> CorpusLoss:
    """Return the loss of the model on some batches. `text_bytes`: bytes of this rank's targets."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in batches:
        head = loss_head(targets.to(world.device), z_loss=0.0)
        sums = model(inputs.to(world.device), head=head)
        totals += torch.stack([sums.cross_entropy.double(), sums.tokens.double()]).cpu()
    model.train(was_training)
    drop_gathered(model)
    of_all_ranks = PendingSum(world, [*totals.tolist(), float(text_bytes)], "in a validation")
    cross_entropy, tokens, text_bytes_of_all = of_all_ranks.result()
    return CorpusLoss(
        loss=cross_entropy / tokens, tokens=int(tokens), text_bytes=int(text_bytes_of_all)
    )


# --- while a run trains ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedValidation:
    """What a resumed run knows of the last validation."""

    validated: tuple[int, float, float] | None
    """As in `Validator`."""


@dataclass
class Validator:
    """Validates the shared parameters."""

    every: int
    """Steps between two validations, 0 for none."""
    model: nn.Module
    held_out: Sequence[HeldOut]
    world: World
    outer: OuterLoop
    validated: tuple[int, float, float] | None = None
    """Step, loss and bits per byte of the last validation."""

    def saved_state(self) -> SavedValidation:
        return SavedValidation(self.validated)

    def load_state(self, saved: SavedValidation, /) -> None:
        self.validated = saved.validated

    def is_due(self, after: AfterStep) -> bool:
        """Return whether to validate. Whoever asked to stop is waiting."""
        if after.finished:
            return self.every > 0
        return after.is_multiple_of(self.every) and not after.asked_to_stop

    def validate(self, step: int, telemetry: Telemetry) -> float:
        """Validate, report the result, and return the duration in seconds."""
        started = time.perf_counter()
        with self.outer.global_parameters():
            result = validate(self.model, self.held_out, self.world)
        self.validated = step, result.loss, result.bits_per_byte
        record = {"loss/val": result.loss, "loss/bits_per_byte": result.bits_per_byte}
        of_corpora = ""
        if len(result.of_corpora) > 1:
            record |= {f"loss/val/{name}": loss for name, loss in result.of_corpora.items()}
            texts = [f"{name} {loss:.4f}" for name, loss in result.of_corpora.items()]
            of_corpora = f" ({', '.join(texts)})"
        telemetry.write(step, record)
        logger.info(
            f"validation after step {step}: loss {result.loss:.4f}{of_corpora}, "
            f"{result.bits_per_byte:.4f} bits per byte over {result.tokens:,} held-out tokens"
        )
        return time.perf_counter() - started
