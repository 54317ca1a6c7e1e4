"""Formats with blocks on GPUs: one pass over memory instead of a dozen, with Triton where it is installed.

blocks.py and what is built on it defines every bit; these functions make the same ones.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import UNIT, Place
from torchtitan_diloco.diloco.codecs.dither import signed
from torchtitan_diloco.utils import logger


class Format(NamedTuple):
    """What tells one format from another. The kernels are compiled for each, so their names are the kernels' constants."""

    BLOCK: int
    BITS: int
    MANTISSA: int
    """-1: codes are whole numbers with a sign."""
    UNIT_EXPONENT: int


class Rounding(NamedTuple):
    """What only encoding needs to know."""

    STOCHASTIC: bool
    TOP_EXPONENT: int
    CARRY: int
    HIGHEST: int
    MOST_STEPS: float


def fused_available(device: torch.device) -> bool:
    """TRITON_INTERPRET=1, set before Triton is imported, lets tests run the kernels on a CPU, slowly."""
    return (
        device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    ) and _kernels() is not None


def kernels_name() -> str:
    """Of what encodes and decodes on this machine's GPUs. Means can differ in their last bit between one and another."""
    kernels = _kernels()
    return (
        "torch"
        if kernels is None
        else "triton " + ".".join(kernels.triton.__version__.split(".")[:2])
    )


@cache
def _kernels() -> ModuleType | None:
    try:
        from torchtitan_diloco.diloco.codecs import triton_kernels
    except ImportError as error:
        logger.info(
            f"compressed deltas are encoded on the GPU by plain torch, as Triton cannot be imported: {error}"
        )
        return None
    return triton_kernels


def encode(
    values: Tensor,
    residual: Tensor | None,
    payload: Tensor,
    form: Format,
    rounding: Rounding,
    place: Place,
) -> None:
    """With a residual, values + residual is encoded, and the residual becomes what was lost. `values` stays as it was."""
    kernels = _kernels()
    assert kernels is not None
    assert place.start % 2 == 0
    if not values.numel():
        return
    start = place.start // 2 * kernels.STRIDE.value + place.key
    with _on(values.device):
        kernels.encode_units[_grid(values)](
            values,
            values if residual is None else residual,
            payload,
            values.numel(),
            _octets(values, form),
            signed(start),
            signed(place.key >> 32),
            FEEDBACK=residual is not None,
            **form._asdict(),
            **rounding._asdict(),
            enable_fp_fusion=False,
        )


def average(
    payloads: Sequence[Tensor], weights: Sequence[float], out: Tensor, form: Format
) -> None:
    """The running mean, in the order given; of one payload: what it decodes to. No payload may overlap `out`."""
    kernels = _kernels()
    assert kernels is not None
    assert len(payloads) == len(weights)
    if not out.numel():
        return
    total, shares = 0.0, []
    for weight in weights:
        total += weight
        shares.append(weight / total)
    with _on(out.device):
        kernels.average_units[_grid(out)](
            tuple(payloads),
            tuple(shares),
            out,
            out.numel(),
            _octets(out, form),
            COUNT=len(payloads),
            **form._asdict(),
            enable_fp_fusion=False,
        )


def _grid(values: Tensor) -> tuple[int]:
    assert values.dtype == torch.float32
    assert values.is_contiguous()
    return (-(-values.numel() // UNIT),)


def _octets(values: Tensor, form: Format) -> int:
    """Bytes of all codes."""
    return -(-values.numel() * form.BITS // 8)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's GPU, which in a thread of the outer loop need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
