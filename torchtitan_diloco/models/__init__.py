"""Model families that can be trained.

Add a model:

1. Write the model as for a single device, in `models/FAMILY/model.py`. It knows nothing of
   parallelism. `forward(tokens, head)` returns `head(hidden, output_matrix)`. `init_weights`,
   `parameter_counts`, `flops_per_token`, `shape`, `vocab_size` and `sequence_length` are as those
   of `chinchilla.model.Decoder`.

2. Write `models/FAMILY/parallelize.py`. `parallelize` changes a model on the meta device in place,
   in a fixed order (activation checkpointing, compile, FSDP2). `materialize` gives it its weights.

3. Add a `ModelSpec` to `MODELS`, and the name of the family to `model.name` in config/schema.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.chinchilla.model import Decoder
from torchtitan_diloco.models.chinchilla.parallelize import materialize, parallelize


@dataclass(frozen=True)
class ModelSpec:
    """Functions that make a model of one family."""

    build: Callable[[Model, int, int], Decoder]
    """Build the single-device model from (config section, vocabulary size, sequence length)."""
    parallelize: Callable[..., None]
    """Apply activation checkpointing, compile and FSDP2 to a model on the meta device."""
    materialize: Callable[[Decoder, torch.device, int], None]
    """Allocate the parameters of (model, device, seed) and initialize them."""


MODELS: dict[str, ModelSpec] = {"chinchilla": ModelSpec(Decoder, parallelize, materialize)}
