"""A batch of token sequences, as the loader makes it and the loss takes it."""

from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [sequences, sequence_length]."""
IGNORE_INDEX = -100
"""Target of a position that the loss ignores."""
