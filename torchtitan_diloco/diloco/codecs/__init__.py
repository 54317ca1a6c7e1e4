"""Wire formats of fragments. See docs/algorithm.md for their bits and for how to add one."""

from collections.abc import Callable
from functools import partial
from typing import get_args

from torchtitan_diloco.diloco.codecs.base import UNIT, Bf16Codec, Codec, Fp32Codec, add_to_mean
from torchtitan_diloco.diloco.codecs.blocks import (
    BlockCodec,
    Int8Codec,
    MiniFloatCodec,
)
from torchtitan_diloco.diloco.codecs.topk import TopKCodec
from torchtitan_diloco.diloco.config import CodecName, Quantization

__all__ = [
    "CODECS",
    "UNIT",
    "Codec",
    "add_to_mean",
    "bits_per_parameter",
    "build_codec",
    "describe",
]

_BLOCKS: dict[str, Callable[[str, int], Codec]] = {
    "fp8_e4m3": partial(MiniFloatCodec, exponent=4, mantissa=3, bias=7, top=448.0),
    "fp8_e5m2": partial(MiniFloatCodec, exponent=5, mantissa=2, bias=15, top=57344.0),
    "int8": Int8Codec,
    "fp4_e2m1": partial(MiniFloatCodec, exponent=2, mantissa=1, bias=1, top=6.0),
    "fp4_e3m0": partial(MiniFloatCodec, exponent=3, mantissa=0, bias=3, top=16.0),
}
"""Each is called with a name and a block size."""

CODECS: tuple[CodecName, ...] = get_args(CodecName)


def build_codec(config: Quantization) -> Codec:
    match config.codec:
        case "fp32":
            return Fp32Codec("fp32")
        case "bf16":
            return Bf16Codec("bf16")
        case "topk":
            return TopKCodec("topk", config.top_values)
        case name:
            return _BLOCKS[name](name, config.block_size)


def bits_per_parameter(codec: Codec) -> float:
    """Return the bits per parameter on the wire, with scales and without headers."""
    return 8 * codec.wire_bytes(2**20) / 2**20


def describe(config: Quantization) -> str:
    """Describe the wire format in one line."""
    codec = build_codec(config)
    text = f"{codec.name}, {bits_per_parameter(codec):g} bits a parameter"
    if isinstance(codec, BlockCodec):
        text += f", one scale per {config.block_size} values"
    elif isinstance(codec, TopKCodec):
        text += f", the largest {codec.top_values} of every {UNIT} values, the others later"
    return text
