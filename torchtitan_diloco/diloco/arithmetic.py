"""Outer step, and digests of the arithmetic that must give the same bits on all machines.

The shared copies come from encoding, decoding, averaging and outer steps. Sums and products are
separate calls: `alpha=` and `lerp` round once with a fused multiply-add, and twice without.
Divisions are rounded correctly everywhere. Square roots in fp32 are not: torch takes them from MKL,
whose last bit depends on the processor. Those of fp64 are exact enough to round correctly to fp32.

Workers compare the digests of their results on fixed numbers when they start, so machines of any
kind can train together if they compute the same. Values that only one worker uses may differ:
mixing, healing, norms and the inner optimizer.
"""

import math
import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import repeat
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.agreement import find_differences
from torchtitan_diloco.diloco.codecs import CODECS, UNIT, build_codec
from torchtitan_diloco.diloco.config import CodecName, OuterOptimizer, Quantization

BLOCK = 65_536
"""Values processed at once on a CPU, so that they stay in cache during a step."""
AVERAGE = OuterOptimizer(name="sgd", lr=1.0)
"""Plain averaging of the workers."""


def slot_count(config: OuterOptimizer) -> int:
    """Return the fp32 values of optimizer state per parameter: the momentum, the second moment."""
    return {"sgd": 0, "adam": 2}.get(config.name, 1)


@lru_cache(maxsize=64)
def _constant(number: float) -> Tensor:
    """Return a number as a tensor, to avoid a conversion in each call of torch."""
    return torch.tensor(number, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=64)
def _newest_share(decay: float, count: int) -> Tensor:
    """Return the weight of the newest of `count` values in a mean that discounts older ones."""
    # Products round alike on every machine, `pow` may not. So many make any decay vanish.
    remaining = math.prod(repeat(decay, min(count, 2**15)))
    return torch.tensor((1 - decay) / (1 - remaining), dtype=torch.float32, device="cpu")


def outer_step(
    config: OuterOptimizer, theta: Tensor, delta: Tensor, slots: list[Tensor], count: int
) -> None:
    """Replace the mean delta with the next shared parameters, and update the optimizer state.

    The delta, theta_outer - theta_local, serves as gradient. The result overwrites it, because
    `theta` is needed until the fragment is applied. `count`: number of steps with this state,
    including this one. The momentum is stored already decayed, which saves a pass over memory. The
    moments of Adam are kept without bias: a first step replaces them.
    """
    decay = _constant(config.momentum)
    match config.name:
        case "nesterov":
            delta.add_(slots[0].add_(delta).mul_(decay))
        case "momentum":
            torch.mul(delta.add_(slots[0]), decay, out=slots[0])
        case "adam":
            first, second = slots
            square = delta * delta
            first.add_(delta.sub_(first).mul_(_newest_share(config.momentum, count)))
            second.add_(square.sub_(second).mul_(_newest_share(config.beta2, count)))
            square.copy_(second.double().sqrt_()).add_(_constant(config.epsilon))
            torch.div(first, square, out=delta)
    torch.sub(theta, delta.mul_(_constant(config.lr)), out=delta)


# --- what a machine computes ----------------------------------------------------------------------

VALUES = 8 * UNIT + 7
"""Enough values for several programs of a GPU kernel, and for vectors with a remainder."""
CPU = torch.device("cpu")
OPTIMIZERS: tuple[str, ...] = get_args(get_type_hints(OuterOptimizer)["name"])
ALL: tuple[str, ...] = (*CODECS, *OPTIMIZERS)
"""Formats and outer optimizers."""
CODEC_PARTS = "encode", "decode", "average"
STEP_PARTS = "next copy", "momentum", "second moment"
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


def run_codec(name: CodecName, device: torch.device) -> list[Tensor]:
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
    config = OuterOptimizer(name=name)  # type: ignore[arg-type]
    theta, delta, momentum, second = (
        numbers(VALUES, seed).to(device, copy=True) for seed in range(4)
    )
    slots = [momentum, second.square_()][: slot_count(config)]
    outer_step(config, theta, delta, slots, count=3)
    return [delta, *slots]


@cache
@torch.no_grad()
def compute(name: str, device: torch.device = CPU) -> Results:
    """Return digests of the results of a format or an outer optimizer."""
    if name in OPTIMIZERS:
        parts = zip(STEP_PARTS, run_step(name, device), strict=False)
    else:
        parts = zip(CODEC_PARTS, run_codec(name, device), strict=True)  # type: ignore[arg-type]
    return {
        f"{part} of {name}": f"{zlib.crc32(value.cpu().numpy().tobytes()):08x}"
        for part, value in parts
    }


def compute_all(names: Sequence[str] = ALL, device: torch.device = CPU) -> Results:
    """Return digests of the results of these formats and outer optimizers."""
    results = Results()
    for name in names:
        results |= compute(name, device)
    return results


def short_digest(results: Results) -> str:
    """Return a single short digest of all results, for comparison by eye."""
    return f"{zlib.crc32(repr(sorted(results.items())).encode()):08x}"


def check_device(device: torch.device, names: Sequence[str] = ALL) -> None:
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
