"""Order of samples: a pure function from a position in an endless stream to a sequence of a corpus.

Position p lies in epoch p // n of n sequences. Each epoch is a permutation of its own, computed per
position by a Feistel network (a keyed bijection on b bits), so nothing of the size of the corpus is
held or saved.
"""

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # even, so that the two halves end where they began
_MIN_BITS = 6  # fewer leave halves of one bit or none, which barely shuffle
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(32)


def sequence_indices(positions: Indices, *, sequences: int, seed: int, shuffle: bool) -> Indices:
    """Return the sequence at each position of epochs of `sequences` sequences."""
    assert sequences >= 1
    epochs, places = np.divmod(positions, sequences)
    if not shuffle or sequences == 1:
        return places
    keys = _round_keys(epochs.astype(np.uint64), seed)
    # The network permutes 0 ... 2**bits - 1. What lands past the end goes through it again until it
    # lands inside. That stays a bijection, and takes under two passes on average.
    bits = max((sequences - 1).bit_length(), _MIN_BITS)
    result = _feistel(places.astype(np.uint64), keys, bits)
    while (outside := np.flatnonzero(result >= np.uint64(sequences))).size:
        result[outside] = _feistel(result[outside], keys[:, outside], bits)
    return result.astype(np.int64)


def _round_keys(epochs: _Words, seed: int) -> _Words:
    """Return [rounds, positions] keys, unrelated between seeds and between epochs."""
    words = hashlib.sha512(f"order of samples, seed {seed}".encode()).digest()
    of_seed = np.frombuffer(words, dtype="<u8")[:_ROUNDS].astype(np.uint64)
    return _mix(of_seed[:, None] + _mix(epochs + np.uint64(1))[None, :])


def _feistel(values: _Words, keys: _Words, bits: int) -> _Words:
    left_bits = bits // 2
    right_bits = bits - left_bits
    left = values >> np.uint64(right_bits)
    right = values & np.uint64(2**right_bits - 1)
    for key in keys:
        # The halves swap, and with them their widths, which differ by one when `bits` is odd.
        left, right = right, left ^ (_mix(right + key) >> np.uint64(64 - left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mix(words: _Words) -> _Words:
    """Mix each word, so that every bit of the result depends on all bits. Products wrap."""
    for multiplier in _MULTIPLIERS:
        words = (words ^ (words >> _SHIFT)) * multiplier
    return words ^ (words >> _SHIFT)
