"""Formats with a scale for every block of values: int8, and small floats of 8 and 4 bits.

On a CPU, calls of torch cost about as much as the passes over the values. Therefore, views are
cached by size (`Workspace`), and constants are tensors, which saves a conversion in each call.
"""

import importlib
import os
from abc import abstractmethod
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.diloco.codecs.base import BIAS, LOWEST, NOT_FINITE_SCALE, UNIT, Codec
from torchtitan_diloco.diloco.config import BLOCK_SIZES, Quantization
from torchtitan_diloco.diloco.formats import Format


@cache
def triton_kernels() -> ModuleType | None:
    """Return the module of the GPU kernels, or None if Triton cannot be imported."""
    try:
        return importlib.import_module("torchtitan_diloco.diloco.codecs.triton_kernels")
    except ImportError as error:
        logger.info(f"GPUs encode with plain torch, because Triton cannot be imported: {error}")
        return None


def kernels_for(form: Format, values: Tensor) -> ModuleType | None:
    """Return the kernels for a tensor, or None for the torch code, which defines the bits."""
    # TRITON_INTERPRET=1, set before Triton is imported, runs the kernels on a CPU, slowly.
    if form.has_kernels and (values.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return triton_kernels()
    return None


INTEGERS = -1
"""`mantissa` of a format whose codes are signed integers of 8 bits."""
CODE_BITS = (8, 4)
"""Sizes of a code that torch and the GPU kernels can pack."""


class Grid(NamedTuple):
    """Parameters that define the bits of a format with blocks, and constants of the GPU kernels."""

    block: int
    """Values that share a scale."""
    bits: int
    """Size of a code, one of CODE_BITS."""
    mantissa: int
    """Mantissa bits of a code, or INTEGERS."""
    unit_exponent: int
    """The step of the grid is 2 ** unit_exponent."""
    most_steps: float
    """Largest value of the grid, in steps."""
    carry: int
    """Added to the bits of a block's largest value, it makes their exponent that of the scale. It
    carries into the exponent if the mantissa is larger than that of the grid's largest value."""
    highest: int
    """Largest scale byte: the decoded top is finite, and the inverse of a step is not subnormal."""


class Workspace:
    """Views of one buffer, for encoding and decoding a number of whole units."""

    def __init__(self, buffer: Tensor, values: int, grid: Grid) -> None:
        units = values // UNIT
        blocks = values // grid.block
        sizes = [4 * values, 4 * values, values, 4 * blocks, 4 * blocks, 4 * blocks]
        parts = buffer[: sum(sizes)].split(sizes)
        self.magnitudes = parts[0].view(torch.float32)
        self.signs = parts[0].view(torch.int32)
        self.blocks = self.magnitudes.view(blocks, -1)
        self.moved = parts[1].view(torch.float32)
        self.word = parts[1].view(torch.int32)
        self.moved_blocks = self.moved.view(blocks, -1)
        self.codes = parts[2]
        # The codes of one byte as a word: they are merged in its lowest byte.
        self.words = self.codes.view({8: torch.int8, 4: torch.int16}[grid.bits])
        self.word_rows = self.words.view(units, -1)
        self.shifted = parts[1][:values].view(self.words.dtype)
        # Packed bytes as indices of the decoding table.
        self.bytes = self.signs[: self.words.numel()]
        self.byte_rows = self.bytes.view(units, -1)
        self.largest = parts[3].view(torch.float32)
        self.largest_bits = parts[3].view(torch.int32)
        self.scales = parts[4].view(torch.int32)
        self.scale_rows = self.scales.view(units, -1)
        self.steps = parts[5].view(torch.float32)
        self.steps_bits = parts[5].view(torch.int32)
        self.step_column = self.steps[:, None]


def _word(number: int) -> Tensor:
    """Return an integer modulo 2**32 as a tensor of 32 bits."""
    return torch.tensor(number).to(torch.int32)


class BlockCodec(Codec):
    """Base class of formats with blocks, which differ in the grid of values that codes represent.

    Values are divided by the scale of their block and by the step of the grid. Both are powers of
    two, so this is exact. The quotients, from 0 to `most_steps`, are then rounded to codes.
    """

    bits: int
    """Size of a code."""
    mantissa = INTEGERS
    """Mantissa bits of a code, or INTEGERS."""
    unit_exponent: int
    """The step of the grid is 2 ** unit_exponent."""
    top: float
    """Largest value of the grid."""

    def __init__(self, config: Quantization) -> None:
        assert config.block_size in BLOCK_SIZES
        sizes = (8,) if self.mantissa == INTEGERS else CODE_BITS
        if self.bits not in sizes:
            kind = "integers" if self.mantissa == INTEGERS else "floats"
            raise ValueError(
                f"format {config.codec} has codes of {self.bits} bits: {kind} of "
                f"{' or '.join(map(str, sizes))} bits can be packed"
            )
        super().__init__(config)
        self.block_size = config.block_size
        word = int(torch.tensor(self.top).view(torch.int32))
        exponent = (word >> 23) - BIAS
        self.grid = Grid(
            block=self.block_size,
            bits=self.bits,
            mantissa=self.mantissa,
            unit_exponent=self.unit_exponent,
            most_steps=self.top / 2**self.unit_exponent,
            carry=2**23 - 1 - word % 2**23 - (exponent << 23),
            highest=2 * BIAS - max(exponent, 1 + self.unit_exponent),
        )
        self._unit_sizes = self._sizes(UNIT)
        self._largest = self.top * 2.0 ** (self.grid.highest - BIAS)
        self._carry = _word(self.grid.carry)
        self._shift = _word(23)
        self._inverse = _word((2 * BIAS - self.unit_exponent) << 23)
        exponents = torch.arange(256, dtype=torch.int32) + self.unit_exponent
        self._steps = (exponents << 23).view(torch.float32)
        """Step by scale byte."""
        self._steps[NOT_FINITE_SCALE] = torch.nan
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._workspaces: dict[int, Workspace] = {}

    def details(self) -> list[str]:
        return [f"one scale per {self.block_size} values"]

    def wire_bytes(self, values: int) -> int:
        units, rest = divmod(values, UNIT)
        return units * sum(self._unit_sizes) + sum(self._sizes(rest))

    def encode(self, values: Tensor, payload: Tensor) -> None:
        if kernels := kernels_for(self.format, values):
            kernels.encode(values, payload, self.grid)
            return
        if rest := values.numel() % UNIT:
            whole = values.numel() - rest
            full, unit, sent = self._last_unit(rest, values.device)
            full[:rest].copy_(values[whole:])
            self._encode_units(full, unit)
            torch.cat(sent, out=payload[self.wire_bytes(whole) :])
            values = values[:whole]
            payload = payload[: self.wire_bytes(whole)]
        if values.numel():
            self._encode_units(values, payload)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        if kernels := kernels_for(self.format, values):
            kernels.average([payload], [1.0], values, self.grid)
            return
        if rest := values.numel() % UNIT:
            whole = values.numel() - rest
            full, unit, sent = self._last_unit(rest, values.device)
            arrived = payload[self.wire_bytes(whole) :].split(self._sizes(rest))
            for part, source in zip(sent, arrived, strict=True):
                part.copy_(source)
            self._decode_units(unit, full)
            values[whole:].copy_(full[:rest])
            values = values[:whole]
            payload = payload[: self.wire_bytes(whole)]
        if values.numel():
            self._decode_units(payload, values)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        if kernels := kernels_for(self.format, out):
            kernels.average(payloads, weights, out, self.grid)
        else:
            super().average(payloads, weights, out)

    def _sizes(self, values: int) -> list[int]:
        """Return the bytes of the codes and scales of up to one unit."""
        return [-(-values * self.bits // 8), -(-values // self.block_size)]

    def _last_unit(self, rest: int, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return zeros for the values and the payload of a unit, and the parts of the payload that
        are sent if the unit has only `rest` values."""
        full = self._scratch("last unit", UNIT, torch.float32, device).zero_()
        unit = self._scratch("its payload", sum(self._unit_sizes), torch.uint8, device).zero_()
        parts = zip(unit.split(self._unit_sizes), self._sizes(rest), strict=True)
        return full, unit, [part[:size] for part, size in parts]

    def _workspace(self, values: Tensor) -> Workspace:
        size = values.numel()
        if self._buffer.numel() < 10 * size or self._buffer.device != values.device:
            self._buffer = torch.empty(10 * size, dtype=torch.uint8, device=values.device)
            self._workspaces.clear()
        if size not in self._workspaces:
            self._workspaces[size] = Workspace(self._buffer, size, self.grid)
        return self._workspaces[size]

    def _rows(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of whole units, each uint8 [units, bytes]."""
        units = payload.view(-1, sum(self._unit_sizes))
        codes, scales = units.split_with_sizes(self._unit_sizes, dim=1)
        return codes, scales

    def _encode_units(self, values: Tensor, payload: Tensor) -> None:
        room = self._workspace(values)
        codes, scales = self._rows(payload)
        torch.abs(values, out=room.magnitudes)
        torch.amax(room.blocks, dim=1, out=room.largest)
        # The exponent of a block's largest value, after the carry, is its scale.
        torch.add(room.largest_bits, self._carry, out=room.scales)
        room.scales.bitwise_right_shift_(self._shift).clamp_(LOWEST, self.grid.highest)
        # The inverse of a power of two has the negated exponent.
        torch.add(self._inverse, room.scales, alpha=-(2**23), out=room.steps_bits)
        room.blocks.mul_(room.step_column)
        if not room.largest.max().item() <= self._largest:  # one is too large, infinite or NaN
            broken = ~room.largest.isfinite()
            room.scales.masked_fill_(broken, NOT_FINITE_SCALE)
            room.blocks.masked_fill_(broken[:, None], 0.0)
            room.magnitudes.clamp_(max=self.grid.most_steps)
        self._pack(values, room, codes)
        scales.copy_(room.scale_rows)

    def _decode_units(self, payload: Tensor, values: Tensor) -> None:
        room = self._workspace(values)
        codes, scales = self._rows(payload)
        room.scale_rows.copy_(scales)
        torch.index_select(self._steps.to(values.device), 0, room.scales, out=room.steps)
        self._unpack(codes, room, values.view(-1, self.block_size))

    @abstractmethod
    def _pack(self, values: Tensor, room: Workspace, codes: Tensor) -> None:
        """Round `room.magnitudes`, the magnitudes of `values` in steps, and write the codes, uint8
        [units, bytes]. May overwrite the workspace except its scales."""

    @abstractmethod
    def _unpack(self, codes: Tensor, room: Workspace, blocks: Tensor) -> None:
        """Write the grid value of each code, in steps, times `room.step_column` to `blocks`."""


class Int8Codec(BlockCodec):
    """Integers from -127 to 127, times the scale of the block."""

    bits = 8
    unit_exponent = 0
    top = 127.0

    def _pack(self, values: Tensor, room: Workspace, codes: Tensor) -> None:
        room.magnitudes.round_()  # ties to even
        codes.view(torch.int8).copy_(room.magnitudes.copysign_(values).view(codes.shape))

    def _unpack(self, codes: Tensor, room: Workspace, blocks: Tensor) -> None:
        blocks.view(codes.shape).copy_(codes.view(torch.int8))
        blocks.mul_(room.step_column)


class MiniFloatCodec(BlockCodec):
    """Floats of a few bits without NaN or infinity, times the scale of the block.

    Like fp32, a code without its sign is an exponent followed by a mantissa, so its bits are in the
    order of the numbers. Codes are thus computed by rounding the bits of fp32.
    """

    def __init__(
        self, config: Quantization, *, exponent: int, mantissa: int, bias: int, top: float
    ) -> None:
        """`exponent`, `mantissa`: numbers of bits. `top`: the largest value that is used."""
        self.bits = 1 + exponent + mantissa
        self.mantissa = mantissa
        self.top = top
        self.unit_exponent = 1 - bias - mantissa
        super().__init__(config)
        self._half_of_normal = torch.tensor(2.0 ** (mantissa - 1))
        self._cut = 23 - mantissa
        self._cut_tensor = torch.tensor(self._cut, dtype=torch.int32)
        # Constants to add to the bits of a number, in halves of the last bit that is kept: one
        # half, which rounds ties away from zero; minus the bits of 0; plus the sign bit of negative
        # numbers. The latter is reduced by 2**32, as the clamp in _pack needs the constant of
        # negative numbers to be the smaller one.
        zero = (126 + mantissa) << mantissa
        self._if_positive = 1 - 2 * zero
        self._if_negative = self._if_positive + 2**self.bits - 2 ** (33 - self._cut)
        # The values of every byte, in one entry each, so that a byte takes one look-up.
        entry = {8: torch.float32, 4: torch.int64}[self.bits]
        codes = torch.arange(256)[:, None] >> torch.arange(0, 8, self.bits) & (2**self.bits - 1)
        self._table = self._grid()[codes].view(entry).view(-1)

    def _grid(self) -> Tensor:
        """Return the value of each code in steps, fp32 [2 ** bits]."""
        codes = torch.arange(2 ** (self.bits - 1))
        exponents = codes >> self.mantissa
        mantissas = codes % 2**self.mantissa
        normal = (mantissas + 2**self.mantissa) << (exponents - 1).clamp(min=0)
        steps = torch.where(exponents == 0, mantissas, normal).float()
        return torch.cat((steps, -steps))

    def _pack(self, values: Tensor, room: Workspace, codes: Tensor) -> None:
        # From 2**M on, the grid has the steps of fp32 numbers with M bits of mantissa. Below, it
        # has steps of 1 down to 0, so numbers are moved to where fp32 has such steps:
        # y -> (y + 2**M) / 2, which is larger than y if y < 2**M.
        torch.add(self._half_of_normal, room.magnitudes, alpha=0.5, out=room.moved)
        torch.maximum(room.magnitudes, room.moved, out=room.moved)
        # As int32, negative numbers are below both constants and others above: clamp selects one.
        bits = values.view(torch.int32)
        torch.clamp(bits, self._if_negative, self._if_positive, out=room.signs)
        room.word.add_(room.signs, alpha=2 ** (self._cut - 1)).bitwise_right_shift_(
            self._cut_tensor
        )
        room.codes.copy_(room.word)
        if self.bits == 4:  # two codes in a byte
            torch.bitwise_right_shift(room.words, 4, out=room.shifted)
            room.words.bitwise_or_(room.shifted)
        codes.copy_(room.word_rows)

    def _unpack(self, codes: Tensor, room: Workspace, blocks: Tensor) -> None:
        room.byte_rows.copy_(codes)
        entries = room.moved.view(self._table.dtype)
        torch.index_select(self._table.to(codes.device), 0, room.bytes, out=entries)
        torch.mul(room.moved_blocks, room.step_column, out=blocks)
