"""Model families that can be trained (docs/models.md)."""

import torch

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.base import LanguageModel
from torchtitan_diloco.models.chinchilla.model import Decoder

__all__ = ["MODELS", "LanguageModel", "build_model"]

MODELS: dict[str, type[LanguageModel]] = {"chinchilla": Decoder}
"""Families by the value of `model.name`."""


def build_model(config: Model, vocab_size: int, sequence_length: int) -> LanguageModel:
    """Build a model on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return MODELS[config.name](config, vocab_size, sequence_length)
