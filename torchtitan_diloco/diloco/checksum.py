"""Eight bytes that tell whether two workers hold the same bits."""

import torch
from torch import Tensor

_ROW = 1024
_MIX = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def checksum(values: Tensor) -> int:
    """Of a flat fp32 tensor: the sum of its words and that of its rows weighted by their place, the same on CPU and CUDA
    (integer sums do not depend on their order). Equal bits give equal checksums; -0.0 and 0.0 differ."""
    whole = values.numel() // _ROW * _ROW
    # Two values are one word of 64 bits: sums that widen 32 bits on the way are thirty times as slow on a CPU.
    rows = values[:whole].view(torch.int64).view(-1, _ROW // 2).sum(dim=1)
    weights = torch.arange(1, rows.numel() + 1, device=rows.device)
    tail = int(values[whole:].view(torch.int32).sum(dtype=torch.int64))
    plain, placed = int(rows.sum()) + tail, int((rows * weights).sum()) + tail * (rows.numel() + 1)
    return (plain * _MIX + placed) & _MASK
