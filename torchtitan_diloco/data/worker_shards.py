"""What each worker trains on (`data.shard_by`): all of the corpus, or documents of its own."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.clusters import (
    Features,
    Integers,
    assign,
    deal_out,
    learn_centres,
    squared_distances,
    text_features,
)
from torchtitan_diloco.data.files import only_writer, write_whole
from torchtitan_diloco.data.shards import Split, Tokens, TokenShards
from torchtitan_diloco.data.tokenizer import Tokenizer

_ASSIGNMENT_NAME = "documents.npy"
_VERSION = 1  # of what decides who gets which document
_CHUNK_TOKENS = 1 << 22
_DOCUMENTS_AT_ONCE = 1024
_WORKERS_LISTED = 8
_LEARNED_FROM = 8192  # documents, evenly spread, that the centres are learned from: bounds memory


class WorkerTokens:
    """The documents of one worker, one after the other, as one long array that is never loaded."""

    def __init__(self, tokens: TokenShards, name: str, starts: Integers, stops: Integers) -> None:
        self._tokens, self._starts = tokens, starts
        self._ends = np.cumsum(stops - starts)
        self.name = name
        """For messages."""
        self.split: Split = tokens.split
        self.documents = len(starts)
        identity = tokens.fingerprint.encode() + starts.tobytes() + stops.tobytes()
        self.fingerprint = hashlib.sha256(identity).hexdigest()[:16]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens start ... stop - 1, also across documents."""
        assert 0 <= start < stop <= len(self), f"{start}:{stop} of {len(self)} tokens"
        first, last = (int(i) for i in np.searchsorted(self._ends, [start, stop - 1], side="right"))
        parts = []
        for document in range(first, last + 1):
            end = int(self._ends[document])
            begin = int(self._ends[document - 1]) if document else 0
            moved = int(self._starts[document]) - begin
            parts.append(self._tokens.read(max(start, begin) + moved, min(stop, end) + moved))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class WorkerShards:
    """Who reads what, and how much each worker's change counts."""

    def __init__(
        self, tokens: TokenShards, workers: int, parts: Sequence[WorkerTokens] = ()
    ) -> None:
        self.parts = parts
        """By worker; none: all workers take turns in one order of all tokens."""
        self.shares = [len(part) / len(tokens) for part in parts] or [1 / workers] * workers
        """Of the tokens, by worker: the weights of the mean over workers."""
        self.fingerprint = tokens.fingerprint
        """Changes when any worker's tokens do."""
        if parts:
            digest = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode())
            self.fingerprint = digest.hexdigest()[:16]
        self._tokens = len(tokens)

    def __str__(self) -> str:
        if not self.parts:
            return f"{self._tokens:,} tokens"
        each = [f"{len(part):,} in {part.documents:,} documents" for part in self.parts]
        if len(each) > _WORKERS_LISTED:
            sizes = sorted(map(len, self.parts))
            each = [f"from {sizes[0]:,} to {sizes[-1]:,}"]
        return f"{self._tokens:,} tokens (by worker: {', '.join(each)})"


def share_out(data: Data, tokens: TokenShards, tokenizer: Tokenizer, workers: int) -> WorkerShards:
    """Worked out once and kept in `data.cache_folder`; of several processes one does the work and the others wait."""
    if data.shard_by == "none":
        return WorkerShards(tokens, workers)
    key = f"worker-shards-{tokens.fingerprint[:8]}-{data.shard_by}-{workers}-v{_VERSION}"
    folder = Path(data.cache_folder).expanduser() / key
    path = folder / _ASSIGNMENT_NAME
    if not path.exists():
        with only_writer(folder, wait=True):
            if not path.exists():
                stops = document_ends(tokens, tokenizer.end_of_document)
                content = io.BytesIO()
                np.save(content, np.stack([stops, _workers_of(data, tokens, stops, workers)]))
                write_whole(path, content.getvalue())
    try:
        stops, chosen = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"cannot read {path}: {error}; delete {folder}, it is made again"
        ) from error
    starts = np.concatenate([[0], stops[:-1]])
    names = [
        f"the shard of worker {worker} (data.shard_by = {data.shard_by}) of {tokens.name}"
        for worker in range(workers)
    ]
    mine = [chosen == worker for worker in range(workers)]
    return WorkerShards(
        tokens,
        workers,
        [
            WorkerTokens(tokens, name, starts[own], stops[own])
            for name, own in zip(names, mine, strict=True)
        ],
    )


def document_ends(tokens: TokenShards, end_of_document: int) -> Integers:
    """Where each document ends, its end-of-document token included. What follows the last such token is one too."""
    found = []
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens.read(start, min(start + _CHUNK_TOKENS, len(tokens)))
        found.append(np.flatnonzero(chunk == end_of_document) + start + 1)
    ends = np.concatenate(found)
    if not len(ends) or ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    return ends.astype(np.int64)


def _workers_of(data: Data, tokens: TokenShards, stops: Integers, workers: int) -> Integers:
    """The worker of each document."""
    if len(stops) < workers:
        raise ValueError(
            f'data.shard_by = "{data.shard_by}" gives every worker documents of its own, and {tokens.name} has {len(stops)} '
            f"for diloco.workers = {workers}: use a corpus of more documents (a file is one; in .jsonl a line), fewer workers, "
            f'or data.shard_by = "none"'
        )
    sizes = np.diff(stops, prepend=0)
    chosen = (
        deal_out(sizes, workers)
        if data.shard_by == "random"
        else _clusters(tokens, stops, sizes, workers)
    )
    empty = np.flatnonzero(np.bincount(chosen, minlength=workers) == 0).tolist()
    if empty:
        raise ValueError(
            f'data.shard_by = "{data.shard_by}" leaves workers {empty} of {workers} without a document: the {len(stops)} '
            f'documents of {tokens.name} are too few or too much alike. Use fewer workers, or data.shard_by = "random"'
        )
    return chosen


def _clusters(tokens: TokenShards, stops: Integers, sizes: Integers, workers: int) -> Integers:
    documents = np.arange(len(stops))
    sample = documents[:: -(-len(stops) // _LEARNED_FROM)]
    features = np.concatenate(list(_features(tokens, stops, sizes, sample)))
    centres = learn_centres(features, sizes[sample], workers)
    distances = [
        squared_distances(block, centres) for block in _features(tokens, stops, sizes, documents)
    ]
    return assign(np.concatenate(distances), sizes)


def _features(
    tokens: TokenShards, stops: Integers, sizes: Integers, documents: Integers
) -> Iterator[Features]:
    """In blocks, so that all documents of a large corpus are never held at once."""
    for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        chosen = documents[first : first + _DOCUMENTS_AT_ONCE]
        spans = zip((stops[chosen] - sizes[chosen]).tolist(), stops[chosen].tolist(), strict=True)
        yield np.stack([text_features(tokens.read(start, stop)) for start, stop in spans])
