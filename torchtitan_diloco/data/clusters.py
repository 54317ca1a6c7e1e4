"""Clusters of documents by their text: k-means over histograms of tokens and of neighbouring tokens. Needs no model.

Everything is seeded with constants, so the same documents give the same clusters in every run.
"""

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.order import sequence_indices
from torchtitan_diloco.data.shards import Tokens

Features = npt.NDArray[np.float32]
"""[documents, FEATURES]"""
Integers = npt.NDArray[np.int64]

BUCKET_BITS = 9
FEATURES = 2 * 2**BUCKET_BITS
FULL = 1.25
"""A cluster takes no more documents once it has so many times an equal share of the tokens. Without this bound k-means makes
clusters of single odd documents."""

_STARTS = 4
_ITERATIONS = 20
_HASH = np.uint64(0x9E3779B97F4A7C15)


def text_features(tokens: Tokens) -> npt.NDArray[np.float32]:
    """How often each token and each pair of neighbours occurs, hashed into buckets, as roots of frequencies: their Euclidean
    distance (Hellinger's) does not leave the last word to the few most frequent tokens."""
    ids = tokens.astype(np.uint64)
    pairs = (ids[:-1] << np.uint64(32)) + ids[1:]
    return np.concatenate([_root_frequencies(ids), _root_frequencies(pairs)])


def _root_frequencies(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    buckets = ((keys + np.uint64(1)) * _HASH) >> np.uint64(
        64 - BUCKET_BITS
    )  # the product wraps at 64 bits
    counts = np.bincount(buckets.astype(np.int64), minlength=2**BUCKET_BITS)
    return np.sqrt(counts / max(1, len(keys))).astype(np.float32)


def learn_centres(features: Features, sizes: Integers, clusters: int) -> Features:
    """[clusters, FEATURES]: k-means in which a document counts by its tokens and no cluster is overfull; the best of some
    starts."""
    best, least = features[:clusters], np.inf
    for start in range(_STARTS):
        centres = _spread_out(features, sizes, clusters, np.random.default_rng(start))
        for _ in range(_ITERATIONS):
            chosen = assign(squared_distances(features, centres), sizes)
            means = [
                _mean(features, sizes, chosen == cluster, centres[cluster])
                for cluster in range(clusters)
            ]
            centres, before = np.stack(means), centres
            if np.array_equal(centres, before):
                break
        distances = squared_distances(features, centres)
        inertia = float((distances[np.arange(len(sizes)), assign(distances, sizes)] * sizes).sum())
        if inertia < least:
            best, least = centres, inertia
    return best


def _spread_out(
    features: Features, sizes: Integers, clusters: int, random: np.random.Generator
) -> Features:
    """k-means++: each next centre is a document drawn in proportion to its tokens and its distance from those before."""
    nearest = np.ones(len(sizes))
    chosen: list[int] = []
    for _ in range(clusters):
        mass = np.cumsum(nearest * sizes)
        chosen.append(
            min(
                int(np.searchsorted(mass, random.random() * mass[-1], side="right")), len(sizes) - 1
            )
        )
        nearest = squared_distances(features, features[chosen]).min(axis=1)
    return features[chosen]


def _mean(
    features: Features, sizes: Integers, members: npt.NDArray[np.bool_], otherwise: Features
) -> Features:
    if not members.any():
        return otherwise
    return np.average(features[members], axis=0, weights=sizes[members]).astype(np.float32)


def squared_distances(features: Features, centres: Features) -> npt.NDArray[np.float32]:
    """[documents, clusters]"""
    squares = (features**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)[None, :]
    distances: npt.NDArray[np.float32] = np.maximum(squares - 2 * features @ centres.T, 0)
    return distances


def assign(distances: npt.NDArray[np.float32], sizes: Integers) -> Integers:
    """The cluster of each document: the nearest one that is not full. Documents that have most to lose choose first."""
    clusters = distances.shape[1]
    full = FULL * sizes.sum() / clusters
    nearest: Integers = distances.argmin(axis=1).astype(np.int64)
    if clusters == 1 or np.bincount(nearest, weights=sizes, minlength=clusters).max() < full:
        return nearest
    two_nearest = np.partition(distances, 1, axis=1)[:, :2]
    order = np.argsort(two_nearest[:, 0] - two_nearest[:, 1], kind="stable")
    preferences = np.argsort(distances, axis=1, kind="stable")
    filled = [0] * clusters
    for document in order.tolist():
        cluster = next(choice for choice in preferences[document].tolist() if filled[choice] < full)
        nearest[document] = cluster
        filled[cluster] += int(sizes[document])
    return nearest


def deal_out(sizes: Integers, hands: int) -> Integers:
    """The control of clusters: documents in a random order, each to whoever has the fewest tokens so far."""
    hand = np.empty(len(sizes), dtype=np.int64)
    filled = np.zeros(hands, dtype=np.int64)
    for document in sequence_indices(
        np.arange(len(sizes)), sequences=len(sizes), seed=0, shuffle=True
    ).tolist():
        hand[document] = filled.argmin()
        filled[hand[document]] += sizes[document]
    return hand
