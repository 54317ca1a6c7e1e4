"""Batches of token sequences, for training and for validation.

Sequence i of a corpus is its tokens i*L to i*L + L: L inputs, and the targets shifted by one.
Neighbors share a token, so every token but the first is a target exactly once.
"""

import hashlib
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchdata.nodes import BaseNode, IterableWrapper, Mapper, Prefetcher

from torchtitan_diloco.data.batch import IGNORE_INDEX, Batch
from torchtitan_diloco.data.mixture import Indices, Mixture, Segment
from torchtitan_diloco.data.shards import TokenShards, TooLittleText

_Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # even, so that the two halves end where they began
_MIN_BITS = 6  # with fewer, the halves have a bit or none, which barely shuffles
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(32)
_FAR = 2**40  # samples, more than any stream reads
_MICRO_BATCHES_AT_ONCE = 64  # whose order is computed in one vectorized call


class Stream(NamedTuple):
    """One of several streams of samples, which different workers read."""

    number: int
    streams: int
    block: int = 0
    """Streams take turns of this many samples in one common order. 0: each stream has its own
    order, of corpora of its own, or of a fixed random part of the sequences of the others."""

    def positions(self, samples: Indices) -> Indices:
        """Return the positions of samples of this stream in the order that it reads."""
        if self.number >= self.streams:  # added later: other epochs, so another order
            return samples + (self.number - self.streams + 1) * _FAR
        if self.block == 0:
            return samples
        blocks, within = np.divmod(samples, self.block)
        return (blocks * self.streams + self.number) * self.block + within


