"""Clusters of documents that are alike, so that each worker trains on a different kind of text.

2-means over hashed counts of tokens halves the documents again and again. All numbers are whole,
and so small that float64 holds their products and sums: every machine finds the same clusters.
"""

import shlex
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.shards import (
    INDEX_NAME,
    Clusters,
    Tokens,
    TokenShards,
    only_writer,
    read_index,
    write_index,
)
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.hardware import write_whole
from torchtitan_diloco.log import UserError, command_line, logger

_SAMPLE = 8192  # documents that decide where to split
_ITERATIONS = 20
_BUCKET_BITS = 10
_HASH, _HASH_BEFORE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_TOKENS_AT_ONCE, _DOCUMENTS_AT_ONCE = 2**22, 64

_Numbers = npt.NDArray[np.float64]  # whole
_Indices = npt.NDArray[np.int64]


def add_clusters(folder: Path, tokenizer: Tokenizer, count: int) -> bool:
    """Divide the documents to train on into clusters. Return whether there was anything to do."""
    read_index(folder / INDEX_NAME)  # or an error, before the lock makes a folder
    with only_writer(folder, wait=True):
        index = read_index(folder / INDEX_NAME)
        if any(len(one.tokens) == count for one in index.clusters):
            return False
        tokens, found = TokenShards(folder, "train", tokenizer), list[_Indices]()
        for start in range(0, len(tokens), _TOKENS_AT_ONCE):
            some = tokens.read(start, min(start + _TOKENS_AT_ONCE, len(tokens)))
            found.append(np.flatnonzero(some == tokenizer.end_of_document) + (start + 1))
        ends = np.union1d(np.concatenate(found), [len(tokens)])  # the last may be cut off
        lengths, documents = np.diff(ends, prepend=0), len(ends)
        chosen = np.unique(np.linspace(0, documents - 1, _SAMPLE).astype(np.int64))
        sample = np.concatenate([_features(tokens, ends[:one], lengths[[one]]) for one in chosen])
        assign = _split(sample, lengths[chosen], count if len(chosen) >= count else 1)
        starts = range(0, documents, _DOCUMENTS_AT_ONCE)
        parts = (
            _features(tokens, ends[:one], lengths[one:][:_DOCUMENTS_AT_ONCE]) for one in starts
        )
        numbers = np.concatenate([assign(part) for part in parts])
        sizes = np.bincount(numbers, weights=lengths, minlength=count).astype(int).tolist()
        if not all(sizes):
            raise UserError(
                f"{tokens.name} has too few different documents ({documents} in all) for {count} "
                'clusters: use a larger corpus, or data.shard_by = "random"'
            )
        content, file = np.stack([ends, numbers]).astype("<i8").tobytes(), f"train-{count}.clusters"
        write_whole(folder / file, content)
        index.clusters.append(Clusters(file, zlib.crc32(content), sizes))
        write_index(folder / INDEX_NAME, index)
    logger.info(
        f"data: divided {documents:,} documents into {count} clusters of {min(sizes):,} to "
        f"{max(sizes):,} tokens, in {folder}"
    )
    return True


def choose_clusters(tokens: TokenShards, parts: int) -> Clusters:
    """Return the fewest clusters that suffice for so many parts."""
    enough = [one for one in tokens.clusters if len(one.tokens) >= parts]
    if not enough:
        made = ["--tokenizer", tokens.tokenizer, "--out", str(tokens.folder)]
        raise UserError(
            f'data.shard_by = "clusters" needs {parts} clusters or more in {tokens.folder}: run\n'
            f"    {command_line('prepare')} {shlex.join(made)} --clusters {parts}"
        )
    return min(enough, key=lambda one: len(one.tokens))


class ClusterDocuments(TokenShards):
    """The documents in one part of the clusters, one after another."""

    def __init__(self, tokens: TokenShards, part: int, parts: int) -> None:
        super().__init__(tokens.folder, "train")
        self._tokens, clusters = tokens, choose_clusters(tokens, parts)
        self.name = f"part {part} of the clusters of {tokens.folder}"
        path = tokens.folder / clusters.file
        content = path.read_bytes() if path.exists() else b""
        if zlib.crc32(content) != clusters.checksum:
            raise UserError(f"{path} is damaged: its checksum is wrong; prepare the corpus again")
        ends, numbers = np.frombuffer(content, dtype="<i8").reshape(2, -1)
        mine = numbers * parts // len(clusters.tokens) == part  # neighbours are alike
        lengths = np.diff(ends, prepend=0)[mine]
        self._starts, self._ends = ends[mine] - lengths, np.cumsum(lengths)

    def _read_piece(self, number: int, start: int, stop: int) -> Tokens:
        first = int(self._starts[number])
        return self._tokens.read(first + start, first + stop)


def _features(tokens: TokenShards, ends_before: _Indices, lengths: _Indices) -> _Numbers:
    """Return for consecutive documents the roots of the shares of hashed tokens and pairs."""
    begin = int(ends_before[-1]) if len(ends_before) else 0
    words = tokens.read(begin, begin + int(lengths.sum())).astype(np.uint64) + np.uint64(1)
    before = np.roll(words, 1)
    before[np.cumsum(lengths) - lengths] = 0  # a document begins
    rows = np.repeat(np.arange(len(lengths)) << _BUCKET_BITS, lengths)
    counts = np.zeros(len(lengths) << _BUCKET_BITS, dtype=np.int64)
    for hashed in (words * _HASH, words * _HASH + before * _HASH_BEFORE):
        buckets = np.right_shift(hashed, np.uint64(64 - _BUCKET_BITS), dtype=np.uint64)
        counts += np.bincount(rows + buckets.astype(np.int64), minlength=len(counts))
    roots = np.sqrt(counts.reshape(len(lengths), -1) / lengths[:, None])
    return np.asarray(np.rint(4096 * roots))


def _split(features: _Numbers, lengths: _Indices, clusters: int) -> Callable[[_Numbers], _Indices]:
    """Split documents by 2-means, in which each center takes its share of all tokens, again and
    again. Return a function from features to clusters."""
    if clusters == 1:
        return lambda features: np.zeros(len(features), dtype=np.int64)
    half = clusters // 2
    direction = features[((features - features[0]) ** 2).sum(axis=1).argmax()] - features[0]
    for _ in range(_ITERATIONS):
        scores = features @ direction
        order = scores.argsort(kind="stable")
        middles = lengths[order].cumsum() - lengths[order] / 2
        place = int(np.searchsorted(middles, lengths.sum() * half / clusters))
        place = min(max(place, half), len(order) - (clusters - half))
        below, above = order[:place], order[place:]
        chosen, threshold = direction, scores[[below[-1], above[0]]].mean()
        direction = np.rint(features[above].mean(axis=0) - features[below].mean(axis=0))
    first = _split(features[below], lengths[below], half)
    second = _split(features[above], lengths[above], clusters - half)

    def assign(features: _Numbers) -> _Indices:
        above = features @ chosen >= threshold
        return np.where(above, second(features) + half, first(features))

    return assign
