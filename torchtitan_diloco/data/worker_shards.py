"""Documents of their own for each worker (`data.shard_by`): dealt out, or clustered by their text.

The k-means here needs no package. Its clusters are bounded while it learns; scikit-learn's are not,
and on prose and code most of them became single odd documents. All draws have fixed seeds.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.files import only_writer, write_whole
from torchtitan_diloco.data.order import sequence_indices
from torchtitan_diloco.data.shards import TokenArray, Tokens, TokenShards
from torchtitan_diloco.data.tokenizer import Tokenizer

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

BUCKET_BITS = 9
FULL = 1.25
"""A cluster takes no more documents at so many times an equal share of the tokens."""

_VERSION = 1  # of what decides who gets which document
_CHUNK_TOKENS = 1 << 22
_DOCUMENTS_AT_ONCE = 1024
_LEARNED_FROM = 8192  # documents, evenly spread, that the centres are learned from
_STARTS = 4
_ITERATIONS = 20
_WORKERS_LISTED = 8
_HASH = np.uint64(0x9E3779B97F4A7C15)


class WorkerTokens(TokenArray):
    """Documents of one worker."""

    def __init__(self, tokens: TokenShards, name: str, starts: Integers, stops: Integers) -> None:
        self._tokens, self._starts = tokens, starts
        self.ends = np.cumsum(stops - starts)
        self.name, self.split, self.documents = name, tokens.split, len(starts)
        identity = tokens.fingerprint.encode() + starts.tobytes() + stops.tobytes()
        self.fingerprint = hashlib.sha256(identity).hexdigest()[:16]

    def _read_part(self, part: int, start: int, stop: int) -> Tokens:
        first = int(self._starts[part])
        return self._tokens.read(first + start, first + stop)


class WorkerShards:
    """Tokens that each worker reads, and its weight in the mean over workers."""

    def __init__(
        self, tokens: TokenShards, workers: int, parts: Sequence[WorkerTokens] = ()
    ) -> None:
        self.parts = parts
        """By worker. Empty: all workers take turns in one order of all tokens."""
        self.shares = [len(part) / len(tokens) for part in parts] or [1 / workers] * workers
        """Share of the tokens of each worker."""
        self.fingerprint = tokens.fingerprint
        """Changes when the tokens of any worker do."""
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
    """Decide which worker reads which documents. The result is kept in `data.cache_folder`; of
    several processes one does the work and the others wait."""
    if data.shard_by == "none":
        return WorkerShards(tokens, workers)
    key = f"worker-shards-{tokens.fingerprint[:8]}-{data.shard_by}-{workers}-v{_VERSION}"
    folder = Path(data.cache_folder).expanduser() / key
    path = folder / "documents.npy"
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
            f"cannot read {path}: {error}; delete {folder} to make it again"
        ) from error
    starts = np.concatenate([[0], stops[:-1]])
    parts = []
    for worker in range(workers):
        name = f"the shard of worker {worker} (data.shard_by = {data.shard_by}) of {tokens.name}"
        own = chosen == worker
        parts.append(WorkerTokens(tokens, name, starts[own], stops[own]))
    return WorkerShards(tokens, workers, parts)


def document_ends(tokens: TokenShards, end_of_document: int) -> Integers:
    """Return where each document ends, with its end-of-document token. The last may have none."""
    found = []
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens.read(start, min(start + _CHUNK_TOKENS, len(tokens)))
        found.append(np.flatnonzero(chunk == end_of_document) + start + 1)
    return np.union1d(np.concatenate(found), [len(tokens)]).astype(np.int64)


def _workers_of(data: Data, tokens: TokenShards, stops: Integers, workers: int) -> Integers:
    """Return the worker of each document."""
    if len(stops) < workers:
        raise ValueError(
            f'data.shard_by = "{data.shard_by}" gives every worker documents of its own, and '
            f"{tokens.name} has {len(stops)} for diloco.workers = {workers}: use a corpus of more "
            f'documents (a file or a .jsonl line is one), fewer workers, or data.shard_by = "none"'
        )
    sizes = np.diff(stops, prepend=0)
    by_text = data.shard_by == "clusters"
    chosen = _clusters(tokens, stops, sizes, workers) if by_text else deal_out(sizes, workers)
    empty = np.flatnonzero(np.bincount(chosen, minlength=workers) == 0).tolist()
    if empty:
        raise ValueError(
            f'data.shard_by = "{data.shard_by}" leaves workers {empty} of {workers} without a '
            f"document: the {len(stops)} documents of {tokens.name} are too few or too much alike. "
            f'Use fewer workers, or data.shard_by = "random"'
        )
    return chosen


def deal_out(sizes: Integers, workers: int) -> Integers:
    """Give documents in a random order to the worker with the fewest tokens so far."""
    count = len(sizes)
    chosen = np.empty(count, dtype=np.int64)
    filled = np.zeros(workers, dtype=np.int64)
    for document in sequence_indices(np.arange(count), sequences=count, seed=0, shuffle=True):
        chosen[document] = filled.argmin()
        filled[chosen[document]] += sizes[document]
    return chosen


# --- clusters ---


def _clusters(tokens: TokenShards, stops: Integers, sizes: Integers, workers: int) -> Integers:
    def features(documents: Integers) -> Iterator[Floats]:  # never those of all documents at once
        for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            block = documents[first : first + _DOCUMENTS_AT_ONCE]
            texts = [tokens.read(int(stops[i] - sizes[i]), int(stops[i])) for i in block]
            yield np.stack([text_features(text) for text in texts])

    documents = np.arange(len(stops))
    sample = documents[:: -(-len(stops) // _LEARNED_FROM)]
    centres = learn_centres(np.concatenate(list(features(sample))), sizes[sample], workers)
    distances = [squared_distances(block, centres) for block in features(documents)]
    return assign(np.concatenate(distances), sizes)


def text_features(tokens: Tokens) -> Floats:
    """Return how often each token and each pair of neighbours occurs, hashed into buckets.

    These are roots of frequencies. Their Euclidean distance (Hellinger's) is not dominated by the
    few most frequent tokens.
    """
    ids = tokens.astype(np.uint64)
    features = []
    for keys in (ids, (ids[:-1] << np.uint64(32)) + ids[1:]):
        buckets = ((keys + np.uint64(1)) * _HASH) >> np.uint64(64 - BUCKET_BITS)  # wraps at 64 bits
        counts = np.bincount(buckets.astype(np.int64), minlength=2**BUCKET_BITS)
        features.append(np.sqrt(counts / max(1, len(keys))).astype(np.float32))
    return np.concatenate(features)


def learn_centres(features: Floats, sizes: Integers, clusters: int) -> Floats:
    """Return [clusters, features] centres by k-means++, the best of some starts. A document counts
    by its tokens, and no cluster is overfull."""
    best, least = features[:clusters], np.inf
    for start in range(_STARTS):
        centres = _initial_centres(features, sizes, clusters, np.random.default_rng(start))
        for _ in range(_ITERATIONS):
            chosen, before = assign(squared_distances(features, centres), sizes), centres.copy()
            for cluster in np.unique(chosen):
                own = chosen == cluster
                centres[cluster] = np.average(features[own], axis=0, weights=sizes[own])
            if np.array_equal(centres, before):
                break
        distances = squared_distances(features, centres)
        inertia = float((distances[np.arange(len(sizes)), assign(distances, sizes)] * sizes).sum())
        if inertia < least:
            best, least = centres, inertia
    return best


def _initial_centres(
    features: Floats, sizes: Integers, clusters: int, random: np.random.Generator
) -> Floats:
    """Draw each next centre in proportion to its tokens and its distance from those before."""
    nearest = np.ones(len(sizes))
    chosen: list[int] = []
    for _ in range(clusters):
        mass = np.cumsum(nearest * sizes)
        drawn = int(np.searchsorted(mass, random.random() * mass[-1], side="right"))
        chosen.append(min(drawn, len(sizes) - 1))
        nearest = squared_distances(features, features[chosen]).min(axis=1)
    return features[chosen]


def squared_distances(features: Floats, centres: Floats) -> Floats:
    """Return [documents, clusters]."""
    squares = (features**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)[None, :]
    distances: Floats = np.maximum(squares - 2 * features @ centres.T, 0)
    return distances


def assign(distances: Floats, sizes: Integers) -> Integers:
    """Return the nearest cluster of each document that is not full. Those with the largest gap
    between their two nearest clusters choose first."""
    clusters = distances.shape[1]
    full = FULL * sizes.sum() / clusters
    chosen: Integers = distances.argmin(axis=1).astype(np.int64)
    if clusters == 1 or np.bincount(chosen, weights=sizes, minlength=clusters).max() < full:
        return chosen
    two_nearest = np.partition(distances, 1, axis=1)[:, :2]
    preferences = np.argsort(distances, axis=1, kind="stable")
    filled = [0] * clusters
    for document in np.argsort(two_nearest[:, 0] - two_nearest[:, 1], kind="stable").tolist():
        cluster = next(choice for choice in preferences[document].tolist() if filled[choice] < full)
        chosen[document] = cluster
        filled[cluster] += int(sizes[document])
    return chosen