class SequenceReader:
    """Sequences of a fixed length by index: all, or one of `parts` equal random parts."""

    def __init__(
        self, tokens: TokenShards, sequence_length: int, part: int = 0, parts: int = 1
    ) -> None:
        self._tokens = tokens
        self._length = sequence_length
        self._parts = parts
        self._all = (len(tokens) - 1) // sequence_length
        self.sequences = self._all // parts
        self._first = part * self.sequences
        if self.sequences < 1:
            whose = "" if parts == 1 else f' for each of {parts} workers (data.shard_by = "random")'
            raise TooLittleText(
                f"{tokens.name} is shorter than one sequence{whose}: it has {len(tokens)} tokens, "
                f"sequence_length = {sequence_length} needs {parts * sequence_length + 1}; "
                "use a larger corpus or data.validation_fraction, or shorter sequences"
            )

    def __getitem__(self, indices: Indices) -> Batch:
        if self._parts > 1:
            places = self._first + indices
            indices = sequence_indices(places, sequences=self._all, seed=0, shuffle=True)
        batch = np.empty((2, len(indices), self._length), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            tokens = self._tokens.read(index * self._length, (index + 1) * self._length + 1)
            batch[0, row] = tokens[:-1]
            batch[1, row] = tokens[1:]
        inputs, targets = torch.from_numpy(batch)
        return inputs, targets


class MixedReader:
    """Sequences of several corpora, by the number of the corpus and the index of the sequence."""

    def __init__(self, readers: Sequence[SequenceReader]) -> None:
        self.readers = readers

    def __getitem__(self, places: Indices) -> Batch:
        corpora, indices = places.T
        if len(chosen := np.unique(corpora)) == 1:
            return self.readers[int(chosen[0])][indices]
        rows = [
            self.readers[corpus][indices[row : row + 1]]
            for row, corpus in enumerate(corpora.tolist())
        ]
        inputs, targets = zip(*rows, strict=True)
        return torch.cat(inputs), torch.cat(targets)


class TrainLoader:
    """Endless stream of this rank's micro-batches.

    A step takes the next ranks * accumulation * batch_size samples of one order, and rank r the
    r-th equal part of them, so the samples of a step do not depend on the number of ranks.

    The state is the position in this order, and the segment of the mixture that it is in. It counts
    the micro-batches that were handed out, and not those that are read ahead. torchdata's own state
    counts items of one rank, so it could not continue a run with other ranks or batch sizes.

    `corpora`: by the names that the weights of `segments` have. `own_corpora`: names of those that
    only this stream reads. `own_turns`: corpora take turns within the stream, and not in the order
    that all streams share, so that each stream may enter a segment at another position and none
    reads a sample of another one. `prefetch`: micro-batches that a thread reads ahead.
    """

    def __init__(
        self,
        corpora: Mapping[str, TokenShards],
        *,
        segments: Sequence[Segment],
        sequence_length: int,
        batch_size: int,
        accumulation: int,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool,
        prefetch: int,
        start: int = 0,
        stream: Stream | None = None,
        own_corpora: Container[str] = (),
        own_turns: bool = False,
        pin_memory: bool = False,
    ) -> None:
        """Start at position `start`. With a stream, `rank`, `ranks` and `start` refer to it."""
        stream = stream or Stream(0, 1, block=1)
        self._stream = stream
        readers = list[SequenceReader]()
        for name, tokens in corpora.items():
            part = 0
            parts = 1
            if not stream.block and name not in own_corpora:
                part = stream.number % stream.streams
                parts = stream.streams
            readers.append(SequenceReader(tokens, sequence_length, part=part, parts=parts))
        self._reader = MixedReader(readers)
        self.names = list(corpora)
        self.mixture = Mixture(self.names, segments)
        self._has_own_turns = own_turns
        self._order = partial(sequence_indices, seed=seed, shuffle=shuffle)
        self._rank = rank
        self._ranks = ranks
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._start = start
        self._taken = 0  # micro-batches since the start

    @property
    def position(self) -> int:
        """Position of the first sample of the current step, over all ranks."""
        step_size = self._ranks * self._accumulation * self._batch_size
        return self._start + self._taken // self._accumulation * step_size

    @property
    def segment(self) -> Segment:
        """The part of the stream that the current step begins in."""
        return self.mixture.segment_at(self.position)

    def enter(self, segment: Segment) -> None:
        """Enter the next segment of the mixture, which starts at the current step or later."""
        assert segment.start >= max(self.position, self.mixture.segments[-1].start)
        self.mixture = Mixture(self.names, [*self.mixture.segments, segment])

    def __iter__(self) -> Iterator[Batch]:
        """Continue where the last iterator stopped."""
        while True:
            mixture = self.mixture
            batches: BaseNode[Batch] = Mapper(IterableWrapper(self._micro_batches()), self._read)
            if self._prefetch:
                batches = Prefetcher(batches, prefetch_factor=self._prefetch)
            for batch in batches:
                self._taken += 1
                yield batch
                if mixture is not self.mixture:  # what was read ahead may be of another segment
                    break

    def _read(self, places: Indices) -> Batch:
        inputs, targets = self._reader[places]
        if self._pin_memory:
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets

    def _micro_batches(self) -> Iterator[Indices]:
        """Yield the corpus and the index of each sequence, [sequences, 2], in each micro-batch of
        this rank."""
        for first in itertools.count(self._taken, _MICRO_BATCHES_AT_ONCE):
            numbers = first + np.arange(_MICRO_BATCHES_AT_ONCE)
            steps, within = np.divmod(numbers, self._accumulation)
            parts = (steps * self._ranks + self._rank) * self._accumulation + within
            positions = parts[:, None] * self._batch_size + np.arange(self._batch_size)
            places = (self._start + positions).ravel()
            if self._has_own_turns:
                corpora, samples = self.mixture.locate(places)
                samples = self._stream.positions(samples)
            else:
                corpora, samples = self.mixture.locate(self._stream.positions(places))
            sequences = np.empty_like(samples)
            for corpus in np.unique(corpora).tolist():
                of_corpus = corpora == corpus
                count = self._reader.readers[corpus].sequences
                sequences[of_corpus] = self._order(samples[of_corpus], sequences=count)
            yield from np.stack([corpora, sequences], axis=1).reshape(*positions.shape, 2)


class ValidationBatches:
    """Sequences of a split, spaced evenly, so that few of them represent all of it.

    Every rank has the same number of batches of the same shape, as collectives require. The targets
    of padding are IGNORE_INDEX.
    """

    def __init__(
        self,
        tokens: TokenShards,
        *,
        sequence_length: int,
        batch_size: int,
        rank: int,
        ranks: int,
        sequences: int,
    ) -> None:
        self._reader = SequenceReader(tokens, sequence_length)
        self._batch_size = batch_size
        self._rank = rank
        self._ranks = ranks
        self.sequences = min(sequences, self._reader.sequences)
        """Sequences over all ranks."""

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return -(-self.sequences // (self._batch_size * self._ranks))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            first = (number * self._ranks + self._rank) * self._batch_size
            wanted = np.arange(first, first + self._batch_size)
            # Past the end, repeat the last sequence and ignore its targets.
            places = np.minimum(wanted, self.sequences - 1)
            inputs, targets = self._reader[places * self._reader.sequences // self.sequences]
            targets[torch.from_numpy(wanted >= self.sequences)] = IGNORE_INDEX
            yield inputs, targets


# --- order of samples -----------------------------------------------------------------------------


def sequence_indices(positions: Indices, *, sequences: int, seed: int, shuffle: bool) -> Indices:
    """Return the sequence at each position of an endless stream of epochs.

    Each epoch is a different permutation, computed per position by a Feistel network (a keyed
    bijection on b bits), so nothing of the size of the corpus is stored.
    """
    assert sequences >= 1
    epochs, places = np.divmod(positions, sequences)
    if not shuffle or sequences == 1:
        return places
    keys = _round_keys(epochs.astype(np.uint64), seed)
    # The network permutes 0 ... 2**bits - 1. Values past the end go through it again until they are
    # inside. This is still a bijection, and takes under two passes on average.
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
    """Permute the numbers of `bits` bits. Each round can be undone: it changes one half by a
    function of the other half, which stays."""
    left_bits = bits // 2
    right_bits = bits - left_bits
    left = values >> np.uint64(right_bits)
    right = values & np.uint64(2**right_bits - 1)
    for key in keys:
        # The halves swap, and so do their widths, which differ by one if `bits` is odd.
        left, right = right, left ^ (_mix(right + key) >> np.uint64(64 - left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mix(words: _Words) -> _Words:
    """Mix each word, so that every bit of the result depends on all bits. Products overflow."""
    for multiplier in _MULTIPLIERS:
        words = (words ^ (words >> _SHIFT)) * multiplier
    return words ^ (words >> _SHIFT)
