"""Models that can be trained (docs/data-and-models.md)."""

import torch

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.log import UserError
from torchtitan_diloco.models.base import LanguageModel
from torchtitan_diloco.models.decoder import FLAVORS, Decoder

__all__ = ["MODELS", "Decoder", "LanguageModel", "build_model", "vocabulary_rows"]

MODELS: dict[str, type[LanguageModel]] = dict.fromkeys(FLAVORS, Decoder)
"""The class of each value of `model.flavor`."""


def build_model(
    config: Model, vocab_size: int, sequence_length: int, *, end_of_document: int | None = None
) -> LanguageModel:
    """Build a model on the meta device, where it takes no memory.

    `end_of_document`: the token at which attention stops with `model.document_mask`.
    """
    with torch.device("meta"):
        model = MODELS[config.flavor](config, vocab_size, sequence_length)
    if config.document_mask:
        if not model.separates_documents:
            name = f'{type(model).__name__}, the model of model.flavor = "{config.flavor}"'
            reason = f"{name}, cannot separate documents: set it to false"
            raise UserError(f"model.document_mask = true: {reason}")
        model.end_of_document = end_of_document
    return model


def vocabulary_rows(model: Model, tokenizer_vocabulary: int) -> int:
    """Return the number of rows of the embedding."""
    if model.vocab_size is None:
        return -(-tokenizer_vocabulary // 64) * 64  # a fast size for matrix products
    if model.vocab_size < tokenizer_vocabulary:
        below = f"below the tokenizer's vocabulary of {tokenizer_vocabulary}: leave it out"
        raise UserError(f"model.vocab_size = {model.vocab_size} is {below}")
    return model.vocab_size
