"""Wire formats by name."""

import torch

from torchtitan_diloco.diloco.codecs.base import Codec
from torchtitan_diloco.diloco.codecs.plain import CastCodec

__all__ = ["CODECS", "Codec", "build_codec"]

CODECS: dict[str, Codec] = {
    "fp32": CastCodec("fp32", torch.float32),
    "bf16": CastCodec("bf16", torch.bfloat16),
}


def build_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f'diloco.quantization.codec = "{name}" is unknown: choose one of {", ".join(CODECS)}')
    return CODECS[name]
