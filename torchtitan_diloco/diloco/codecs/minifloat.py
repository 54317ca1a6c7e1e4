"""Small floats: a sign, E bits of exponent and M of mantissa, without NaN or infinity, times the block's scale.

The code without its sign is a number like the bits of a float: exponent first, so it counts the grid's values in order, the
subnormal ones included. It is found with the bits of fp32, which are ordered the same way.
"""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import Place
from torchtitan_diloco.diloco.codecs.blocks import BlockCodec
from torchtitan_diloco.diloco.codecs.dither import BITS, draw

_WORDS = {8: torch.int8, 4: torch.int16, 2: torch.int32}
"""Codes stand in bytes before they are packed: as many as fill one byte, seen as one word."""
_MERGES = {8: (), 4: (4,), 2: (6, 12)}
"""A word merged with itself, shifted so, has the packed byte at its lower end."""
_ENTRIES = {8: torch.float32, 4: torch.int64, 2: torch.complex128}
"""As wide as the fp32 values of one packed byte: a table of them is read with one look-up for each byte."""


class MiniFloatCodec(BlockCodec):
    def __init__(
        self,
        name: str,
        block: int,
        *,
        exponent: int,
        mantissa: int,
        bias: int,
        top: float,
        stochastic: bool = False,
    ) -> None:
        self.bits = 1 + exponent + mantissa
        self.unit_exponent, self.top = 1 - bias - mantissa, top
        super().__init__(name, block, stochastic=stochastic)
        self._mantissa, self._cut = mantissa, 23 - mantissa
        self._zero = (126 + mantissa) << 23
        """Bits of the fp32 number that stands for 0: see _pack."""
        self._table = self._entries().view(_ENTRIES[self.bits]).view(-1)
        self._tables: dict[torch.device, Tensor] = {}

    def grid(self) -> Tensor:
        """fp32 [2 ** bits]: the value of each code, before the block's scale."""
        codes = torch.arange(2 ** (self.bits - 1))
        exponents, mantissas = codes >> self._mantissa, codes % 2**self._mantissa
        subnormal = exponents == 0
        steps = torch.where(
            subnormal, mantissas, (mantissas + 2**self._mantissa) << (exponents - 1).clamp(min=0)
        )
        values = torch.ldexp(steps.float(), torch.tensor(self.unit_exponent))
        return torch.cat((values, -values))

    def _entries(self) -> Tensor:
        """fp32 [256, values in a byte], in steps: what each byte stands for."""
        inside = torch.arange(0, 8, self.bits)
        codes = torch.arange(256)[:, None] >> inside & (2**self.bits - 1)
        return torch.ldexp(self.grid(), torch.tensor(-self.unit_exponent))[codes].contiguous()

    def _pack(self, values: Tensor, magnitudes: Tensor, codes: Tensor, place: Place) -> None:
        # Half of the normal numbers' steps below 2**M are wider than wanted: steps of 1 reach down to 0 there. So what is
        # smaller is moved to where fp32 has such steps: y -> (y + 2**M) / 2, which is larger exactly when y < 2**M.
        moved = torch.mul(
            magnitudes, 0.5, out=self._room.floats("moved", values.numel(), values.device)
        )
        moved.add_(2.0 ** (self._mantissa - 1))
        word = torch.maximum(magnitudes, moved, out=moved).view(torch.int32)
        if self._stochastic:  # what is cut off decides by chance, with the right odds, as the steps are even in between
            noise = draw(place, magnitudes.view(torch.int32), self._room)
            word.add_(noise, alpha=2 ** (self._cut - BITS)).sub_(self._zero)
        else:
            word.add_((1 << (self._cut - 1)) - self._zero)  # ties away from zero
        word.bitwise_right_shift_(self._cut)
        signs = torch.bitwise_right_shift(
            values.view(torch.int32), 31, out=magnitudes.view(torch.int32)
        )  # -1 or 0
        word.sub_(signs, alpha=2 ** (self.bits - 1))
        octets = self._room.octets("codes", values.numel(), values.device).copy_(word)
        words = octets.view(_WORDS[self.bits])
        for shift in _MERGES[self.bits]:
            words.bitwise_or_(words >> shift)
        codes.copy_(words.view(codes.shape))

    def _unpack(self, codes: Tensor, of_steps: Tensor, blocks: Tensor) -> None:
        if codes.device not in self._tables:
            self._tables[codes.device] = self._table.to(codes.device)
        table = self._tables[codes.device]
        numbers = self._room.ints("numbers", codes.numel(), codes.device)
        numbers.view(codes.shape).copy_(codes)
        found = self._room.floats("found", blocks.numel(), blocks.device)
        torch.index_select(table, 0, numbers, out=found.view(table.dtype))
        torch.mul(found.view(blocks.shape), of_steps, out=blocks)
