# mypy: ignore-errors
# (Triton's language has Python's syntax, but not its types.)
"""The formats of blocks.py as Triton kernels, which make the same bits: what each line has to compute is written there, in
minifloat.py, integer.py and dither.py. What a torch pass over memory is there is a line here, on values that stay in registers.

One program works on one unit of 1024 values, as a tile of its blocks: [blocks, values of a block]. Beyond the last value
tiles are filled up with zeros, which the masks keep from being stored.

What keeps the bits the same: everything is scaled by powers of two, so products are exact; sums that round (of values and
residuals, of magnitudes and noise) are one fp32 operation each, and the launch forbids the compiler to merge them with a
product (`enable_fp_fusion` in fused.py). Triton keeps subnormal numbers.
"""

import triton
import triton.language as tl

from torchtitan_diloco.diloco.codecs import blocks, dither
from torchtitan_diloco.diloco.codecs.base import UNIT as _UNIT

UNIT = tl.constexpr(_UNIT)
BIAS, LOWEST, NOT_FINITE = (
    tl.constexpr(number) for number in (blocks.BIAS, blocks.LOWEST, blocks.NOT_FINITE)
)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
STRIDE = tl.constexpr(dither._STRIDE % 2**32)
MIX_1 = tl.constexpr(dither._MIX_1 % 2**32)
MIX_2 = tl.constexpr(dither._MIX_2 % 2**32)
TWO_TO_23 = tl.constexpr(2.0**23)
LOW_HALF = tl.constexpr(0xFFFF)
PART = tl.constexpr(2.0**-dither.BITS)


