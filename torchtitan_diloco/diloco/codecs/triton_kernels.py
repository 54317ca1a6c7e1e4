# mypy: ignore-errors
# (Triton's language has Python's syntax, but not its types.)
"""GPU kernels of the formats with blocks: one pass over memory, where torch takes a dozen.

The kernels compute the same bits as the torch code in base.py, blocks.py and topk.py, which has the
explanations. A program processes one unit of 1024 values as a tile [blocks, values of a block]. The
last tile is padded with zeros, and masks exclude the padding from stores.

The bits are the same because scales are powers of two, so that products are exact, and because
`enable_fp_fusion=False` keeps the compiler from fusing sums with products. Triton does not flush
subnormal numbers.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

import torchtitan_diloco.diloco.codecs.base as base
import torchtitan_diloco.diloco.codecs.topk as topk

UNIT, BIAS, LOWEST, NOT_FINITE_SCALE = (
    tl.constexpr(number) for number in (base.UNIT, base.BIAS, base.LOWEST, base.NOT_FINITE_SCALE)
)
PLACE_BITS, ENTRY_BITS, ORDER, SCALE, CUT = (
    tl.constexpr(number)
    for number in (topk.PLACE_BITS, topk.ENTRY_BITS, topk.ORDER, topk.SCALE, topk.CUT)
)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
TWO_TO_23 = tl.constexpr(2.0**23)


def encode(values, payload, form):
    _launch(encode_units, values, values, payload, *_sizes(values, form), FORM=form)


def average(payloads, weights, out, form):
    """Write the weighted mean of the payloads to `out`. One payload is simply decoded."""
    total = 0.0
    shares = []
    for weight in weights:
        total += weight
        shares.append(weight / total)
    arguments = tuple(payloads), tuple(shares), out, *_sizes(out, form)
    _launch(average_units, out, *arguments, COUNT=len(payloads), FORM=form)


def encode_largest(values, payload, top_values):
    """Encode the largest values of each unit."""
    _launch(encode_largest_of_units, values, values, payload, values.numel(), TOP=top_values)


def _sizes(values, form):
    """Return the number of values and the bytes of their codes. As arguments of a kernel, Triton
    checks if they are multiples of 16, to vectorize stores."""
    return values.numel(), -(-values.numel() * form.bits // 8)


def _launch(kernel, values, *arguments, **constants):
    assert values.dtype == torch.float32
    assert values.is_contiguous()
    units = -(-values.numel() // UNIT.value)
    # The GPU of the tensors may not be the current device of this thread.
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        if units:
            kernel[(units,)](*arguments, **constants, enable_fp_fusion=False)


@triton.jit
def encode_units(values, payload, n, size, FORM: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * UNIT
    inside = _inside(FORM)
    real = first + inside < n
    x = tl.load(values + first + inside, mask=real, other=0.0)

    # Bits are in the order of magnitudes, with infinity and NaN above all others.
    word = x.to(tl.int32, bitcast=True)
    largest = tl.max(word & MAGNITUDE, axis=1)
    scale = tl.minimum(tl.maximum((largest + FORM.carry) >> 23, LOWEST), FORM.highest)
    inverse = ((-scale + (2 * BIAS - FORM.unit_exponent)) << 23).to(tl.float32, bitcast=True)
    broken = largest >= INFINITY
    scale = tl.where(broken, NOT_FINITE_SCALE, scale)
    magnitude = (word & MAGNITUDE).to(tl.float32, bitcast=True) * inverse[:, None]
    magnitude = tl.where(broken[:, None], 0.0, tl.minimum(magnitude, FORM.most_steps))
    code = _whole_code(magnitude, word) if FORM.mantissa < 0 else _float_code(magnitude, word, FORM)

    addresses, sent, scales, scaled = _layout(payload, n, size, FORM)
    block_bytes: tl.constexpr = FORM.block * FORM.bits // 8
    parts = tl.reshape(code, (UNIT // FORM.block, block_bytes, 8 // FORM.bits)) << _shifts(FORM)
    tl.store(addresses, tl.sum(parts, axis=2).to(tl.uint8), mask=sent)
    tl.store(scales, scale.to(tl.uint8), mask=scaled)


@triton.jit
def average_units(payloads, shares, out, n, size, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Compute a running mean. shares[i]: weight of payload i in the mean of the first i + 1.

    Like `add_to_mean`, round the product and the sum (see `enable_fp_fusion`).
    """
    first = tl.program_id(0).to(tl.int64) * UNIT
    inside = _inside(FORM)
    mean = _decoded(payloads[0], n, size, FORM)
    for number in tl.static_range(1, COUNT):
        value = _decoded(payloads[number], n, size, FORM)
        share = tl.full(mean.shape, shares[number], tl.float32)
        mean += (value - mean) * share
    tl.store(out + first + inside, mean, mask=first + inside < n)


