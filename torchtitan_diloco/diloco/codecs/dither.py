"""Random numbers for stochastic rounding: a hash of a key and a value's place, so that they do not depend on the device, on the
number of threads or on how a buffer is cut. A restarted run draws the same."""

import hashlib

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import Place
from torchtitan_diloco.diloco.codecs.scratch import Scratch

BITS = 16
"""Of randomness for each value: what rounding adds on average is off by at most 2**-17 of a step."""

# The constants of MurmurHash3's finalizer and the golden ratio, as signed numbers of 32 bits.
_STRIDE = 0x9E3779B1 - 2**32
_MIX_1 = 0x85EBCA6B - 2**32
_MIX_2 = 0xC2B2AE35 - 2**32


def key_of(*parts: object) -> int:
    """64 bits from whatever tells one exchange from another."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


def draw(place: Place, out: Tensor, room: Scratch) -> Tensor:
    """int32 [n] -> uniform in 0 ... 2**16 - 1: value i of a fragment takes half of the hash of i // 2."""
    assert place.start % 2 == 0
    values, device = out.numel(), out.device
    pairs = -(-values // 2)
    word, moved = room.ints("dither", pairs, device), room.ints("dither, moved", pairs, device)
    torch.mul(room.counter(pairs, device), _STRIDE, out=word)
    word.add_(signed(place.start // 2 * _STRIDE + place.key))
    word.bitwise_xor_(_high_half(word, 16, moved)).mul_(_MIX_1)
    word.bitwise_xor_(signed(place.key >> 32))
    word.bitwise_xor_(_high_half(word, 13, moved)).mul_(_MIX_2)
    word.bitwise_xor_(_high_half(word, 16, moved))
    return out.copy_(word.view(torch.int16)[:values]).bitwise_and_(2**BITS - 1)


def _high_half(word: Tensor, shift: int, out: Tensor) -> Tensor:
    """A shift without the sign: torch's carries it down."""
    return torch.bitwise_right_shift(word, shift, out=out).bitwise_and_(2 ** (32 - shift) - 1)


def signed(number: int) -> int:
    """The low 32 bits as torch's int32 has them."""
    return (number + 2**31) % 2**32 - 2**31
