"""Wire formats: properties that hold for every one of them, and their bits."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_diloco.diloco.codecs import (
    CODECS,
    UNIT,
    Codec,
    Place,
    build_codec,
    build_gather_codec,
)
from torchtitan_diloco.diloco.config import BLOCK_SIZES, Quantization

BLOCK_CODECS = [name for name in CODECS if name not in ("fp32", "bf16")]
EXAMPLES = settings(max_examples=40, deadline=None)


def build(name: str, **chosen: object) -> Codec:
    return build_codec(Quantization(codec=name, **chosen))  # type: ignore[arg-type]


def encoded(codec: Codec, values: Tensor, place: Place = Place()) -> Tensor:  # noqa: B008
    payload = torch.full((codec.wire_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values.clone(), payload, place)
    return payload


def decoded(codec: Codec, payload: Tensor, values: int) -> Tensor:
    arrived = torch.full((values,), 123.0)
    codec.decode(payload, arrived)
    return arrived


def round_trip(codec: Codec, values: Tensor, place: Place = Place()) -> Tensor:  # noqa: B008
    return decoded(codec, encoded(codec, values, place), values.numel())


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# --- the definition of docs/wire-formats.md, in plain Python ---------------------------------------------------------

LAYOUTS = {
    "fp8_e4m3": (4, 3, 7, 448.0),
    "fp8_e5m2": (5, 2, 15, 57344.0),
    "fp4_e2m1": (2, 1, 1, 6.0),
    "fp4_e3m0": (3, 0, 3, 16.0),
    "ternary": (1, 0, 1, 1.0),
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


def grid(name: str) -> list[float]:
    """All values a code is used for, from below."""
    top = 127.0 if name == "int8" else LAYOUTS[name][3]
    return sorted(
        {value for code in range(2 ** bits_of(name)) if abs(value := grid_value(name, code)) <= top}
    )


def read_by_the_book(name: str, block: int, payload: bytes, values: int) -> Iterator[float]:
    bits, position = bits_of(name), 0
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


# --- inputs ----------------------------------------------------------------------------------------------------------


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """Of any length, with blocks of very different size, exact zeros and repeated values among them."""
    length = draw(
        st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 2047, 2048, 3000]))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(length, generator=generator)
    exponents = torch.randint(-60, 60, (-(-length // 16),), generator=generator) * draw(
        st.sampled_from([0, 1])
    )
    values *= torch.ldexp(torch.ones(len(exponents)), exponents).repeat_interleave(16)[:length]
    kind = draw(st.sampled_from(["plain", "sparse", "negative", "constant", "coarse"]))
    if kind == "sparse":
        values *= torch.rand(length, generator=generator) < 0.2
    if kind == "negative":
        values = -values.abs()
    if kind == "constant" and length:
        values[:] = values[0].clone()
    if kind == "coarse":  # ties and exact grid values
        values = (values * 8).round() / 8
    return values


chosen = st.fixed_dictionaries({"block_size": st.sampled_from(BLOCK_SIZES)})
rounding = st.sampled_from(["nearest", "stochastic"])


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@EXAMPLES
@given(
    values=inputs(),
    options=chosen,
    rounding=rounding,
    cut=st.integers(0, 3),
    key=st.integers(0, 2**64 - 1),
)
def test_pieces_are_encoded_as_the_whole(
    name: str, values: Tensor, options: dict[str, int], rounding: str, cut: int, key: int
) -> None:
    codec = build(name, **options, rounding=rounding)
    whole = encoded(codec, values, Place(key))
    head, tail = values[: cut * UNIT], values[cut * UNIT :]
    first, second = (
        encoded(codec, head, Place(key)),
        encoded(codec, tail, Place(key, cut * UNIT) if len(tail) else Place()),
    )
    assert torch.equal(whole, torch.cat((first, second)))
    assert same_bits(
        decoded(codec, whole, len(values)),
        torch.cat((round_trip(codec, head, Place(key)), decoded(codec, second, len(tail)))),
    )


@pytest.mark.parametrize("name", CODECS)
@EXAMPLES
@given(values=inputs(), options=chosen, offset=st.integers(0, 3))
def test_the_place_in_memory_does_not_matter(
    name: str, values: Tensor, options: dict[str, int], offset: int
) -> None:
    codec = build(name, **options)
    shifted = torch.cat((torch.ones(offset), values))[offset:]
    step = 2 if name == "bf16" else 4 if name == "fp32" else 1
    room = torch.zeros(step * offset + codec.wire_bytes(len(values)), dtype=torch.uint8)[
        step * offset :
    ]
    codec.encode(shifted, room)
    assert torch.equal(room, encoded(codec, values))
    target = torch.zeros(offset + len(values))[offset:]
    codec.decode(room, target)
    assert same_bits(target, round_trip(codec, values))


def neighbours(name: str, block: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the grid on both sides, the same if a value is on the grid: float64."""
    points, below, above = torch.tensor(grid(name), dtype=torch.float64), [], []
    for unit in values.double().split(UNIT):  # blocks begin anew with every unit
        for part in unit.split(block):
            largest, exponent = part.abs().max().item() if len(part) else 0.0, -100
            while largest > points[-1] * 2.0**exponent:
                exponent += 1
            scaled = points * 2.0**exponent
            below.append(scaled[torch.searchsorted(scaled, part, right=True) - 1])
            above.append(scaled[torch.searchsorted(scaled, part)])
    return torch.cat([torch.empty(0), *below]), torch.cat([torch.empty(0), *above])


