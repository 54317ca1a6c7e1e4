"""Formats with a scale for every block of values: how blocks, units and their scales lie in a payload.

A unit is 1024 values (the last one of a fragment may be shorter): first its codes, packed with the first value in the lowest
bits, then one byte for each block, which is the exponent of the block's scale, 2 ** (byte - 127). docs/wire-formats.md
defines every bit.
"""

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs import fused
from torchtitan_diloco.diloco.codecs.base import START, UNIT, Place, PlainTorch
from torchtitan_diloco.diloco.config import BLOCK_SIZES

BIAS = 127
LOWEST = BIAS - 100
"""Smallest scale byte. Blocks of smaller values are rounded as if they were that large: below 2**-100 all becomes 0, and no
scale or value on the way is one of those subnormal numbers that processors are slow with, or drop."""
NOT_FINITE = 255
"""Scale byte of a block with a NaN or an infinity: all its values are decoded as NaN, other blocks are untouched."""


class BlockCodec(PlainTorch):
    """What differs from format to format is the grid of values that a code can have, and how codes are found and read."""

    bits: int
    """Of one code."""
    unit_exponent: int
    """The codes count in steps of 2 ** unit_exponent."""
    top: float
    """Largest value of the grid."""
    _mantissa: int = -1
    """Bits of it in a code, -1 where codes are whole numbers."""
    use_kernels = True
    """On a GPU with Triton, the kernels in fused.py do the work. False: always the torch code here, which defines the bits."""

    def __init__(self, name: str, block: int, *, stochastic: bool = False) -> None:
        super().__init__()
        assert block in BLOCK_SIZES
        self.name, self._block, self._stochastic = name, block, stochastic
        word = int(torch.tensor(self.top, dtype=torch.float32).view(torch.int32))
        self._exponent_of_top = (word >> 23) - BIAS
        self._highest = 2 * BIAS - max(self._exponent_of_top, 1 + self.unit_exponent)
        """Largest scale byte: the decoded top is a finite number, and one divided by a step not subnormal."""
        self._carry = 2**23 - 1 - word % 2**23
        """Added to a value's bits it raises the exponent if the mantissa is larger than the top's."""

    def wire_bytes(self, values: int) -> int:
        units, rest = divmod(values, UNIT)
        return units * self._unit_bytes(UNIT) + self._unit_bytes(rest)

    def _code_bytes(self, values: int) -> int:
        return -(-values * self.bits // 8)

    def _unit_bytes(self, values: int) -> int:
        return self._code_bytes(values) + -(-values // self._block)

    def encode(self, values: Tensor, payload: Tensor, place: Place = START) -> None:
        if self._is_fused(values):
            fused.encode(values, None, payload, self._format, self._rounding, place)
            return
        whole = values.numel() // UNIT * UNIT
        if whole:
            units = payload[: self.wire_bytes(whole)].view(-1, self._unit_bytes(UNIT))
            codes, scales = units.split([self._code_bytes(UNIT), UNIT // self._block], dim=1)
            self._encode_blocks(values[:whole], codes, scales, place)
        rest = values.numel() - whole
        if (
            rest
        ):  # filled up with zeros to whole blocks, of which only the codes of real values are sent
            padded = self._room.floats("rest", -(-rest // self._block) * self._block, values.device)
            padded[:rest].copy_(values[whole:])
            padded[rest:].zero_()
            codes = self._room.octets(
                "rest's codes", self._code_bytes(padded.numel()), values.device
            )
            tail = payload[self.wire_bytes(whole) :]
            self._encode_blocks(
                padded, codes[None], tail[self._code_bytes(rest) :][None], place.after(whole)
            )
            tail[: self._code_bytes(rest)].copy_(codes[: self._code_bytes(rest)])

    def decode(self, payload: Tensor, values: Tensor) -> None:
        if self._is_fused(values):
            fused.average([payload], [1.0], values, self._format)
            return
        whole = values.numel() // UNIT * UNIT
        if whole:
            units = payload[: self.wire_bytes(whole)].view(-1, self._unit_bytes(UNIT))
            codes, scales = units.split([self._code_bytes(UNIT), UNIT // self._block], dim=1)
            self._decode_blocks(codes, scales, values[:whole])
        rest = values.numel() - whole
        if rest:
            padded = self._room.floats("rest", -(-rest // self._block) * self._block, values.device)
            codes = self._room.octets(
                "rest's codes", self._code_bytes(padded.numel()), values.device
            ).zero_()
            tail = payload[self.wire_bytes(whole) :]
            codes[: self._code_bytes(rest)].copy_(tail[: self._code_bytes(rest)])
            self._decode_blocks(codes[None], tail[self._code_bytes(rest) :][None], padded)
            values[whole:].copy_(padded[:rest])

    def encode_with_feedback(
        self, values: Tensor, residual: Tensor, payload: Tensor, place: Place = START
    ) -> None:
        if self._is_fused(values):
            fused.encode(values, residual, payload, self._format, self._rounding, place)
        else:
            super().encode_with_feedback(values, residual, payload, place)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        if self._is_fused(out):
            fused.average(payloads, weights, out, self._format)
        else:
            super().average(payloads, weights, out)

    def _is_fused(self, values: Tensor) -> bool:
        return self.use_kernels and fused.fused_available(values.device)

    @cached_property
    def _format(self) -> fused.Format:
        return fused.Format(self._block, self.bits, self._mantissa, self.unit_exponent)

    @cached_property
    def _rounding(self) -> fused.Rounding:
        most_steps = self.top / 2**self.unit_exponent
        return fused.Rounding(
            self._stochastic, self._exponent_of_top, self._carry, self._highest, most_steps
        )

    def _encode_blocks(self, values: Tensor, codes: Tensor, scales: Tensor, place: Place) -> None:
        """fp32 [n], whole blocks of it -> uint8 [rows, n * bits / 8 / rows], uint8 [rows, n / block / rows]."""
        magnitudes = torch.abs(
            values, out=self._room.floats("magnitudes", values.numel(), values.device)
        )
        blocks = magnitudes.view(-1, self._block)
        largest = blocks.amax(dim=1)
        scale = self._scale_bytes(largest)
        scales.copy_(scale.view(scales.shape))
        in_steps = (
            (2 * BIAS - self.unit_exponent - scale).bitwise_left_shift_(23).view(torch.float32)
        )
        blocks.mul_(in_steps[:, None])
        magnitudes.clamp_(
            max=self.top / 2**self.unit_exponent
        )  # only where the scale has reached its own top
        self._pack(values, magnitudes, codes, place)

    def _scale_bytes(self, largest: Tensor) -> Tensor:
        """int32: the exponent of the smallest power of two that brings a block's largest value onto the grid."""
        exponent = (
            (largest.view(torch.int32) + self._carry)
            .bitwise_right_shift_(23)
            .sub_(self._exponent_of_top)
        )
        exponent.clamp_(LOWEST, self._highest)
        return exponent.masked_fill_(~torch.isfinite(largest), NOT_FINITE)

    def _decode_blocks(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        exponents = scales.to(torch.int32).view(-1)
        of_steps = (exponents + self.unit_exponent).bitwise_left_shift_(23).view(torch.float32)
        of_steps = of_steps.masked_fill_(exponents == NOT_FINITE, torch.nan)
        self._unpack(codes, of_steps[:, None], values.view(-1, self._block))

    @abstractmethod
    def _pack(self, values: Tensor, magnitudes: Tensor, codes: Tensor, place: Place) -> None:
        """`magnitudes` are those of the values in steps, from 0 to the top of the grid; they may be overwritten."""

    @abstractmethod
    def _unpack(self, codes: Tensor, of_steps: Tensor, blocks: Tensor) -> None:
        """blocks [n / block, block] = grid value of each code, in steps, times `of_steps` [n / block, 1]."""
