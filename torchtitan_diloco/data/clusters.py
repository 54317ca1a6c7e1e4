"""Clusters of documents that are alike, so that each worker trains on text of another kind.

2-means over hashed counts of tokens halves the documents again and again. All numbers are whole,
and so small that float64 holds their products and sums: every machine finds the same clusters.
"""

import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.shards import (
    INDEX_NAME,
    Clusters,
    TokenArray,
    Tokens,
    TokenShards,
    only_writer,
    read_index,
    write_index,
)
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.hardware import write_whole
from torchtitan_diloco.log import UserError, command_line

_BUCKET_BITS = 10
_SAMPLE = 8192  # documents from which the splits are computed
_ITERATIONS = 20
_TOKENS_AT_ONCE = 2**22
_HASH, _HASH_BEFORE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)

_Numbers = npt.NDArray[np.float64]  # whole
_Ends = npt.NDArray[np.int64]


def add_clusters(folder: Path, tokenizer: Tokenizer, count: int) -> bool:
    """Divide the documents to train on into clusters. Return whether there was anything to do."""
    read_index(folder / INDEX_NAME)  # or an error, before the lock makes a folder
    with only_writer(folder, wait=True):
        index = read_index(folder / INDEX_NAME)
        if any(len(one.tokens) == count for one in index.clusters):
            return False
        tokens = TokenShards(folder, "train", tokenizer)
        ends = _find_ends(tokens, tokenizer.end_of_document)
        chosen = np.unique(np.linspace(0, len(ends) - 1, min(_SAMPLE, len(ends))).astype(np.int64))
        lengths = np.diff(ends, prepend=0)
        sample = [_features(*_read_documents(tokens, ends, one, one + 1)) for one in chosen]
        enough = len(chosen) >= count
        split = _split(np.concatenate(sample), lengths[chosen], count) if enough else None
        batches = (_features(*one) for one in _batches(tokens, ends))
        numbers = np.concatenate([_assign(batch, split) for batch in batches])
        sizes = np.bincount(numbers, weights=lengths, minlength=count)
        if not sizes.all():
            raise UserError(
                f"{tokens.name} has too few different documents ({len(ends)} in all) for {count} "
                'clusters: use a larger corpus, or data.shard_by = "random"'
            )
        content = np.stack([ends, numbers]).astype("<i8").tobytes()
        file = f"train-{count}.clusters"
        write_whole(folder / file, content)
        index.clusters.append(Clusters(file, zlib.crc32(content), [int(one) for one in sizes]))
        write_index(folder / INDEX_NAME, index)
        print(f"data: {len(ends):,} documents of {folder} in {count} clusters", flush=True)
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


class ClusterDocuments(TokenArray):
    """The documents in one part of the clusters, one after another."""

    def __init__(self, tokens: TokenShards, part: int, parts: int) -> None:
        self._tokens = tokens
        clusters = choose_clusters(tokens, parts)
        self.name = f"worker {part}'s clusters of {tokens.folder}"
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


# --- k-means --------------------------------------------------------------------------------------


def _find_ends(tokens: TokenShards, end_of_document: int) -> _Ends:
    found = [np.array([len(tokens)])]  # the last document may be cut off
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = tokens.read(start, min(start + _TOKENS_AT_ONCE, len(tokens)))
        found.append(np.flatnonzero(some == end_of_document) + (start + 1))
    return np.unique(np.concatenate(found))


def _read_documents(
    tokens: TokenShards, ends: _Ends, first: int, stop: int
) -> tuple[Tokens, _Ends]:
    """Return the tokens of consecutive documents, and the lengths of the documents."""
    begin = int(ends[first - 1]) if first else 0
    return tokens.read(begin, int(ends[stop - 1])), np.diff(ends[first:stop], prepend=begin)


def _batches(tokens: TokenShards, ends: _Ends) -> Iterator[tuple[Tokens, _Ends]]:
    first = 0
    while first < len(ends):
        until = (ends[first - 1] if first else 0) + _TOKENS_AT_ONCE
        stop = max(first + 1, int(np.searchsorted(ends, until, side="right")))
        yield _read_documents(tokens, ends, first, stop)
        first = stop


def _features(tokens: Tokens, lengths: _Ends) -> _Numbers:
    """Return for each document the roots of the shares of hashed tokens and pairs of tokens."""
    words = tokens.astype(np.uint64) + np.uint64(1)
    before = np.roll(words, 1)
    before[np.cumsum(lengths) - lengths] = 0  # a document begins
    rows = np.repeat(np.arange(len(lengths)) << _BUCKET_BITS, lengths)
    counts = np.zeros(len(lengths) << _BUCKET_BITS, dtype=np.int64)
    for hashed in (words * _HASH, words * _HASH + before * _HASH_BEFORE):
        buckets = np.right_shift(hashed, np.uint64(64 - _BUCKET_BITS), dtype=np.uint64)
        counts += np.bincount(rows + buckets.astype(np.int64), minlength=len(counts))
    roots = np.sqrt(counts.reshape(len(lengths), -1) / lengths[:, None])
    return np.asarray(np.rint(4096 * roots))


class _Split(NamedTuple):
    """Documents of at least the threshold in a direction are those of the clusters from `half`."""

    direction: _Numbers
    threshold: float
    half: int
    below: "_Split | None"
    above: "_Split | None"


def _split(features: _Numbers, lengths: _Ends, clusters: int) -> _Split | None:
    """Split documents by 2-means, in which each center takes its share of all tokens; and again."""
    if clusters == 1:
        return None
    half = clusters // 2
    far = ((features - features[0]) ** 2).sum(axis=1).argmax()
    direction = features[far] - features[0]
    for _ in range(_ITERATIONS):
        scores = features @ direction
        order = scores.argsort(kind="stable")
        middles = lengths[order].cumsum() - lengths[order] / 2
        place = int(np.searchsorted(middles, lengths.sum() * half / clusters))
        place = min(max(place, half), len(order) - (clusters - half))
        below, above = order[:place], order[place:]
        found, threshold = direction, float(scores[[below[-1], above[0]]].mean())
        direction = np.rint(features[above].mean(axis=0) - features[below].mean(axis=0))
    return _Split(
        found,
        threshold,
        half,
        _split(features[below], lengths[below], half),
        _split(features[above], lengths[above], clusters - half),
    )


def _assign(features: _Numbers, split: _Split | None) -> _Ends:
    """Return the cluster of each document."""
    numbers = np.zeros(len(features), dtype=np.int64)
    if split is not None:
        above = features @ split.direction >= split.threshold
        numbers[~above] = _assign(features[~above], split.below)
        numbers[above] = _assign(features[above], split.above) + split.half
    return numbers
