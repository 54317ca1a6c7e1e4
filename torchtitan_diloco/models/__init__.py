"""Models that can be trained (docs/data-and-models.md)."""

from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import nn

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.decoder import SHAPES, build_decoder
from torchtitan_diloco.models.interface import check_model, separate_documents

__all__ = ["FLAVORS", "Builder", "build_model", "vocabulary_rows"]

Builder = Callable[[Model, int, int], nn.Module]
"""Builds a model from [model], the rows of the embedding and the length of a sequence."""
FLAVORS: dict[str, Builder] = dict.fromkeys(SHAPES, build_decoder)
"""Builder of each value of `model.flavor`. `FLAVORS["mine"] = Mine` adds a class of your own."""


def build_model(
    config: Model, vocab_size: int, sequence_length: int, *, end_of_document: int | None = None
) -> nn.Module:
    """Build a model on the meta device, where it takes no memory.

    `end_of_document`: the token at which attention stops with `model.document_mask`.
    """
    if config.flavor not in FLAVORS:
        similar = get_close_matches(config.flavor, FLAVORS, n=1)
        hint = "".join(f"; did you mean {name}?" for name in similar)
        raise UserError(
            f'model.flavor = "{config.flavor}": there is no such flavor; there are '
            f"{', '.join(FLAVORS)}{hint}"
        )
    with torch.device("meta"):
        model = FLAVORS[config.flavor](config, vocab_size, sequence_length)
    check_model(model)
    if config.document_mask:
        separate_documents(model, end_of_document)
    return model


def vocabulary_rows(model: Model, tokenizer_vocabulary: int) -> int:
    """Return the number of rows of the embedding."""
    if model.vocab_size is None:
        return -(-tokenizer_vocabulary // 64) * 64  # a fast size for matrix products
    if model.vocab_size < tokenizer_vocabulary:
        below = f"below the tokenizer's vocabulary of {tokenizer_vocabulary}: leave it out"
        raise UserError(f"model.vocab_size = {model.vocab_size} is {below}")
    return model.vocab_size
