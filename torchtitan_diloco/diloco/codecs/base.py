"""The interface of a wire format, and what formats share: means, error feedback, random numbers.

Random numbers of stochastic rounding are a hash of a key and of a value's position in the fragment:
the same on every device, however a buffer is cut, and in a resumed run.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

UNIT = 1024
"""Values cut at a multiple of this can be encoded piece by piece into consecutive bytes."""
BIAS = 127
"""Exponent bias of fp32 and of scale bytes."""
LOWEST = BIAS - 100
"""Smallest scale byte. A block of smaller values is rounded as if they were that large, so that no
number on the way is subnormal: processors are slow with subnormal numbers, or drop them."""
NOT_FINITE = 255
"""Scale byte of a block with a NaN or an infinity. All its values are decoded as NaN."""
RANDOM_BITS = 16
"""Random bits per value: the mean of what rounding adds is off by at most 2**-17 of a step."""
# The golden ratio and the constants of MurmurHash3's finalizer.
STRIDE, MIX_1, MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True)
class Position:
    """Random key of an exchange and position of values in the fragment."""

    key: int = 0
    start: int = 0  # index of the first value, a multiple of UNIT

    def after(self, values: int) -> "Position":
        return replace(self, start=self.start + values)


START = Position()


class Scratch:
    """Named buffers that are reused from call to call. On a CPU a fresh buffer costs more than the
    work that is done in it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of `size` elements with unspecified contents."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size]


class Codec(ABC):
    """Converts fp32 values to bytes and back, in buffers of the caller.

    A format has no header and keeps no state between calls: `wire_bytes(UNIT * k + n)` is `k *
    wire_bytes(UNIT) + wire_bytes(n)`, and the payload of values that are cut at multiples of UNIT
    is the payloads of the pieces, one after the other. Callers can thus go through large buffers
    in pieces that stay in cache. Scratch buffers are kept, so one codec serves one thread.
    """

    is_fp32 = False
    """Payloads are the values as they lie in memory, so they need not be copied to be sent or
    read."""
    is_sparse = False
    """Most values are decoded as zero, but fewer of a mean of many workers."""

    def __init__(self, name: str, block_size: int, stochastic: bool) -> None:
        self.name, self.block_size, self.stochastic = name, block_size, stochastic
        self._scratch = Scratch()

    @abstractmethod
    def wire_bytes(self, values: int) -> int:
        """Return the size of the payload of `values` values."""

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, position: Position = START) -> None:
        """Encode fp32 [n] into uint8 [wire_bytes(n)]."""

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Decode uint8 [wire_bytes(n)] into fp32 [n]."""

    def encode_with_feedback(
        self, values: Tensor, residual: Tensor, payload: Tensor, position: Position = START
    ) -> None:
        """Encode values + residual. The residual becomes the rounding error; `values` may be
        overwritten."""
        values.add_(residual)
        self.encode(values, payload, position)
        self.decode(payload, residual)
        torch.sub(values, residual, out=residual)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        """Write the weighted mean of the decoded payloads to `out`, summed in fp32 in the order
        given. Only with `is_fp32` may a payload share memory with `out`."""
        self.decode(payloads[0], out)
        total = weights[0]
        for payload, weight in zip(payloads[1:], weights[1:], strict=True):
            total += weight
            decoded = self._scratch.get("decoded", out.numel(), out.dtype, out.device)
            self.decode(payload, decoded)
            out.lerp_(decoded, weight / total)


# --- random numbers -------------------------------------------------------------------------------


def random_key(*parts: object) -> int:
    """Return 64 bits that identify an exchange, from whatever distinguishes it from others."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


def hash_start(position: Position) -> tuple[int, int]:
    """Return the hash's two starting numbers, as int32: its first word and the key's upper half."""
    assert position.start % 2 == 0
    return to_int32(position.start // 2 * STRIDE + position.key), to_int32(position.key >> 32)


def draw(position: Position, out: Tensor, scratch: Scratch) -> Tensor:
    """Fill int32 `out` with uniform numbers of 16 bits. Two neighbours share one hash of 32."""
    start, key = hash_start(position)
    values, device = out.numel(), out.device
    pairs = -(-values // 2)
    word, shifted = scratch.get("hash", pairs, torch.int32, device), out[:pairs]
    torch.add(_multiples(pairs, device), start, out=word)
    word.bitwise_xor_(_shift_right(word, 16, shifted)).mul_(to_int32(MIX_1))
    word.bitwise_xor_(key)
    word.bitwise_xor_(_shift_right(word, 13, shifted)).mul_(to_int32(MIX_2))
    word.bitwise_xor_(_shift_right(word, 16, shifted))
    return out.copy_(word.view(torch.int16)[:values]).bitwise_and_(2**RANDOM_BITS - 1)


@lru_cache(maxsize=4)
def _multiples(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device) * to_int32(STRIDE)


def _shift_right(word: Tensor, bits: int, out: Tensor) -> Tensor:
    """Shift as if `word` had no sign."""
    return torch.bitwise_right_shift(word, bits, out=out).bitwise_and_(2 ** (32 - bits) - 1)


def to_int32(number: int) -> int:
    """Return the low 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
