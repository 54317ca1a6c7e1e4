"""Formats with blocks: int8, and the small floats of 8, 4 and 2 bits."""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import Position
from torchtitan_diloco.diloco.codecs.blocks import BlockCodec, Workspace
from torchtitan_diloco.diloco.codecs.stochastic import BITS, draw


class Int8Codec(BlockCodec):
    """Whole numbers from -127 to 127, times the scale of the block."""

    bits, unit_exponent, top = 8, 0, 127.0

    def _pack(self, values: Tensor, room: Workspace, codes: Tensor, position: Position) -> None:
        if self.stochastic:
            noise = draw(position, room.word, self._scratch)
            room.magnitudes.add_(noise, alpha=2.0**-BITS).floor_()
        else:
            room.magnitudes.round_()  # ties to even
        codes.view(torch.int8).copy_(room.magnitudes.copysign_(values).view(codes.shape))

    def _unpack(self, codes: Tensor, room: Workspace, blocks: Tensor) -> None:
        blocks.view(codes.shape).copy_(codes.view(torch.int8))
        blocks.mul_(room.step_column)


class MiniFloatCodec(BlockCodec):
    """Floats of a few bits without NaN or infinity, times the scale of the block.

    A code without its sign is an exponent followed by a mantissa, as in fp32, and in both the bits
    are ordered as the numbers are. So codes are found by rounding the bits of fp32.
    """

    def __init__(
        self,
        name: str,
        block_size: int,
        stochastic: bool,
        *,
        exponent: int,
        mantissa: int,
        bias: int,
        top: float,
    ) -> None:
        """`exponent` and `mantissa` are numbers of bits; `top` is the largest value that is
        used."""
        self.bits, self.mantissa, self.top = 1 + exponent + mantissa, mantissa, top
        self.unit_exponent = 1 - bias - mantissa
        super().__init__(name, block_size, stochastic)
        self._half_of_normal = torch.tensor(2.0 ** (mantissa - 1))
        self._cut = 23 - mantissa
        self._cut_tensor = torch.tensor(self._cut, dtype=torch.int32)
        # What is added to the bits of a number, in halves of the last bit that is kept: one half,
        # which rounds ties away from zero; less the bits that stand for 0; and a negative number's
        # sign bit. That one is less 2**32, as the clamp in _pack needs the constant of negative
        # numbers to be the smaller.
        zero = (126 + mantissa) << mantissa
        self._if_positive = (0 if stochastic else 1) - 2 * zero
        self._if_negative = self._if_positive + 2**self.bits - 2 ** (33 - self._cut)
        self._merges = {8: (), 4: (4,), 2: (6, 12)}[self.bits]
        """Shifts that bring the codes of a word together in its lowest byte."""
        # The values of every byte. One entry is as wide as all of them, so it is read with one
        # look-up.
        entry = {8: torch.float32, 4: torch.int64, 2: torch.complex128}[self.bits]
        codes = torch.arange(256)[:, None] >> torch.arange(0, 8, self.bits) & (2**self.bits - 1)
        self._table = self._grid()[codes].view(entry).view(-1)

    def _grid(self) -> Tensor:
        """Return the value of each code in steps, fp32 [2 ** bits]."""
        codes = torch.arange(2 ** (self.bits - 1))
        exponents, mantissas = codes >> self.mantissa, codes % 2**self.mantissa
        normal = (mantissas + 2**self.mantissa) << (exponents - 1).clamp(min=0)
        steps = torch.where(exponents == 0, mantissas, normal).float()
        return torch.cat((steps, -steps))

    def _pack(self, values: Tensor, room: Workspace, codes: Tensor, position: Position) -> None:
        # From 2**M on, the grid has the steps of fp32 numbers with M bits of mantissa. Below it
        # has steps of 1 down to 0, so numbers are moved to where fp32 has such steps: y -> (y +
        # 2**M) / 2, which is larger than y if y < 2**M.
        torch.add(self._half_of_normal, room.magnitudes, alpha=0.5, out=room.moved)
        torch.maximum(room.magnitudes, room.moved, out=room.moved)
        if self.stochastic:  # steps are even between two grid values, so the odds are right
            noise = draw(position, room.signs, self._scratch)
            room.word.add_(noise, alpha=2 ** (self._cut - BITS))
        # As int32, negative numbers lie below both constants, all others above: a clamp selects
        # one.
        bits = values.view(torch.int32)
        torch.clamp(bits, self._if_negative, self._if_positive, out=room.signs)
        room.word.add_(room.signs, alpha=2 ** (self._cut - 1)).bitwise_right_shift_(
            self._cut_tensor
        )
        room.codes.copy_(room.word)
        for shift in self._merges:
            torch.bitwise_right_shift(room.words, shift, out=room.shifted)
            room.words.bitwise_or_(room.shifted)
        codes.copy_(room.word_rows)

    def _unpack(self, codes: Tensor, room: Workspace, blocks: Tensor) -> None:
        room.byte_rows.copy_(codes)
        entries = room.moved.view(self._table.dtype)
        torch.index_select(self._table.to(codes.device), 0, room.bytes, out=entries)
        torch.mul(room.moved_blocks, room.step_column, out=blocks)
