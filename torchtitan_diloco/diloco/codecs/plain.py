"""Formats that are a cast: one value after the other, little-endian, without scales."""

import torch
from torch import Tensor


class CastCodec:
    """Values as a narrower float of torch's, rounded to nearest even."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.is_fp32 = dtype == torch.float32
        self._dtype = dtype

    def wire_bytes(self, values: int) -> int:
        return values * self._dtype.itemsize

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(self._dtype).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(self._dtype))
