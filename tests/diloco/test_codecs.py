"""Wire formats: properties of all of them, and their bits as docs/algorithm.md defines them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_diloco.diloco.codecs import UNIT, Codec, bits_per_parameter, build_codec
from torchtitan_diloco.diloco.codecs.blocks import Int8Codec
from torchtitan_diloco.diloco.config import BLOCK_SIZES, Quantization
from torchtitan_diloco.diloco.formats import FORMATS, Format, small_float

BLOCK_CODECS = [name for name, form in FORMATS.items() if "block_size" in form.reads]

every_codec = pytest.mark.parametrize("name", FORMATS)
every_block_codec = pytest.mark.parametrize("name", BLOCK_CODECS)
examples = settings(max_examples=40, deadline=None)
blocks = st.sampled_from(BLOCK_SIZES)


def build(name: str, **options: Any) -> Codec:
    return build_codec(Quantization(codec=name, **options))


def encoded(codec: Codec, values: Tensor) -> Tensor:
    payload = torch.full((codec.wire_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values.clone(), payload)
    return payload


def decoded(codec: Codec, payload: Tensor, values: int) -> Tensor:
    arrived = torch.full((values,), 123.0)
    codec.decode(payload, arrived)
    return arrived


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), values.numel())


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """Values of any number: of very different size, repeated, sparse, on the grid and between."""
    edges = st.sampled_from([1023, 1024, 1025, 2047, 2048, 3000])
    length = draw(st.one_of(st.integers(0, 70), edges))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(length, generator=generator)
    if draw(st.booleans()):
        exponents = torch.randint(-60, 60, (-(-length // 16),), generator=generator)
        values = torch.ldexp(values, exponents.repeat_interleave(16)[:length])
    kind = draw(st.sampled_from(["plain", "sparse", "negative", "constant", "coarse"]))
    if kind == "sparse":
        return values * (torch.rand(length, generator=generator) < 0.2)
    if kind == "negative":
        return -values.abs()
    if kind == "constant":
        return values[:1].repeat(length)
    return (values * 8).round() / 8 if kind == "coarse" else values


# --- the definition of docs/algorithm.md, in plain Python -----------------------------------------

# Bits of the exponent and of the mantissa, bias, largest value.
LAYOUTS = {
    "fp8_e4m3": (4, 3, 7, 448.0),
    "fp8_e5m2": (5, 2, 15, 57344.0),
    "fp4_e2m1": (2, 1, 1, 6.0),
    "fp4_e3m0": (3, 0, 3, 16.0),
}


def bits_of(name: str) -> int:
    return 8 if name == "int8" else 1 + sum(LAYOUTS[name][:2])


def grid_value(name: str, code: int) -> float:
    if name == "int8":
        return float(code - 256 if code > 127 else code)
    exponent_bits, mantissa_bits, bias, _ = LAYOUTS[name]
    sign, magnitude = divmod(code, 2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = divmod(magnitude, 2**mantissa_bits)
    significand = (mantissa if exponent == 0 else 2**mantissa_bits + mantissa) / 2**mantissa_bits
    return math.ldexp(-significand if sign else significand, max(exponent, 1) - bias)


def read_by_the_book(name: str, block: int, payload: bytes, values: int) -> Iterator[float]:
    bits = bits_of(name)
    position = 0
    for start in range(0, values, UNIT):
        size = min(UNIT, values - start)
        code_bytes = -(-size * bits // 8)
        codes = int.from_bytes(payload[position : position + code_bytes], "little")
        scales = payload[position + code_bytes :]
        for index in range(size):
            scale = scales[index // block]
            value = grid_value(name, codes >> (index * bits) & (2**bits - 1))
            yield math.nan if scale == 255 else value * 2.0 ** (scale - 127)
        position += code_bytes + -(-size // block)
    assert position == len(payload)


def neighbors(name: str, block: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """The grid values below and above each value, the same if it is on the grid, as float64."""
    top = 127.0 if name == "int8" else LAYOUTS[name][3]
    grid = {grid_value(name, code) for code in range(2 ** bits_of(name))}
    points = torch.tensor(sorted(point for point in grid if abs(point) <= top)).double()
    below = [torch.empty(0)]
    above = [torch.empty(0)]
    for unit in values.double().split(UNIT):  # blocks begin anew with every unit
        for part in unit.split(block):
            largest = part.abs().max().item() if len(part) else 0.0
            exponent = -100
            while largest > top * 2.0**exponent:
                exponent += 1
            scaled = points * 2.0**exponent
            below.append(scaled[torch.searchsorted(scaled, part, right=True) - 1])
            above.append(scaled[torch.searchsorted(scaled, part)])
    return torch.cat(below), torch.cat(above)


# --- properties -----------------------------------------------------------------------------------


@every_codec
@examples
@given(values=inputs(), block=blocks, cut=st.integers(0, 3), offset=st.integers(0, 3))
def test_pieces_anywhere_in_memory_are_encoded_as_the_whole(
    name: str, values: Tensor, block: int, cut: int, offset: int
) -> None:
    codec = build(name, block_size=block)
    size = cut * UNIT
    whole = encoded(codec, values)
    expected = round_trip(codec, values)
    skipped = offset * {"fp32": 4, "bf16": 2}.get(name, 1)
    room = torch.zeros(skipped + len(whole), dtype=torch.uint8)[skipped:]
    source = torch.cat((torch.ones(offset), values))[offset:]
    target = torch.zeros(9999)[offset:]
    parts = room.tensor_split([codec.wire_bytes(len(values[:size]))])
    for part, payload in zip((source[:size], source[size:]), parts, strict=True):
        codec.encode(part, payload)
    assert torch.equal(room, whole)
    arrived = target[: len(values)]
    for part, payload in zip((arrived[:size], arrived[size:]), parts, strict=True):
        codec.decode(payload, part)
    assert same_bits(arrived, expected)


@every_block_codec
@examples
@given(values=inputs(), block=blocks)
def test_values_are_rounded_to_the_grid_that_the_documentation_defines(
    name: str, values: Tensor, block: int
) -> None:
    codec = build(name, block_size=block)
    payload = encoded(codec, values)
    arrived = decoded(codec, payload, len(values))
    by_the_book = list(read_by_the_book(name, block, bytes(payload.tolist()), len(values)))
    assert same_bits(arrived, torch.tensor(by_the_book))
    below, above = neighbors(name, block, values)
    assert ((arrived == below) | (arrived == above)).all()
    nearest = torch.minimum(values - below, above - values)
    assert ((arrived.double() - values).abs() <= nearest + 1e-6 * (above - below)).all()


# --- the largest values ---------------------------------------------------------------------------


@examples
@given(first=inputs(), seed=st.integers(0, 100), equal=st.booleans())
def test_a_mean_is_over_those_who_send_a_value(first: Tensor, seed: int, equal: bool) -> None:
    """Not over zeros, with which a unit of fewer values than entries is filled up."""
    codec = build("topk")
    generator = torch.Generator().manual_seed(seed)
    others = [torch.randn(len(first), generator=generator) for _ in range(2)]
    values = [first, *others]
    weights = [1.0] * 3 if equal else [49.0, 0.5, 7.0]
    arrived = torch.stack([round_trip(codec, value) for value in values])
    mean = torch.zeros(len(first))
    total = torch.zeros(len(first))
    for value, weight in zip(arrived, weights, strict=True):
        sent = value != 0
        total[sent] += weight
        mean[sent] += (value[sent] - mean[sent]) * (weight / total[sent])
    got = torch.full_like(first, 123.0)
    codec.average([encoded(codec, value) for value in values], weights, got)
    torch.testing.assert_close(got, mean, rtol=1e-6, atol=1e-6)
    by_one = (arrived != 0).sum(0) == 1
    assert same_bits(got[by_one], arrived.sum(0)[by_one]), "what one sends arrives as it is"
    assert not got[(arrived == 0).all(0)].any()


@examples
@given(values=inputs(), top=st.integers(1, 128).map(lambda half: 2 * half))
def test_the_largest_values_are_sent_as_one_of_two_levels(values: Tensor, top: int) -> None:
    arrived = round_trip(build("topk", top_values=top), values)
    for value, got in zip(values.split(UNIT), arrived.split(UNIT), strict=True):
        sent = got != 0
        magnitudes = value.abs()
        assert torch.equal(got.sign()[sent], value.sign()[sent])
        assert len(got.abs().unique()) <= 3
        if 0 < sent.sum() < len(value):  # bf16 has 8 bits of a magnitude
            least = magnitudes[sent].min()
            greatest = magnitudes.max()
            assert magnitudes[~sent].max() <= least * (1 + 2**-7)
            assert got.abs().max() <= greatest
            assert got[sent].abs().min() >= 0.7 * least
        if len(value) > top:
            assert sent.sum() <= top
            if magnitudes.topk(top).values[-1] > 1e-30:  # of a normal number: bf16 keeps it
                assert sent.sum() == top


# --- hard inputs ----------------------------------------------------------------------------------


@every_block_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_leaves_others_alone(name: str, value: float) -> None:
    codec = build(name, block_size=32)
    clean = torch.linspace(-1, 1, 1100)
    for index in (40, 1023, 1099):
        values = clean.clone()
        values[index] = value
        arrived = round_trip(codec, values)
        expected = round_trip(codec, clean)
        broken = torch.arange(1100) // 32 == index // 32
        assert arrived[broken].isnan().all()
        assert same_bits(arrived[~broken], expected[~broken])


@every_codec
def test_the_smallest_and_largest_numbers(name: str) -> None:
    codec = build(name)
    largest = torch.finfo(torch.float32).max
    assert not round_trip(codec, torch.zeros(100)).any()
    tiny = torch.full((100,), 1e-45)
    arrived = round_trip(codec, tiny)
    assert same_bits(arrived, tiny) or not arrived.any()
    mixed = torch.tensor([1e-40, -1.0, 1e-38, 0.5] * 16)
    assert same_bits(round_trip(codec, mixed).view(-1, 4)[:, 1], torch.full((16,), -1.0))
    if name in BLOCK_CODECS:
        arrived = round_trip(codec, torch.tensor([largest, -largest, largest / 3, 1e30] * 16))
        assert arrived.isfinite().all(), "they saturate"
        assert (arrived[0] >= largest * 0.2) & (arrived[1] <= -largest * 0.2)


# --- bits and sizes -------------------------------------------------------------------------------

GOLDEN_INPUT = torch.tensor(
    [0.0, 1.0, -0.3, 0.07, 2.5, -6.0, 5.0, 0.26, -1e-3, 3.5] + [0.01 * i for i in range(9)]
)
GOLDEN = """
bf16     0000803f9abe8f3d2040c0c0a040853e83ba60400000243ca43cf63c243d4d3d763d8f3da43d
fp8_e4m3 0068da4972fc7a58987600323a3f424577797a7973
fp8_e5m2 0070e96075fa7968c8770055595c5d5e787879726c
int8     0010fb0128a0500400380000000001013d48527b75
fp4_e2m1 2009f5176800000066077f79
fp4_e3m0 401af5266800000066067e78
topk     056c4009440001208007200103100110f0000ed0000cb000233cc040
"""


@pytest.mark.parametrize("line", GOLDEN.strip().splitlines())
def test_golden_payloads(line: str) -> None:
    name, payload = line.split()
    assert bytes(encoded(build(name, block_size=16), GOLDEN_INPUT).tolist()).hex() == payload


def test_every_format_has_its_bits_here() -> None:
    """fp32 has those of the values themselves. Add the lines that are missing."""
    golden = {line.split()[0] for line in GOLDEN.strip().splitlines()}
    assert golden == FORMATS.keys() - {"fp32"}
    assert LAYOUTS.keys() == {*BLOCK_CODECS} - {"int8"}


def test_bits_per_parameter() -> None:
    wires = {
        Quantization("fp4_e3m0"): 4.125,
        Quantization("fp4_e2m1", block_size=32): 4.25,
        Quantization("topk", top_values=10): 0.1484375,
        Quantization("topk"): 0.21875,
    }
    assert {wire: bits_per_parameter(build_codec(wire)) for wire in wires} == wires


class Int4Codec(Int8Codec):
    """Integers that the kernels would take for bytes."""

    bits = 4
    top = 7.0


def test_formats_that_cannot_be_packed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "int4", Format(build=Int4Codec))
    monkeypatch.setitem(FORMATS, "fp2", small_float(exponent=1, mantissa=0, bias=0, top=1.0))
    with pytest.raises(ValueError, match="format int4 has codes of 4 bits: integers of 8 bits can"):
        build("int4")
    with pytest.raises(ValueError, match="codes of 2 bits: floats of 8 or 4 bits can be packed"):
        build("fp2")


def test_integers_of_4_bits_are_floats_with_one_bit_of_exponent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = small_float(exponent=1, mantissa=2, bias=-1, top=7.0)
    monkeypatch.setitem(FORMATS, "int4", form)
    codec = build("int4")
    for scale in (2.0**-90, 1.0, 2.0**120):
        values = scale * torch.arange(-7, 8).float()
        assert torch.equal(round_trip(codec, values), values)
