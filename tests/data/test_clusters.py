import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.clusters import (
    FEATURES,
    FULL,
    assign,
    deal_out,
    learn_centres,
    squared_distances,
    text_features,
)

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


def documents(alphabets: list[str], each: int) -> list[np.ndarray]:
    """Random words of some alphabets in turn: text that differs in nothing but its letters."""
    random = np.random.default_rng(0)
    letters = [
        np.frombuffer(alphabet.encode(), dtype=np.uint8).astype(np.uint16) for alphabet in alphabets
    ]
    return [
        random.choice(letters[number % len(letters)], 300) for number in range(each * len(letters))
    ]


def clustered(texts: list[np.ndarray], clusters: int) -> list[int]:
    features = np.stack([text_features(text) for text in texts])
    sizes = np.array([len(text) for text in texts])
    chosen: list[int] = assign(
        squared_distances(features, learn_centres(features, sizes, clusters)), sizes
    ).tolist()
    return chosen


@pytest.mark.parametrize(
    "alphabets", [["abcdef", "uvwxyz"], ["abcd", "cdef", "ghij"], ["ab", "bc", "cd", "de"]]
)
def test_alike_texts_come_together(alphabets: list[str]) -> None:
    found = clustered(documents(alphabets, 6), len(alphabets))
    of_alphabet = [set(found[start :: len(alphabets)]) for start in range(len(alphabets))]
    assert all(len(clusters) == 1 for clusters in of_alphabet)
    assert len(set.union(*of_alphabet)) == len(alphabets)


def test_order_of_tokens_is_a_feature_too() -> None:
    rising, falling = (
        np.tile(np.arange(20, dtype=np.uint16), 10),
        np.tile(np.arange(20, dtype=np.uint16)[::-1], 10),
    )
    same, other = text_features(rising), text_features(falling)
    half = FEATURES // 2
    assert np.array_equal(same[:half], other[:half])
    assert not np.array_equal(same[half:], other[half:])


def test_features_are_roots_of_frequencies() -> None:
    feature = text_features(np.arange(1000, dtype=np.uint32) % 37)
    assert (feature >= 0).all()
    np.testing.assert_allclose([(half**2).sum() for half in np.split(feature, 2)], 1, rtol=1e-5)
    assert text_features(np.zeros(1, dtype=np.uint16)).sum() == 1, "a single token has no neighbour"


def test_the_same_documents_give_the_same_clusters() -> None:
    texts = documents(["abcdefgh", "efghijkl", "ijklmnop"], 8)
    assert clustered(texts, 3) == clustered(texts, 3)


@given(SIZES, st.integers(1, 8), st.integers(0, 100))
def test_no_cluster_takes_documents_once_it_is_full(
    sizes: list[int], clusters: int, seed: int
) -> None:
    distances = np.random.default_rng(seed).random((len(sizes), clusters)).astype(np.float32)
    distances[:, 0] /= 10  # everybody's favourite
    chosen = assign(distances, np.array(sizes))
    assert ((chosen >= 0) & (chosen < clusters)).all()
    for cluster in range(clusters):
        held = [size for size, own in zip(sizes, chosen.tolist(), strict=True) if own == cluster]
        assert sum(held) <= FULL * sum(sizes) / clusters + max(held, default=0)


def test_nobody_moves_without_need() -> None:
    distances = np.array([[1, 2], [2, 1], [1, 3], [3, 1]], dtype=np.float32)
    assert assign(distances, np.array([5, 5, 5, 5])).tolist() == [0, 1, 0, 1]


def test_who_has_most_to_lose_chooses_first() -> None:
    distances = np.array([[1, 2], [1, 9], [1, 3], [1, 1.1]], dtype=np.float32)
    assert assign(distances, np.array([5, 5, 5, 5])).tolist() == [
        0,
        0,
        0,
        1,
    ]  # full at 12.5: after the third


@given(SIZES, st.integers(1, 8))
def test_documents_are_dealt_out_evenly(sizes: list[int], hands: int) -> None:
    hand = deal_out(np.array(sizes), hands)
    filled = np.bincount(hand, weights=sizes, minlength=hands)
    assert filled.max() - filled.min() <= max(sizes)