@pytest.mark.parametrize("name", BLOCK_CODECS)
@EXAMPLES
@given(values=inputs(), options=chosen)
def test_values_become_the_nearest_of_the_grid(
    name: str, values: Tensor, options: dict[str, int]
) -> None:
    arrived = round_trip(build(name, **options), values).double()
    below, above = neighbours(name, options["block_size"], values)
    nearest = torch.minimum(values - below, above - values)
    assert ((arrived == below) | (arrived == above)).all()
    assert ((arrived - values).abs() <= nearest + 1e-6 * (above - below)).all()


@pytest.mark.parametrize("name", BLOCK_CODECS)
@EXAMPLES
@given(values=inputs(), options=chosen, key=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_takes_one_of_the_neighbours(
    name: str, values: Tensor, options: dict[str, int], key: int
) -> None:
    codec = build(name, **options, rounding="stochastic")
    arrived = round_trip(codec, values, Place(key))
    below, above = neighbours(name, options["block_size"], values)
    assert ((arrived == below) | (arrived == above)).all()
    assert same_bits(arrived, round_trip(codec, values, Place(key))), (
        "a function of the key and the place"
    )


@pytest.mark.parametrize("name", CODECS)
@EXAMPLES
@given(values=inputs(), options=chosen, rounding=rounding)
def test_the_grid_is_kept_exactly(
    name: str, values: Tensor, options: dict[str, int], rounding: str
) -> None:
    codec = build(name, **options, rounding=rounding)
    arrived = round_trip(codec, values, Place(7))
    assert same_bits(round_trip(codec, arrived, Place(8)), arrived)


@pytest.mark.parametrize("name", BLOCK_CODECS)
@EXAMPLES
@given(values=inputs(), options=chosen, rounding=rounding)
def test_a_payload_reads_as_the_documentation_says(
    name: str, values: Tensor, options: dict[str, int], rounding: str
) -> None:
    codec = build(name, **options, rounding=rounding)
    payload = encoded(codec, values)
    by_the_book = torch.tensor(
        list(read_by_the_book(name, options["block_size"], bytes(payload.tolist()), len(values)))
    )
    assert same_bits(decoded(codec, payload, len(values)), by_the_book)


@pytest.mark.parametrize("name", CODECS)
@EXAMPLES
@given(values=inputs(), rounding=rounding)
def test_feedback_keeps_what_was_lost(name: str, values: Tensor, rounding: str) -> None:
    codec = build(name, rounding=rounding)
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(len(values), generator=generator) * values.abs()
    wanted = values + residual
    payload = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8)
    codec.encode_with_feedback(values.clone(), residual, payload)
    assert torch.equal(payload, encoded(codec, wanted))
    assert same_bits(residual, wanted - decoded(codec, payload, len(values)))


@pytest.mark.parametrize("name", CODECS)
def test_means_are_taken_in_fp32_and_in_order(name: str) -> None:
    codec, generator = build(name), torch.Generator().manual_seed(2)
    values = [torch.randn(1500, generator=generator) for _ in range(3)]
    payloads, weights = [encoded(codec, one) for one in values], [1.0, 3.0, 2.0]
    out, mean, total = torch.zeros(1500), torch.zeros(1500), 0.0
    codec.average(payloads, weights, out)
    for value, weight in zip(values, weights, strict=True):
        total += weight
        mean = torch.lerp(mean, round_trip(codec, value), weight / total)
    assert same_bits(out, mean)
    codec.average(payloads[1:2], [5.0], out)
    assert same_bits(out, round_trip(codec, values[1]))


# --- hard inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_what_is_not_finite_stays_in_its_block(name: str, rounding: str) -> None:
    codec = build(name, block_size=32, rounding=rounding)
    clean = torch.linspace(-1, 1, 1100)
    for spoiled in (math.nan, math.inf, -math.inf):
        for place in (40, 1023, 1099):
            values = clean.clone()
            values[place] = spoiled
            arrived, expected = round_trip(codec, values), round_trip(codec, clean)
            block = torch.arange(1100) // 32 == place // 32
            assert arrived[block].isnan().all()
            assert same_bits(arrived[~block], expected[~block])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_the_smallest_numbers(name: str, rounding: str) -> None:
    codec = build(name, rounding=rounding)
    assert not round_trip(codec, torch.zeros(100)).any()
    tiny = torch.full((100,), 1e-45)
    arrived = round_trip(codec, tiny)
    assert same_bits(arrived, tiny) or not arrived.any()
    mixed = torch.tensor([1e-40, -1.0, 1e-38, 0.5] * 16)
    assert same_bits(round_trip(codec, mixed).view(-1, 4)[:, 1], torch.full((16,), -1.0))


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_the_largest_numbers_stay_finite(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, largest / 3, 1e30] * 16)
    arrived = round_trip(build(name), values)
    assert arrived.isfinite().all()
    assert (arrived[0] >= largest * 0.2) & (arrived[1] <= -largest * 0.2), "they saturate"


