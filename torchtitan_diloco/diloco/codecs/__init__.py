"""Wire formats by name. What each one is to the bit: docs/wire-formats.md."""

from typing import get_args

from torchtitan_diloco.diloco.codecs.base import UNIT, Codec, Place
from torchtitan_diloco.diloco.codecs.integer import Int8Codec
from torchtitan_diloco.diloco.codecs.minifloat import MiniFloatCodec
from torchtitan_diloco.diloco.codecs.plain import Bf16Codec, Fp32Codec
from torchtitan_diloco.diloco.config import CodecName, Quantization

__all__ = [
    "CODECS",
    "UNIT",
    "Codec",
    "Place",
    "bits_per_parameter",
    "build_codec",
    "build_gather_codec",
    "describe",
]

_MINIFLOATS = {
    "fp8_e4m3": (4, 3, 7, 448.0),
    "fp8_e5m2": (5, 2, 15, 57344.0),
    "fp4_e2m1": (2, 1, 1, 6.0),
    "fp4_e3m0": (3, 0, 3, 16.0),
    "ternary": (1, 0, 1, 1.0),
}
"""Bits of exponent and mantissa, bias of the exponent, largest value."""

CODECS: tuple[str, ...] = get_args(CodecName)


def build_codec(config: Quantization) -> Codec:
    """Of what every worker sends of its own."""
    return _build(config.codec, config)


def build_gather_codec(config: Quantization) -> Codec:
    """Of the means that go back with more than two workers."""
    return _build(config.codec if config.gather_codec == "same" else config.gather_codec, config)


def bits_per_parameter(codec: Codec) -> float:
    """With the scales of its blocks, without headers."""
    return 8 * codec.wire_bytes(2**20) / 2**20


def describe(config: Quantization, workers: int) -> str:
    """In words, for the start of a run."""
    codec, gather = build_codec(config), build_gather_codec(config)
    text = f"{codec.name}, {bits_per_parameter(codec):g} bits a parameter"
    if codec.name not in ("fp32", "bf16"):
        text += f", a scale for {config.block_size} values"
    if workers > 2 and gather.name != codec.name:
        text += f"; means in {gather.name}"
    if config.rounding == "stochastic":
        text += "; stochastic rounding"
    return text + "; error feedback" * config.error_feedback


def _build(name: str, config: Quantization) -> Codec:
    stochastic = config.rounding == "stochastic"
    if name == "fp32":
        return Fp32Codec()
    if name == "bf16":
        return Bf16Codec(stochastic=stochastic)
    if name == "int8":
        return Int8Codec(name, config.block_size, stochastic=stochastic)
    exponent, mantissa, bias, top = _MINIFLOATS[name]
    return MiniFloatCodec(
        name,
        config.block_size,
        exponent=exponent,
        mantissa=mantissa,
        bias=bias,
        top=top,
        stochastic=stochastic,
    )
