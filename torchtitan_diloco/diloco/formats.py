"""Wire formats by name: what each reads and how it is built, without PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.base.registry import Entry

NAME_BYTES = 24
"""Bytes for the name of a format in the objects of islands."""


@dataclass(frozen=True, kw_only=True)
class Format(Entry):
    """Facts about a wire format, of which `build` is a subclass of `Codec`.

    It is called with the section `Quantization`, and with `arguments`.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What distinguishes formats of one class, by name."""
    is_sparse: bool = False
    """Whether most values are decoded as zero, but fewer in a mean of many workers, which omits
    workers that send a zero. Values that are not sent stay in the worker's parameters, and thus in
    its next delta. This needs the outer `sgd` with lr 1, and does not work with islands."""
    has_kernels: bool = False
    """Whether there are GPU kernels for it (codecs/triton_kernels.py). Without, a GPU runs its code
    for torch."""


_CODECS = "torchtitan_diloco.diloco.codecs"


def small_float(*, exponent: int, mantissa: int, bias: int, top: float) -> Format:
    """Return a format of floats of 4 or 8 bits with a sign. `exponent`, `mantissa`: numbers of
    bits. `top`: the largest value that is used."""
    return Format(
        build=f"{_CODECS}.blocks:MiniFloatCodec",
        arguments={"exponent": exponent, "mantissa": mantissa, "bias": bias, "top": top},
        reads=("block_size",),
        has_kernels=True,
    )


FORMATS: dict[str, Format] = {
    "fp32": Format(build=f"{_CODECS}.base:Fp32Codec"),
    "bf16": Format(build=f"{_CODECS}.base:Bf16Codec"),
    "fp8_e4m3": small_float(exponent=4, mantissa=3, bias=7, top=448.0),
    "fp8_e5m2": small_float(exponent=5, mantissa=2, bias=15, top=57344.0),
    "int8": Format(build=f"{_CODECS}.blocks:Int8Codec", reads=("block_size",), has_kernels=True),
    "fp4_e2m1": small_float(exponent=2, mantissa=1, bias=1, top=6.0),
    "fp4_e3m0": small_float(exponent=3, mantissa=0, bias=3, top=16.0),
    "topk": Format(
        build=f"{_CODECS}.topk:TopKCodec",
        reads=("top_values",),
        is_sparse=True,
        has_kernels=True,
    ),
}
"""Values of `diloco.quantization.codec`. Add your own with a line such as
`FORMATS["mine"] = Format(build="mine:MyCodec")` (docs/algorithm.md)."""


def island_formats() -> list[str]:
    """Return the formats that a run of islands can have, and change to."""
    return [
        name
        for name, form in FORMATS.items()
        if not form.is_sparse and len(name.encode()) <= NAME_BYTES
    ]