@triton.jit
def _inside(FORM: tl.constexpr):
    """Return the index of each value in its unit, [blocks, values of a block]."""
    return (
        tl.arange(0, UNIT // FORM.block)[:, None] * FORM.block + tl.arange(0, FORM.block)[None, :]
    )


@triton.jit
def _layout(payload, n, size, FORM: tl.constexpr):
    """Return the addresses and masks of this unit's codes, [blocks, bytes of a block], and of its
    scales, [blocks]."""
    blocks: tl.constexpr = UNIT // FORM.block
    block_bytes: tl.constexpr = FORM.block * FORM.bits // 8
    unit_bytes: tl.constexpr = UNIT * FORM.bits // 8
    unit = tl.program_id(0).to(tl.int64)
    start = payload + unit * (unit_bytes + blocks)
    byte = tl.arange(0, blocks)[:, None] * block_bytes + tl.arange(0, block_bytes)[None, :]
    block = tl.arange(0, blocks)
    scales = start + tl.minimum(size - unit * unit_bytes, unit_bytes) + block
    return (
        start + byte,
        unit * unit_bytes + byte < size,
        scales,
        unit * UNIT + block * FORM.block < n,
    )


@triton.jit
def _shifts(FORM: tl.constexpr):
    """Return the position of each code in its byte."""
    return (tl.arange(0, 8 // FORM.bits) * FORM.bits)[None, None, :]


@triton.jit
def _decoded(payload, n, size, FORM: tl.constexpr):
    """Return the values of this unit, fp32 [blocks, values of a block]."""
    addresses, sent, scales, scaled = _layout(payload, n, size, FORM)
    byte = tl.load(addresses, mask=sent, other=0).to(tl.int32)
    code = tl.reshape(byte[:, :, None] >> _shifts(FORM), (UNIT // FORM.block, FORM.block))
    scale = tl.load(scales, mask=scaled, other=BIAS).to(tl.int32)
    return _in_steps(code & (2**FORM.bits - 1), FORM) * _step(scale, FORM)[:, None]


@triton.jit
def _step(scale, FORM: tl.constexpr):
    step = ((scale + FORM.unit_exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(scale == NOT_FINITE_SCALE, float("nan"), step)


@triton.jit
def _whole_code(magnitude, word):
    # fp32 has steps of 1 from 2**23 on, so the sum is rounded to an integer.
    number = (magnitude + TWO_TO_23).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(word < 0, -number, number) & 0xFF


@triton.jit
def _float_code(magnitude, word, FORM: tl.constexpr):
    cut: tl.constexpr = 23 - FORM.mantissa
    moved = magnitude * 0.5 + 2.0 ** (FORM.mantissa - 1)
    number = tl.maximum(magnitude, moved).to(tl.int32, bitcast=True)
    number = ((number + (1 << (cut - 1))) >> cut) - ((126 + FORM.mantissa) << FORM.mantissa)
    return number | (word < 0).to(tl.int32) << (FORM.bits - 1)


@triton.jit
def _in_steps(code, FORM: tl.constexpr):
    """Return the grid value of each code in steps. For small floats, undo the move in
    `_float_code`: below 2**M, 2 * moved - 2**M is the smaller number."""
    if FORM.mantissa < 0:
        steps = ((code << 24) >> 24).to(tl.float32)
    else:
        number = (code & (2 ** (FORM.bits - 1) - 1)) + ((126 + FORM.mantissa) << FORM.mantissa)
        moved = (number << (23 - FORM.mantissa)).to(tl.float32, bitcast=True)
        steps = tl.minimum(moved, 2.0 * moved - 2.0**FORM.mantissa)
        sign = (code >> (FORM.bits - 1)) << 31
        steps = (steps.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return steps


@triton.jit
def encode_largest_of_units(values, payload, n, TOP: tl.constexpr):
    """Compute TopKCodec.encode(). Two entries of 12 bits are stored in 3 bytes."""
    unit = tl.program_id(0).to(tl.int64)
    here = values + unit * UNIT
    rank = tl.arange(0, UNIT)
    word = tl.load(here + rank, mask=unit * UNIT + rank < n, other=0.0).to(tl.int32, bitcast=True)
    order = tl.sort((word & ORDER) | (UNIT - 1 - rank), descending=True)
    place = UNIT - 1 - (order & (UNIT - 1))
    real = (rank < TOP) & (unit * UNIT + place < n)
    sent = tl.load(here + place, mask=real, other=0.0).to(tl.int32, bitcast=True)
    high = tl.max(sent & SCALE)
    low = tl.max(tl.where(rank == TOP - 1, sent & SCALE, 0))
    least = low.to(tl.float32, bitcast=True)
    greatest = high.to(tl.float32, bitcast=True)
    magnitude = (sent & MAGNITUDE).to(tl.float32, bitcast=True)
    is_upper = magnitude > least + (greatest - least) * CUT
    entry = place | is_upper.to(tl.int32) << PLACE_BITS
    entry |= (sent < 0).to(tl.int32) << (PLACE_BITS + 1)

    pair_bytes: tl.constexpr = ENTRY_BITS // 4
    start = payload + unit * (TOP // 2 * pair_bytes + 4)
    shifts = tl.arange(0, 2) * ENTRY_BITS
    pair = tl.sum(tl.reshape(entry, (UNIT // 2, 2)) << shifts[None, :], axis=1)
    number = tl.arange(0, UNIT // 2)
    byte = tl.arange(0, 4)
    addresses = start + number[:, None] * pair_bytes + byte[None, :]
    stored = (number[:, None] < TOP // 2) & (byte[None, :] < pair_bytes)
    tl.store(addresses, (pair[:, None] >> 8 * byte[None, :]).to(tl.uint8), mask=stored)
    scales = (low >> 16) | high
    tl.store(start + TOP // 2 * pair_bytes + byte, (scales >> 8 * byte).to(tl.uint8))
