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
from torchtitan_diloco.data.loader import sequence_indices
from torchtitan_diloco.data.shards import (
    TokenArray,
    Tokens,
    TokenShards,
    only_writer,
    write_whole,
)
from torchtitan_diloco.data.tokenizer import Tokenizer

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating]

BUCKET_BITS = 9
FULL = 1.25
"""A cluster takes no more documents at so many times an equal share of the tokens."""

_VERSION = 2  # of what decides who gets which document
_CHUNK_TOKENS = 1 << 22
_DOCUMENTS_AT_ONCE = 1024
_LEARNED_FROM = 8192  # documents, evenly spread, that the centres are learned from
_STARTS = 4
_ITERATIONS = 20
_HASH = np.uint64(0x9E3779B97F4A7C15)


class WorkerTokens(TokenArray):
    """Documents of one worker."""

    def __init__(self, tokens: TokenShards, name: str, starts: Integers, stops: Integers) -> None:
        self._tokens, self._starts, self.name = tokens, starts, name
        self.ends = np.cumsum(stops - starts)
        identity = tokens.fingerprint.encode() + starts.tobytes() + stops.tobytes()
        self.fingerprint = hashlib.sha256(identity).hexdigest()[:16]

    def _read_part(self, part: int, start: int, stop: int) -> Tokens:
        first = int(self._starts[part])
        return self._tokens.read(first + start, first + stop)


class WorkerShards:
    """Tokens that each worker reads, and its weight in the mean over workers."""

    def __init__(self, parts: Sequence[TokenArray], workers: int) -> None:
        self.parts = parts
        """By worker. A single one: all workers take turns in one order of its tokens."""
        self._sizes = [len(part) for part in parts]
        each = self._sizes if len(parts) > 1 else [1] * workers
        self.shares = [size / sum(each) for size in each]
        """Share of the tokens of each worker."""
        self.fingerprint = parts[0].fingerprint
        """Changes when the tokens of any worker do."""
        if len(parts) > 1:
            digest = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode())
            self.fingerprint = digest.hexdigest()[:16]

    def __str__(self) -> str:
        total, least, most = sum(self._sizes), min(self._sizes), max(self._sizes)
        by_worker = f" (by worker: {least:,} to {most:,})" if len(self.parts) > 1 else ""
        return f"{total:,} tokens{by_worker}"


def share_out(data: Data, tokens: TokenShards, tokenizer: Tokenizer, workers: int) -> WorkerShards:
    """Decide which worker reads which documents. The result is kept in `data.cache_folder`; of
    several processes one does the work and the others wait."""
    if data.shard_by == "none":
        return WorkerShards([tokens], workers)
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
    stops, chosen = np.load(path)
    starts = np.concatenate([[0], stops[:-1]])
    parts = []
    for worker in range(workers):
        name = f"the shard of worker {worker} (data.shard_by = {data.shard_by}) of {tokens.name}"
        own = chosen == worker
        parts.append(WorkerTokens(tokens, name, starts[own], stops[own]))
    return WorkerShards(parts, workers)


def document_ends(tokens: TokenShards, end_of_document: int) -> Integers:
    """Return where each document ends, with its end-of-document token. The last may have none."""
    found = []
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens.read(start, min(start + _CHUNK_TOKENS, len(tokens)))
        found.append(np.flatnonzero(chunk == end_of_document) + start + 1)
    return np.union1d(np.concatenate(found), [len(tokens)]).astype(np.int64)


def _workers_of(data: Data, tokens: TokenShards, stops: Integers, workers: int) -> Integers:
    """Return the worker of each document."""
    sizes = np.diff(stops, prepend=0)
    by_text = data.shard_by == "clusters"
    chosen = _clusters(tokens, stops, sizes, workers) if by_text else deal_out(sizes, workers)
    empty = np.flatnonzero(np.bincount(chosen, minlength=workers) == 0).tolist()
    if empty:
        raise ValueError(
            f'data.shard_by = "{data.shard_by}" leaves workers {empty} of diloco.workers = '
            f"{workers} without a document: the {len(stops)} documents of {tokens.name} (a file or "
            f"a .jsonl line is one) are too few or too much alike. Use another corpus, fewer "
            f'workers, or data.shard_by = "random" or "none"'
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
    return assign(np.concatenate([block @ centres.T for block in features(documents)]), sizes)


def text_features(tokens: Tokens) -> Floats:
    """Return how often each token and each pair of neighbours occurs, hashed into buckets.

    These are roots of frequencies: a product of two texts (their Bhattacharyya coefficient) is not
    dominated by the few most frequent tokens.
    """
    ids = tokens.astype(np.uint64)
    features = []
    for keys in (ids, (ids[:-1] << np.uint64(32)) + ids[1:]):
        buckets = ((keys + np.uint64(1)) * _HASH) >> np.uint64(64 - BUCKET_BITS)  # wraps at 64 bits
        counts = np.bincount(buckets.astype(np.int64), minlength=2**BUCKET_BITS)
        features.append(np.sqrt(counts / max(1, len(keys))).astype(np.float32))
    return np.concatenate(features)


def learn_centres(features: Floats, sizes: Integers, clusters: int) -> Floats:
    """Return [clusters, features] directions by k-means, the best of some starts.

    A document counts by its tokens, and no cluster is overfull.
    """
    best, highest = features[:clusters], 0.0
    for start in range(_STARTS):
        centres = _initial_centres(features, sizes, clusters, np.random.default_rng(start))
        for _ in range(_ITERATIONS):
            similarity = features @ centres.T
            chosen = assign(similarity, sizes)
            total = float(sizes @ similarity[np.arange(len(sizes)), chosen])
            if total > highest:
                best, highest = centres, total
            sums = (sizes * (chosen == np.arange(clusters)[:, None])) @ features
            centres = sums / np.linalg.norm(sums, axis=1, keepdims=True).clip(1)
    return best


def _initial_centres(
    features: Floats, sizes: Integers, clusters: int, random: np.random.Generator
) -> Floats:
    """Draw each next centre by its tokens and its distance from those before (k-means++)."""
    distances, drawn = np.ones(len(sizes)), []
    for _ in range(clusters):
        chances = sizes * distances
        drawn.append(random.choice(len(sizes), p=chances / chances.sum()))
        # The product of a text with itself is 2: tokens and pairs count 1 each.
        distances = np.minimum(distances, 1 - features @ features[drawn[-1]] / 2).clip(1e-9)
    return features[drawn]


def assign(similarity: Floats, sizes: Integers) -> Integers:
    """Return the most similar cluster of each document that is not full.

    Documents with the largest gap between their two most similar clusters choose first.
    """
    clusters = similarity.shape[1]
    full = FULL * sizes.sum() / clusters
    best_two = np.sort(similarity, axis=1)[:, -2:]
    filled = np.zeros(clusters, dtype=np.int64)
    chosen = np.empty(len(sizes), dtype=np.int64)
    for document in np.argsort(best_two[:, 0] - best_two[:, -1], kind="stable"):
        cluster = np.where(filled < full, similarity[document], -np.inf).argmax()
        chosen[document] = cluster
        filled[cluster] += sizes[document]
    return chosen