@pytest.mark.parametrize("name", [*BLOCK_CODECS, "bf16"])
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    codec, generator = build(name, rounding="stochastic"), torch.Generator().manual_seed(3)
    values, rounds = torch.randn(4096, generator=generator), 200
    arrived = torch.stack([round_trip(codec, values, Place(key)) for key in range(rounds)]).double()
    spread = arrived.std(dim=0) / math.sqrt(rounds)
    off = arrived.mean(dim=0) - values
    assert off.norm() <= 1.1 * spread.norm(), "each value: no further than chance takes it"
    assert abs((off @ values.double()).item()) <= 5 * (spread * values).norm().item(), (
        "no pull to zero or away from it"
    )


def test_the_draws_of_neighbours_and_rounds_are_independent() -> None:
    codec = build("ternary", rounding="stochastic", block_size=1024)
    half = torch.full((UNIT * 16,), 0.5)
    half[::UNIT] = 1.0
    up = torch.stack([round_trip(codec, half, Place(key)) for key in range(64)]).double()[:, 1:UNIT]
    assert abs(up.mean().item() - 0.5) < 0.01
    centred = up - 0.5
    assert abs((centred[:, 1:] * centred[:, :-1]).mean().item()) < 0.01, "neighbours"
    assert abs((centred[1:] * centred[:-1]).mean().item()) < 0.01, "rounds"


# --- bits ------------------------------------------------------------------------------------------------------------

GOLDEN_INPUT = torch.tensor(
    [0.0, 1.0, -0.3, 0.07, 2.5, -6.0, 5.0, 0.26, -1e-3, 3.5] + [0.01 * i for i in range(9)]
)


@pytest.mark.parametrize(
    ("name", "rounding", "payload"),
    [
        (
            "bf16",
            "nearest",
            "0000803f9abe8f3d2040c0c0a040853e83ba60400000243ca43cf63c243d4d3d763d8f3da43d",
        ),
        (
            "bf16",
            "stochastic",
            "0000803f99be8f3d2040c0c0a040853e83ba60400000243ca43cf63c243d4d3d763d903da43d",
        ),
        ("fp8_e4m3", "nearest", "0068da4972fc7a58987600323a3f424577797a7973"),
        ("fp8_e4m3", "stochastic", "0068d94972fc7a59997600333a40424577797b7973"),
        ("fp8_e5m2", "nearest", "0070e96075fa7968c8770055595c5d5e787879726c"),
        ("fp8_e5m2", "stochastic", "0070e96075fa7968c9770055595c5d5e787979726c"),
        ("int8", "nearest", "0010fb0128a0500400380000000001013d48527b75"),
        ("int8", "stochastic", "0010fb0128a0500400380000000101013d48527b75"),
        ("fp4_e2m1", "nearest", "2009f5176800000066077f79"),
        ("fp4_e2m1", "stochastic", "2008f4166800000076077f79"),
        ("fp4_e3m0", "nearest", "401af5266800000066067e78"),
        ("fp4_e3m0", "stochastic", "400af5266800100176077e78"),
        ("ternary", "nearest", "201c020014827c"),
        ("ternary", "stochastic", "200c060014827c"),
    ],
)
def test_golden_payloads(name: str, rounding: str, payload: str) -> None:
    codec = build(name, block_size=16, rounding=rounding)
    assert bytes(encoded(codec, GOLDEN_INPUT, Place(12345)).tolist()).hex() == payload


@pytest.mark.parametrize("name", CODECS)
@given(units=st.integers(0, 50), rest=st.integers(0, UNIT - 1), options=chosen)
def test_sizes_add_up(name: str, units: int, rest: int, options: dict[str, int]) -> None:
    codec = build(name, **options)
    assert codec.wire_bytes(units * UNIT + rest) == units * codec.wire_bytes(
        UNIT
    ) + codec.wire_bytes(rest)


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp4_e3m0"])
def test_four_bits_with_all_that_goes_with_them(name: str) -> None:
    assert 8 * (build(name).wire_bytes(100_001) + 64) <= 4.25 * 100_001
    assert build(name, block_size=32).wire_bytes(2**20) * 8 == 4.25 * 2**20


def test_the_means_may_have_a_format_of_their_own() -> None:
    chosen = Quantization(codec="fp4_e3m0")
    assert build_gather_codec(chosen).name == "fp4_e3m0"
    assert build_gather_codec(replace(chosen, gather_codec="bf16")).name == "bf16"
