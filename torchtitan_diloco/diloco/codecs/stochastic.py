"""Random numbers of stochastic rounding: a hash of a key and of a value's position in the
fragment, the same on every device and however a buffer is cut. A resumed run draws the same
numbers."""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import Position, Scratch

BITS = 16
"""Random bits per value: the mean of what rounding adds is off by at most 2**-17 of a step."""

# The golden ratio and the constants of MurmurHash3's finalizer.
STRIDE, MIX_1, MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def random_key(*parts: object) -> int:
    """Return 64 bits that identify an exchange, from whatever distinguishes it from others."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


def hash_start(position: Position) -> tuple[int, int]:
    """Return the hash's two starting numbers, as int32: its first word and the key's upper half."""
    assert position.start % 2 == 0
    return to_int32(position.start // 2 * STRIDE + position.key), to_int32(position.key >> 32)


def draw(position: Position, out: Tensor, scratch: Scratch) -> Tensor:
    """Fill int32 `out` with uniform numbers of BITS bits. Two neighbours share one hash of 32
    bits."""
    start, key = hash_start(position)
    values, device = out.numel(), out.device
    pairs = -(-values // 2)
    word, shifted = scratch.get("hash", pairs, torch.int32, device), out[:pairs]
    torch.add(_multiples(pairs, device), start, out=word)
    word.bitwise_xor_(_shift_right(word, 16, shifted)).mul_(to_int32(MIX_1))
    word.bitwise_xor_(key)
    word.bitwise_xor_(_shift_right(word, 13, shifted)).mul_(to_int32(MIX_2))
    word.bitwise_xor_(_shift_right(word, 16, shifted))
    return out.copy_(word.view(torch.int16)[:values]).bitwise_and_(2**BITS - 1)


@lru_cache(maxsize=4)
def _multiples(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device) * to_int32(STRIDE)


def _shift_right(word: Tensor, bits: int, out: Tensor) -> Tensor:
    """Shift as if `word` had no sign."""
    return torch.bitwise_right_shift(word, bits, out=out).bitwise_and_(2 ** (32 - bits) - 1)


def to_int32(number: int) -> int:
    """Return the low 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
