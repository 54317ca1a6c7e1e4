"""Keys and values of the tokens that a decoder has read, so that it reads each token once."""

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockCache:
    """Keys and values of one block, [2, rows, heads, slots, head_dim]."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._filled = 0
        self._stored: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return those of all tokens."""
        if self._stored is None:
            rows, heads, _, head_dim = keys.shape
            self._stored = keys.new_empty(2, rows, heads, self._slots, head_dim)
        first_new = self._filled
        self._filled += keys.shape[2]
        self._stored[0, :, :, first_new : self._filled] = keys
        self._stored[1, :, :, first_new : self._filled] = values
        all_keys, all_values = self._stored[:, :, :, : self._filled]
        return all_keys, all_values

    def keep(self, rows: Tensor) -> None:
        if self._stored is not None:
            self._stored = self._stored[:, rows]


class KeyValueCache:
    """Keys and values of all blocks.

    First, the decoder reads the beginnings of all rows, padded on the right to the longest one.
    After that, it reads one more token of each row at a time. So a row has the positions that it
    has alone. No token attends to padding: it lies after the beginning of a row, and is hidden from
    the tokens that are read later.
    """

    def __init__(self, blocks: int, lengths: Sequence[int], new_tokens: int) -> None:
        """Reserve a cache for beginnings of these lengths, and as many new tokens after each."""
        self._lengths = list(lengths)
        self._padded_length = max(lengths)
        self._filled = 0
        slots = self._padded_length + new_tokens
        self.blocks = [BlockCache(slots) for _ in range(blocks)]

    def extend(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the positions of tokens [rows, length] that are now read, and to which slots they
        attend. None: to those up to their own."""
        device = tokens.device
        length = tokens.shape[1]
        before = self._filled
        self._filled += length
        if before == 0:
            return torch.arange(length, device=device), None
        assert length == 1, "after the beginnings, each row has one token at a time"
        lengths = torch.tensor(self._lengths, device=device).view(-1, 1, 1)
        positions = lengths + (before - self._padded_length)
        slots = torch.arange(self._filled, device=device)
        is_hidden = (lengths <= slots) & (slots < self._padded_length)
        return positions, ~is_hidden.unsqueeze(1)

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        self._lengths = [self._lengths[row] for row in rows]
        for block in self.blocks:
            block.keep(torch.tensor(rows))