@triton.jit(do_not_specialize=["draw_start", "draw_key"])
def encode_units(
    values,
    residual,
    payload,
    n,
    all_octets,
    draw_start,
    draw_key,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    UNIT_EXPONENT: tl.constexpr,
    TOP_EXPONENT: tl.constexpr,
    CARRY: tl.constexpr,
    HIGHEST: tl.constexpr,
    MOST_STEPS: tl.constexpr,
):
    """values (+ residual) -> payload, and with FEEDBACK what is lost -> residual. `all_octets`: bytes that the codes of all n
    values take. (Were it found here, it would not be known to be a multiple of 16, and bytes be stored one by one.)"""
    first = tl.program_id(0).to(tl.int64) * UNIT
    inside = _inside(BLOCK)
    real = first + inside < n
    x = tl.load(values + first + inside, mask=real, other=0.0)
    if FEEDBACK:
        x += tl.load(residual + first + inside, mask=real, other=0.0)

    # Bits of magnitudes are ordered as the magnitudes are, with infinity and NaN above all of them.
    word = x.to(tl.int32, bitcast=True)
    largest = tl.max(word & MAGNITUDE, axis=1)
    exponent = ((largest + CARRY) >> 23) - TOP_EXPONENT
    exponent = tl.minimum(tl.maximum(exponent, LOWEST), HIGHEST)
    scale = tl.where(largest >= INFINITY, NOT_FINITE, exponent)

    in_steps = ((-exponent + (2 * BIAS - UNIT_EXPONENT)) << 23).to(tl.float32, bitcast=True)
    magnitude = (word & MAGNITUDE).to(tl.float32, bitcast=True) * in_steps[:, None]
    magnitude = tl.where((scale == NOT_FINITE)[:, None], 0.0, tl.minimum(magnitude, MOST_STEPS))
    noise = inside
    if STOCHASTIC:
        noise = _draw(first, inside, draw_start, draw_key)
    if MANTISSA < 0:
        code = _whole_code(magnitude, word, noise, STOCHASTIC)
    else:
        code = _float_code(magnitude, word, noise, STOCHASTIC, BITS, MANTISSA)
    if FEEDBACK:
        decoded = _in_steps(code, BITS, MANTISSA) * _of_steps(scale, UNIT_EXPONENT)[:, None]
        tl.store(residual + first + inside, x - decoded, mask=real)

    octets, sent, scales, scaled = _layout(payload, n, all_octets, BLOCK, BITS)
    parts = tl.reshape(code, (UNIT // BLOCK, BLOCK * BITS // 8, 8 // BITS)) << _shifts(BITS)
    tl.store(octets, tl.sum(parts, axis=2).to(tl.uint8), mask=sent)
    tl.store(scales, scale.to(tl.uint8), mask=scaled)


@triton.jit
def average_units(
    payloads,
    shares,
    out,
    n,
    all_octets,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    UNIT_EXPONENT: tl.constexpr,
):
    """The running mean of COUNT payloads -> out: shares[i] is the weight of payload i in the mean of those up to it.
    shares[0] is not looked at, and the mean of one payload is what it decodes to.

    torch.lerp has two formulas, one of them exact at either end, and takes the end that is nearer. It is one fused
    multiply-add here, the same on every GPU. torch has one on CPUs with AVX2 or AVX512; where its compiler made two
    operations of it, which round twice, the last bit of a mean differs: workers have to use the same (startup.py)."""
    first = tl.program_id(0).to(tl.int64) * UNIT
    inside = _inside(BLOCK)
    mean = _decoded(payloads[0], n, all_octets, BLOCK, BITS, MANTISSA, UNIT_EXPONENT)
    for number in tl.static_range(1, COUNT):
        value = _decoded(payloads[number], n, all_octets, BLOCK, BITS, MANTISSA, UNIT_EXPONENT)
        share = tl.full(mean.shape, shares[number], tl.float32)
        near = share < 0.5
        mean = tl.fma(tl.where(near, share, share - 1.0), value - mean, tl.where(near, mean, value))
    tl.store(out + first + inside, mean, mask=first + inside < n)


@triton.jit
def _inside(BLOCK: tl.constexpr):
    """[blocks, BLOCK]: number of each value within its unit."""
    return tl.arange(0, UNIT // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _layout(payload, n, all_octets, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Where this program's unit lies in a payload: addresses of its bytes of codes, [blocks, bytes of a block's codes],
    and which of them there are; the same of its scales, [blocks]."""
    BLOCKS: tl.constexpr = UNIT // BLOCK
    OCTETS: tl.constexpr = BLOCK * BITS // 8
    unit = tl.program_id(0).to(tl.int64)
    start = payload + unit * (UNIT * BITS // 8 + BLOCKS)
    octet = tl.arange(0, BLOCKS)[:, None] * OCTETS + tl.arange(0, OCTETS)[None, :]
    block = tl.arange(0, BLOCKS)
    code_bytes = tl.minimum(all_octets - unit * (UNIT * BITS // 8), UNIT * BITS // 8)
    sent = unit * (UNIT * BITS // 8) + octet < all_octets
    return start + octet, sent, start + code_bytes + block, unit * UNIT + block * BLOCK < n


@triton.jit
def _shifts(BITS: tl.constexpr):
    """Where in a byte its codes stand."""
    return (tl.arange(0, 8 // BITS) * BITS)[None, None, :]


@triton.jit
def _decoded(
    payload,
    n,
    all_octets,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    UNIT_EXPONENT: tl.constexpr,
):
    """fp32 [blocks, BLOCK]: the values of a unit."""
    octets, sent, scales, scaled = _layout(payload, n, all_octets, BLOCK, BITS)
    octet = tl.load(octets, mask=sent, other=0).to(tl.int32)
    code = tl.reshape(octet[:, :, None] >> _shifts(BITS), (UNIT // BLOCK, BLOCK)) & (2**BITS - 1)
    scale = tl.load(scales, mask=scaled, other=BIAS).to(tl.int32)
    return _in_steps(code, BITS, MANTISSA) * _of_steps(scale, UNIT_EXPONENT)[:, None]


@triton.jit
def _of_steps(scale, UNIT_EXPONENT: tl.constexpr):
    step = ((scale + UNIT_EXPONENT) << 23).to(tl.float32, bitcast=True)
    return tl.where(scale == NOT_FINITE, float("nan"), step)


@triton.jit
def _whole_code(magnitude, word, noise, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        number = (magnitude + noise.to(tl.float32) * PART).to(
            tl.int32
        )  # of a number that is not negative: the floor
    else:  # numbers have steps of 1 from 2**23 on, so the sum is rounded to a whole one, ties to even
        number = (magnitude + TWO_TO_23).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(word < 0, -number, number) & 0xFF


@triton.jit
def _float_code(
    magnitude, word, noise, STOCHASTIC: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr
):
    CUT: tl.constexpr = 23 - MANTISSA
    moved = magnitude * 0.5 + 2.0 ** (MANTISSA - 1)
    number = tl.maximum(magnitude, moved).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        number += noise << (CUT - 16)
    else:
        number += 1 << (CUT - 1)
    number = (number >> CUT) - ((126 + MANTISSA) << MANTISSA)
    return number | (word < 0).to(tl.int32) << (BITS - 1)


@triton.jit
def _in_steps(code, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """The grid value of a code. That of a small float is found by undoing the move in minifloat.py's _pack: below 2**M
    twice the moved number less 2**M is the smaller of the two, above it the number itself."""
    if MANTISSA < 0:
        steps = ((code << 24) >> 24).to(tl.float32)
    else:
        number = (code & (2 ** (BITS - 1) - 1)) + ((126 + MANTISSA) << MANTISSA)
        moved = (number << (23 - MANTISSA)).to(tl.float32, bitcast=True)
        steps = tl.minimum(moved, 2.0 * moved - 2.0**MANTISSA)
        sign = (code >> (BITS - 1)) << 31
        steps = (steps.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return steps


@triton.jit
def _draw(first, inside, draw_start, draw_key):
    """int32, uniform in 0 ... 2**16 - 1, as dither.draw()."""
    pair = ((first + inside) >> 1).to(tl.uint32)
    word = pair * STRIDE + draw_start.to(tl.uint32)
    word = (word ^ (word >> 16)) * MIX_1
    word = word ^ draw_key.to(tl.uint32)
    word = (word ^ (word >> 13)) * MIX_2
    word = word ^ (word >> 16)
    return ((word >> ((inside & 1) * 16).to(tl.uint32)) & LOW_HALF).to(tl.int32)
