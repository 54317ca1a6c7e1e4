"""A run's model and length in the numbers that the planner works with. Needs torch: the model is built without memory."""

from dataclasses import dataclass
from functools import cache

import torch

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco.config import Fragments
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.models import MODELS
from torchtitan_diloco.models.chinchilla.model import Decoder


@dataclass(frozen=True)
class Workload:
    model: Model
    vocabulary: int
    sequence_length: int
    tokens_per_step: int
    """Of all workers together."""
    total_steps: int
    workers: int
    ranks: int
    """Of one worker: the accelerators, or processes, over which FSDP2 shards it."""

    @property
    def parameters(self) -> int:
        return model_facts(self.model, self.vocabulary, self.sequence_length).parameters

    @property
    def flops_per_step(self) -> float:
        """Of one worker."""
        facts = model_facts(self.model, self.vocabulary, self.sequence_length)
        return facts.flops_per_token * self.tokens_per_step / self.workers

    def fragments(self, config: Fragments) -> tuple[int, ...]:
        """Parameters of each fragment, in the order of their turns."""
        return fragment_sizes(self.model, self.vocabulary, self.sequence_length, config)

    def gradient_buckets(self) -> tuple[int, ...]:
        """Parameters whose gradients data parallelism sends together: the blocks from the last to the first, then the rest."""
        one_block_each = fragment_sizes(
            self.model,
            self.vocabulary,
            self.sequence_length,
            Fragments(pattern="sequential", layers_per_fragment=1),
        )
        return (*reversed(one_block_each[:-1]), one_block_each[-1])


@dataclass(frozen=True)
class ModelFacts:
    parameters: int
    embedding_parameters: int
    layers: int
    flops_per_token: int


@cache
def model_facts(model: Model, vocabulary: int, sequence_length: int) -> ModelFacts:
    built = _build(model, vocabulary, sequence_length)
    counts = built.parameter_counts()
    return ModelFacts(
        counts["total"],
        counts["embedding"],
        built.shape.layers,
        built.flops_per_token(sequence_length),
    )


@cache
def fragment_sizes(
    model: Model, vocabulary: int, sequence_length: int, config: Fragments
) -> tuple[int, ...]:
    fragments = build_fragments(_build(model, vocabulary, sequence_length), config)
    return tuple(fragment.parameters for fragment in fragments)


def _build(model: Model, vocabulary: int, sequence_length: int) -> Decoder:
    with torch.device("meta"):
        return MODELS[model.name].build(model, vocabulary, sequence_length)
