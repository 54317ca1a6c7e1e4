"""Outer step, and a self-test of the arithmetic that must give the same bits on all machines.

The shared copies come from encoding, decoding, averaging and outer steps. Sums and products are
separate calls: `alpha=` and `lerp` round once with a fused multiply-add, and twice without.
Divisions are rounded correctly everywhere. Square roots in fp32 are not: torch takes them from MKL,
whose last bit depends on the processor. Those of fp64 are exact enough to round correctly to fp32.

The results on fixed numbers are known, so machines of any kind, with any version of torch, can
train together if each one passes. What only one worker uses may differ: mixing, healing, norms and
the inner optimizer.
"""

import hashlib
import math
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import repeat
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs import UNIT, build_codec
from torchtitan_diloco.diloco.config import CodecName, OuterOptimizer, Quantization
from torchtitan_diloco.log import UserError

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

    The delta, theta_outer - theta_local, serves as gradient. It is overwritten as `theta` is needed
    until the fragment is applied. `count`: steps with this state, with this one. The momentum is
    stored already decayed, which saves a pass over memory. The moments of Adam are kept without
    bias: a first step replaces them.
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


# --- self-test ------------------------------------------------------------------------------------

KNOWN = {
    "fp32": "c9994765 c9994765 fbc08adc",
    "bf16": "31a2e32e c5254387 46676106",
    "fp8_e4m3": "74d69578 a63db431 0eddb6bd",
    "fp8_e5m2": "7655a537 e5738035 e6a7a973",
    "int8": "3d59cb55 508a96ce f5dd7ab9",
    "fp4_e2m1": "274f9053 650a948d 59a1acb2",
    "fp4_e3m0": "80147f3a 86b1381a d4644d04",
    "topk": "80d47658 ea25c718 74542591",
    "nesterov": "9bee3edc 16533b01 6ef47a3e",
    "momentum": "eccca50e 16533b01 6ef47a3e",
    "sgd": "9718f6b8 64a1cccb 6ef47a3e",
    "adam": "fb56d924 a8f37ed4 c51430ee",
}
"""Hashes of the results of each format and outer step: encoded, decoded and averaged values, or the
next copy and both moments. Different hashes mean different arithmetic, which needs a new run."""
IDENTITY = hashlib.sha256(repr(KNOWN).encode()).hexdigest()[:16]
VALUES = 20 * UNIT + 7
"""Enough values for several programs of a GPU kernel, and for vectors with a remainder."""
OPTIMIZERS = get_args(get_type_hints(OuterOptimizer)["name"])
CODEC_PARTS = "encode", "decode", "average"
STEP_PARTS = "next copy", "momentum", "second moment"


def numbers(count: int, seed: int) -> Tensor:
    """Return fp32 numbers of 16 binades, some subnormal or zero, from integers alone."""
    words = torch.arange(1, count + 1, dtype=torch.int64) * (2 * seed + 2_654_435_761) % 2**32
    words = words * words % (2**32 - 5)  # scatters the lower bits
    exponents = 112 + (words >> 23) % 16
    exponents[::97] = 0
    bits = words & ~(255 << 23) | exponents << 23
    bits[::101] = 0
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


@torch.no_grad()
def run_codec(name: CodecName, device: torch.device) -> list[Tensor]:
    """Return an encoded and a decoded delta, and a mean of three."""
    codec = build_codec(Quantization(codec=name))
    deltas = [numbers(VALUES, seed).to(device) for seed in range(3)]
    size = codec.wire_bytes(VALUES)
    payloads = [torch.empty(size, dtype=torch.uint8, device=device) for _ in deltas]
    for delta, payload in zip(deltas, payloads, strict=True):
        codec.encode(delta, payload)
    encoded, decoded, mean = payloads[0].clone(), *deltas[:2]
    codec.decode(payloads[0], decoded)
    codec.average(payloads, [3.0, 4_000_001.0, 5e9], mean)
    return [encoded, decoded, mean]


@torch.no_grad()
def run_step(name: str, device: torch.device) -> list[Tensor]:
    """Return the next shared copy, the momentum and the second moment."""
    config = OuterOptimizer(name=name)  # type: ignore[arg-type]
    theta, delta, momentum, second = (numbers(VALUES, seed).to(device) for seed in range(4))
    slots = [momentum, second.square_()]
    outer_step(config, theta, delta, slots[: slot_count(config)], 3)
    return [delta, *slots]


@cache
def hashes(device: torch.device, name: str) -> str:
    """Return the hashes of the results of a format or an outer step, separated by spaces."""
    run = run_step if name in OPTIMIZERS else run_codec
    content = [part.cpu().numpy().tobytes() for part in run(name, device)]  # type: ignore[arg-type]
    return " ".join(hashlib.sha256(one).hexdigest()[:8] for one in content)


def find_difference(device: torch.device, names: Iterable[str] = KNOWN) -> str:
    """Name the first operation whose bits differ from other machines, or return an empty string."""
    for name in names:
        found, parts = hashes(device, name), STEP_PARTS if name in OPTIMIZERS else CODEC_PARTS
        for part, mine, known in zip(parts, found.split(), KNOWN[name].split(), strict=True):
            if mine != known:
                return f"{part} of {name} on {device.type} is {mine}, not {known}"
    return ""


def check_arithmetic(device: torch.device, codec: CodecName, optimizer: OuterOptimizer) -> None:
    """Raise a UserError if this machine cannot compute the same shared copies as others."""
    if difference := find_difference(device, (codec, optimizer.name)):
        raise UserError(
            "this machine computes different bits than others, so its shared copies "
            f"would differ ({difference}): use another machine, or another version "
            f"of torch (here {torch.__version__})"
        )
