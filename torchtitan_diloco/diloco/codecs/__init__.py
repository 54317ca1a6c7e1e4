"""Wire formats of fragments, by name. docs/wire-formats.md defines their bits and says how to add
one."""

from collections.abc import Callable
from functools import partial

from torchtitan_diloco.diloco.codecs.base import UNIT, Codec, Position, random_key
from torchtitan_diloco.diloco.codecs.blocks import (
    BlockCodec,
    Int8Codec,
    MiniFloatCodec,
    kernels_name,
)
from torchtitan_diloco.diloco.codecs.plain import Bf16Codec, Fp32Codec
from torchtitan_diloco.diloco.codecs.topk import TopKCodec
from torchtitan_diloco.diloco.config import Quantization

__all__ = [
    "CODECS",
    "UNIT",
    "Codec",
    "Position",
    "bits_per_parameter",
    "build_codec",
    "build_gather_codec",
    "describe",
    "kernels_name",
    "random_key",
]

_DENSE: dict[str, Callable[[str, int, bool], Codec]] = {
    "fp32": Fp32Codec,
    "bf16": Bf16Codec,
    "fp8_e4m3": partial(MiniFloatCodec, exponent=4, mantissa=3, bias=7, top=448.0),
    "fp8_e5m2": partial(MiniFloatCodec, exponent=5, mantissa=2, bias=15, top=57344.0),
    "int8": Int8Codec,
    "fp4_e2m1": partial(MiniFloatCodec, exponent=2, mantissa=1, bias=1, top=6.0),
    "fp4_e3m0": partial(MiniFloatCodec, exponent=3, mantissa=0, bias=3, top=16.0),
    "ternary": partial(MiniFloatCodec, exponent=1, mantissa=0, bias=1, top=1.0),
}
"""Each is called with (name, block size, stochastic rounding)."""

CODECS = (*_DENSE, "topk")


def build_codec(config: Quantization, name: str = "same") -> Codec:
    """Build the codec of the deltas that workers send, or the one of this name."""
    name = config.codec if name == "same" else name
    if name == "topk":
        return TopKCodec(name, config.top_values)
    return _DENSE[name](name, config.block_size, config.rounding == "stochastic")


def build_gather_codec(config: Quantization) -> Codec:
    """Build the codec of the means that go back to all workers when there are more than two."""
    return build_codec(config, config.gather_codec)


def bits_per_parameter(codec: Codec) -> float:
    """Return the bits on the wire per parameter, with the scales of blocks and without headers."""
    return 8 * codec.wire_bytes(2**20) / 2**20


def describe(config: Quantization, workers: int) -> str:
    """Describe the wire format in one line, for the start of a run."""
    codec, gather = build_codec(config), build_gather_codec(config)
    text = f"{codec.name}, {bits_per_parameter(codec):g} bits a parameter"
    if isinstance(codec, BlockCodec):
        text += f", a scale for {config.block_size} values"
    elif isinstance(codec, TopKCodec):
        text += f", the largest {codec.top_values} of {UNIT} values"
    if workers > 2 and gather.name != codec.name:
        text += f"; means in {gather.name}"
    if config.rounding == "stochastic":
        text += "; stochastic rounding"
    return text + "; error feedback" * config.error_feedback
