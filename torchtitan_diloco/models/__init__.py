"""Model families the trainer can build. A family is a plain record of builders; another one is one more record."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.chinchilla.model import Decoder
from torchtitan_diloco.models.chinchilla.parallelize import materialize, parallelize


@dataclass(frozen=True)
class ModelSpec:
    build: Callable[[Model, int, int], Decoder]
    """(config section, vocabulary size, sequence length) -> single-device model."""
    parallelize: Callable[..., None]
    """Applies checkpointing, compile and FSDP2 to a model on the meta device."""
    materialize: Callable[[Decoder, torch.device, int], None]
    """(model, device, seed): allocates the parameters and gives them their initial values."""


MODELS: dict[str, ModelSpec] = {"chinchilla": ModelSpec(Decoder, parallelize, materialize)}
