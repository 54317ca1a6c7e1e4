"""Checksums of the bits of flat fp32 tensors, from the sums of their rows."""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.outer_step import STEP_VALUES

ROW = 1024
"""Values of a row."""


def row_sums(words: Tensor, before: int = 0) -> Tensor:
    """Return the sum of each row of words of 32 bits, with zeros in place of those that are missing
    in the first and the last row.

    Pairs of words are summed as int64: sums that widen 32 bits are far slower on a CPU. `before`:
    number of words that precede these in the first row.
    """
    size = -(-(before + words.numel()) // ROW) * ROW
    if words.numel() < size or words.storage_offset() % 2:
        # Fill whole rows: zeros add nothing to a sum.
        whole = words.new_zeros(size)
        whole[before:][: words.numel()] = words
        words = whole
    return words.view(torch.int64).view(-1, ROW // 2).sum(dim=1)


def block_sums(block: Tensor) -> Tensor:
    """Return the integer sum of the bits of each row of a block, and of the remaining values, which
    are no pairs and are not copied."""
    words = block.view(torch.int32)
    end = words.numel() // ROW * ROW
    sums = row_sums(words[:end])
    if end == words.numel():
        return sums
    remaining = words[end:].sum(dim=0, keepdim=True, dtype=torch.int64)
    return torch.cat([sums, remaining])


def checksum_of(sums_of_blocks: list[Tensor]) -> int:
    """Return the checksum of a flat fp32 tensor from the sums of its blocks (`block_sums`).

    It combines the sum of all words and the sum of rows weighted by their index, which are equal on
    CPU and CUDA. All blocks but the last must be whole rows. -0.0 and 0.0 differ.
    """
    sums = torch.cat(sums_of_blocks)
    weights = torch.arange(1, len(sums) + 1, device=sums.device)
    # Integer sums overflow alike everywhere, in any order. The factor is odd, so no bit of the
    # first sum is lost modulo 2**64.
    return (int(sums.sum()) * 0x9E3779B97F4A7C15 + int((sums * weights).sum())) % 2**64


def checksum(values: Tensor) -> int:
    """Return a 64-bit checksum of the bits of a flat fp32 tensor."""
    blocks = values.split(STEP_VALUES if values.device.type == "cpu" else max(1, values.numel()))
    return checksum_of(list(map(block_sums, blocks)))
