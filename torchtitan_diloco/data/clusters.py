"""Divide a corpus into corpora of documents that are alike, one for each worker.

2-means over hashed counts of tokens halves the documents again and again. All numbers are whole,
and so small that float64 holds their products and sums: every machine finds the same clusters.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.shards import (
    INDEX_NAME,
    SPLITS,
    STARTED_NAME,
    ShardWriter,
    Tokens,
    TokenShards,
    only_writer,
    read_index,
    read_or_begin_index,
)
from torchtitan_diloco.data.tokenizer import Tokenizer

_SAMPLE = 8192  # documents that decide where to split
_ITERATIONS = 20
_BUCKET_BITS = 10
_HASH = np.uint64(0x9E3779B97F4A7C15)
_HASH_BEFORE = np.uint64(0xD1B54A32D192ED03)
_TOKENS_AT_ONCE = 2**22
_DOCUMENTS_AT_ONCE = 64

_Numbers = npt.NDArray[np.float64]  # whole
_Indices = npt.NDArray[np.int64]


def write_clusters(folder: Path, tokenizer: Tokenizer, count: int) -> bool:
    """Divide the documents of a corpus into clusters, and write each as a corpus: FOLDER-0,
    FOLDER-1, ... Return whether there was anything to do.

    If this was killed, it continues: each cluster keeps its finished shards, and none gets its
    index, without which it cannot be read, before all are written.
    """
    index = read_index(folder / INDEX_NAME)
    tokens = TokenShards(folder, "train", tokenizer)
    targets = cluster_folders(folder, count)
    settings = [
        index.settings | {"cluster": number, "clusters": count, "of": tokens.fingerprint}
        for number in range(count)
    ]
    if all((target / INDEX_NAME).exists() for target in targets):
        for target, wanted in zip(targets, settings, strict=True):
            read_or_begin_index(target, wanted)  # raises if they are of another corpus or number
        return False
    train = _Documents(tokens, tokenizer)
    too_few = UserError(
        f"{folder} has too few different documents ({len(train)} in all) for {count} clusters: use "
        "a larger corpus, or fewer clusters"
    )
    if len(train) < count:
        raise too_few
    assign = _learn(train, count)
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(only_writer(target, wait=False))
        indices = [
            read_or_begin_index(target, wanted)
            for target, wanted in zip(targets, settings, strict=True)
        ]
        for split in SPLITS:
            if not index.splits[split].tokens:
                continue
            documents = train
            if split != "train":
                documents = _Documents(TokenShards(folder, split, tokenizer), tokenizer)
            writers = [
                ShardWriter(
                    target, split, target_index, shard_tokens=index.settings["shard_tokens"]
                )
                for target, target_index in zip(targets, indices, strict=True)
            ]
            _write(documents, assign, writers)
        sizes = [target_index.splits["train"].tokens for target_index in indices]
        if not all(sizes):
            raise too_few
        for target in targets:
            if (target / STARTED_NAME).exists():
                (target / STARTED_NAME).rename(target / INDEX_NAME)
    described = [f"{target} ({size:,} tokens)" for target, size in zip(targets, sizes, strict=True)]
    print(f"clusters: {counted(count, 'corpus', 'corpora')}, {', '.join(described)}", flush=True)
    return True


def cluster_folders(folder: Path, count: int) -> list[Path]:
    """Return the folders of the clusters of a corpus."""
    return [folder.with_name(f"{folder.name}-{number}") for number in range(count)]


class _Documents:
    """The documents of a split, by their numbers."""

    def __init__(self, tokens: TokenShards, tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        ends = list[_Indices]()
        for start in range(0, len(tokens), _TOKENS_AT_ONCE):
            part = tokens.read(start, min(start + _TOKENS_AT_ONCE, len(tokens)))
            ends.append(np.flatnonzero(part == tokenizer.end_of_document) + (start + 1))
        self.ends = np.union1d(np.concatenate(ends), [len(tokens)])  # the last may be cut off
        self.lengths = np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def features(self, first: int, count: int) -> _Numbers:
        """Return the features of documents that follow one another."""
        return _features(self.tokens, self.ends[:first], self.lengths[first : first + count])

    def read(self, number: int) -> Tokens:
        end = int(self.ends[number])
        return self.tokens.read(end - int(self.lengths[number]), end)


def _learn(documents: _Documents, count: int) -> Callable[[_Numbers], _Indices]:
    """Return a function from features to clusters, learned from some of the documents."""
    chosen = np.unique(np.linspace(0, len(documents) - 1, _SAMPLE).astype(np.int64))
    sample = np.concatenate([documents.features(number, 1) for number in chosen.tolist()])
    clusters = count if len(chosen) >= count else 1  # with too few documents, the caller raises
    return _split(sample, documents.lengths[chosen], clusters)


def _write(
    documents: _Documents,
    assign: Callable[[_Numbers], _Indices],
    writers: Sequence[ShardWriter],
) -> None:
    """Give each document to the writer of its cluster, after those that it has written before."""
    for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        clusters = assign(documents.features(first, _DOCUMENTS_AT_ONCE)).tolist()
        for number, cluster in enumerate(clusters, start=first):
            if number > writers[cluster].last_piece:
                writers[cluster].add(number, documents.read(number), ends_document=True)
    for writer in writers:
        writer.finish_shard()


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
        # Cut the documents, in the order of their scores, where the first half has its share of
        # all tokens. Each half keeps at least one document for each of its clusters.
        middles = lengths[order].cumsum() - lengths[order] / 2
        place = int(np.searchsorted(middles, lengths.sum() * half / clusters))
        place = min(max(place, half), len(order) - (clusters - half))
        below = order[:place]
        above = order[place:]
        chosen = direction
        threshold = scores[[below[-1], above[0]]].mean()
        direction = np.rint(features[above].mean(axis=0) - features[below].mean(axis=0))
    first = _split(features[below], lengths[below], half)
    second = _split(features[above], lengths[above], clusters - half)

    def assign(features: _Numbers) -> _Indices:
        above = features @ chosen >= threshold
        return np.where(above, second(features) + half, first(features))

    return assign
