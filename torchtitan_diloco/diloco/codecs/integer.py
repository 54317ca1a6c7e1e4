"""int8: whole numbers from -127 to 127, times the block's scale."""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import Place
from torchtitan_diloco.diloco.codecs.blocks import BlockCodec
from torchtitan_diloco.diloco.codecs.dither import BITS, draw


class Int8Codec(BlockCodec):
    bits, unit_exponent, top = 8, 0, 127.0

    def _pack(self, values: Tensor, magnitudes: Tensor, codes: Tensor, place: Place) -> None:
        if self._stochastic:
            noise = draw(place, self._room.ints("noise", values.numel(), values.device), self._room)
            magnitudes.add_(noise, alpha=2.0**-BITS).floor_()
        else:
            magnitudes.round_()  # ties to even
        magnitudes.nan_to_num_(
            0.0, 0.0, 0.0
        )  # a cast of what is not finite gives other bits on other processors
        codes.view(torch.int8).copy_(magnitudes.copysign_(values).view(codes.shape))

    def _unpack(self, codes: Tensor, of_steps: Tensor, blocks: Tensor) -> None:
        blocks.view(codes.shape).copy_(codes.view(torch.int8))
        blocks.mul_(of_steps)
