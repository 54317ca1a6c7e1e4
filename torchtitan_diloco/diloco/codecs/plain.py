"""Formats that are a cast: one value after the other, little-endian, without scales."""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import START, Place, PlainTorch
from torchtitan_diloco.diloco.codecs.dither import draw


class Fp32Codec(PlainTorch):
    """Values as they are."""

    name, is_fp32 = "fp32", True

    def wire_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, values: Tensor, payload: Tensor, place: Place = START) -> None:  # noqa: ARG002
        payload.copy_(values.view(torch.uint8))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.view(torch.uint8).copy_(payload)


class Bf16Codec(PlainTorch):
    """The upper half of each value, rounded to nearest even or at random."""

    name = "bf16"

    def __init__(self, *, stochastic: bool = False) -> None:
        super().__init__()
        self._stochastic = stochastic

    def wire_bytes(self, values: int) -> int:
        return 2 * values

    def encode(self, values: Tensor, payload: Tensor, place: Place = START) -> None:
        encoded = payload.view(torch.bfloat16)
        if not self._stochastic:
            encoded.copy_(values)
            return
        word = draw(place, self._room.ints("word", values.numel(), values.device), self._room)
        word.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
        encoded.copy_(word.view(torch.float32))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))
