"""The loss on held-out text: of each corpus, and their mean by the weights of the mixture that is
read."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.metrics import CORPUS_BITS, CORPUS_LOSS
from torchtitan_diloco.components.run_plan import AfterStep
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.config.schema import WORKER_FIELD, Config, Data
from torchtitan_diloco.config.weights import Weights
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
    """Held-out sequences of one corpus."""

    name: str
    """Name of the corpus in the settings, by which it has its weight."""
    shown_name: str
    """Name of the corpus of this worker."""
    batches: Iterable[Batch]
    sequences: int
    text_bytes: int
    """Bytes of the text of this rank's targets."""

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
    too_short = dict[str, TooLittleText]()
    for name in names:
        is_divided_in_worker = each_worker_has_its_own and WORKER_FIELD in name
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
            if is_divided_in_worker:  # all workers validate the same corpora
                raise
            too_short[name] = error
            continue
        held_out.append(
            HeldOut(
                name=name,
                shown_name=own_name(name, worker),
                batches=batches,
                sequences=batches.sequences,
                text_bytes=count_text_bytes(batches, tokenizer),
            )
        )
    _check_text(data, too_short)
    if world.is_first:
        for name, reason in too_short.items():
            logger.warning(f"{name} is only read in a phase, and is not validated: {reason}")
    return held_out


def _check_text(data: Data, too_short: Mapping[str, TooLittleText]) -> None:
    """Raise if the run begins with a corpus whose held-out text is too short, or if a phase has no
    other corpus."""
    for name, error in too_short.items():
        if name == data.validation_corpus or data.weights.get(name):
            raise error
    for mixture in data.mixtures:
        names = [name for name, weight in mixture.items() if weight]
        if all(name in too_short for name in names):
            raise too_short[names[0]]


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
    of_corpora: dict[str, CorpusLoss]
    """By the names of the corpora."""
    shares: dict[str, float]
    """Shares of the corpora in the mean, by the same names."""


def validate(
    model: nn.Module, held_out: Sequence[HeldOut], world: World, weights: Weights
) -> ValidationResult:
    """Return the loss of the model. Every rank must have the same number of batches.

    `weights`: of the corpora in the mean, by their names in the settings.
    """
    of_corpora = {
        corpus.shown_name: validate_corpus(
            model, corpus.batches, world, text_bytes=corpus.text_bytes
        )
        for corpus in held_out
    }
    shares = shares_in_mean(held_out, weights)
    return ValidationResult(
        loss=math.fsum(share * of_corpora[name].loss for name, share in shares.items()),
        bits_per_byte=math.fsum(
            share * of_corpora[name].bits_per_byte for name, share in shares.items()
        ),
        tokens=sum(corpus.tokens for corpus in of_corpora.values()),
        of_corpora=of_corpora,
        shares=shares,
    )


def shares_in_mean(held_out: Sequence[HeldOut], weights: Weights) -> dict[str, float]:
    """Return the share of each corpus in the mean. A single one is all of it, as it may be only for
    validation, without a weight."""
    if len(held_out) == 1:
        return {held_out[0].shown_name: 1.0}
    chosen = {corpus.shown_name: weights.get(corpus.name, 0.0) for corpus in held_out}
    total = math.fsum(chosen.values())
    return {name: weight / total for name, weight in chosen.items()}


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
        """Return whether to validate."""
        return after.is_measured(self.every)

    def validate(self, step: int, telemetry: Telemetry, weights: Weights) -> float:
        """Validate, report the result, and return the duration in seconds.

        `weights`: of the corpora in the mean, by their names in the settings.
        """
        started = time.perf_counter()
        with self.outer.global_parameters():
            result = validate(self.model, self.held_out, self.world, weights)
        self.validated = step, result.loss, result.bits_per_byte
        record = {"loss/val": result.loss, "loss/bits_per_byte": result.bits_per_byte}
        lines = [
            f"validation after step {step}: loss {result.loss:.4f}, "
            f"{result.bits_per_byte:.4f} bits per byte over {result.tokens:,} held-out tokens"
        ]
        if len(result.of_corpora) > 1:
            for name, corpus in result.of_corpora.items():
                bits = corpus.bits_per_byte
                record |= {f"{CORPUS_LOSS}{name}": corpus.loss, f"{CORPUS_BITS}{name}": bits}
                share = 100 * result.shares[name]
                lines.append(
                    f"  {share:.4g} % {name}: loss {corpus.loss:.4f}, {bits:.4f} bits per byte"
                )
        telemetry.write(step, record)
        for line in lines:
            logger.info(line)
        return time.perf_counter() - started


def build_validator(
    config: Config, tokenizer: Tokenizer, model: nn.Module, outer: OuterLoop, world: World
) -> Validator:
    """Build the validator, and keep its few sequences in memory."""
    held_out = []
    if config.validation.every:
        is_own = config.data.shard_by == "own"
        opened = open_held_out(config, tokenizer, world, each_worker_has_its_own=is_own)
        held_out = [corpus.in_memory() for corpus in opened]
    return Validator(
        every=config.validation.every, model=model, held_out=held_out, world=world, outer=outer
    )
