"""Wire formats of fragments. See docs/algorithm.md for their bits and for how to add one."""

from torchtitan_diloco.diloco.codecs.base import UNIT, Codec, add_to_mean
from torchtitan_diloco.diloco.config import Quantization

__all__ = [
    "UNIT",
    "Codec",
    "add_to_mean",
    "bits_per_parameter",
    "build_codec",
    "describe",
]


def build_codec(config: Quantization) -> Codec:
    codec: Codec = config.format.load()(config, **config.format.arguments)
    return codec


def bits_per_parameter(codec: Codec) -> float:
    """Return the bits per parameter on the wire, with scales and without headers."""
    return 8 * codec.wire_bytes(2**20) / 2**20


def describe(config: Quantization) -> str:
    """Describe the wire format in one line."""
    codec = build_codec(config)
    text = f"{codec.name}, {bits_per_parameter(codec):g} bits a parameter"
    return ", ".join([text, *codec.details()])
