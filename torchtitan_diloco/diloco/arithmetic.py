"""Digests of the arithmetic that must give the same bits on all machines.

The shared copies come from encoding, decoding, averaging and outer steps. Sums and products are
separate calls: `alpha=` and `lerp` round once with a fused multiply-add, and twice without.
Divisions are rounded correctly everywhere. Square roots in fp32 are not: torch takes them from MKL,
whose last bit depends on the processor. Those of fp64 are exact enough to round correctly to fp32.

Workers compare the digests of their results on fixed numbers when they start, so machines of any
kind can train together if they compute the same. Values that only one worker uses may differ:
mixing, healing, norms and the inner optimizer.
"""

import zlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.agreement import find_differences
from torchtitan_diloco.diloco.codecs import UNIT, build_codec
from torchtitan_diloco.diloco.config import OuterOptimizer, Quantization
from torchtitan_diloco.diloco.formats import FORMATS
from torchtitan_diloco.diloco.outer_optimizers import OUTER_OPTIMIZERS
from torchtitan_diloco.diloco.outer_step import outer_step

VALUES = 8 * UNIT + 7
"""Enough values for several programs of a GPU kernel, and for vectors with a remainder."""
CPU = torch.device("cpu")
CODEC_PARTS = "encode", "decode", "average"
Results = dict[str, str]
"""Digest of the result of each operation, such as "encode of int8"."""


@cache
def numbers(count: int, seed: int) -> Tensor:
    """Return fp32 numbers of 16 binades, some subnormal or zero, from integers alone."""
    words = torch.arange(1, count + 1, dtype=torch.int64, device=CPU)
    words = words * (2 * seed + 2_654_435_761) % 2**32
    words = words * words % (2**32 - 5)  # scatters the lower bits
    exponents = 112 + (words >> 23) % 16
    exponents[::97] = 0
    bits = words & ~(255 << 23) | exponents << 23
    bits[::101] = 0
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


def run_codec(name: str, device: torch.device) -> list[Tensor]:
    """Return an encoded and a decoded delta, and a mean of three."""
    codec = build_codec(Quantization(codec=name))
    deltas = [numbers(VALUES, seed).to(device, copy=True) for seed in range(3)]
    size = codec.wire_bytes(VALUES)
    payloads = [torch.empty(size, dtype=torch.uint8, device=device) for _ in deltas]
    for delta, payload in zip(deltas, payloads, strict=True):
        codec.encode(delta, payload)
    encoded = payloads[0].clone()
    decoded = torch.empty_like(deltas[0])
    codec.decode(payloads[0], decoded)
    mean = torch.empty_like(decoded)
    codec.average(payloads, [3.0, 4_000_001.0, 5e9], mean)
    return [encoded, decoded, mean]


def run_step(name: str, device: torch.device) -> list[Tensor]:
    """Return the next shared copy, and the optimizer state."""
    config = OuterOptimizer(name=name)
    theta, delta, *slots = (
        numbers(VALUES, seed).to(device, copy=True) for seed in range(2 + len(config.rule.slots))
    )
    for slot in slots[1:]:  # of squares, such as a second moment, whose root is taken
        slot.square_()
    outer_step(config, theta, delta, slots, count=3, lr=config.lr)
    return [delta, *slots]


@cache
@torch.no_grad()
def compute(name: str, device: torch.device = CPU) -> Results:
    """Return digests of the results of a format or an outer optimizer."""
    results = dict[str, Tensor]()
    if name in FORMATS:
        results |= zip(CODEC_PARTS, run_codec(name, device), strict=True)
    if name in OUTER_OPTIMIZERS:
        parts = ("next copy", *OUTER_OPTIMIZERS[name].slots)
        results |= zip(parts, run_step(name, device), strict=True)
    return {
        f"{part} of {name}": f"{zlib.crc32(value.cpu().numpy().tobytes()):08x}"
        for part, value in results.items()
    }


def compute_all(names: Sequence[str] = (), device: torch.device = CPU) -> Results:
    """Return digests of the results of these formats and outer optimizers, or of all."""
    results = Results()
    for name in names or (*FORMATS, *OUTER_OPTIMIZERS):
        results |= compute(name, device)
    return results


def short_digest(results: Results) -> str:
    """Return a single short digest of all results, for comparison by eye."""
    return f"{zlib.crc32(repr(sorted(results.items())).encode()):08x}"


def check_device(device: torch.device, names: Sequence[str] = ()) -> None:
    """Raise a UserError if a GPU computes different bits than the CPU of this machine."""
    if device.type == "cpu":
        return
    both = {"on the CPU": compute_all(names), "on the GPU": compute_all(names, device)}
    if differences := find_differences(both):
        raise UserError(
            "the GPU of this machine computes different bits than its CPU, so its "
            "shared copies would differ: use another GPU, or another version of "
            "torch or Triton:\n  " + "\n  ".join(differences)
        )
