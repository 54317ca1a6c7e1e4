from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.loader import Indices, sequence_indices


def epoch_order(sequences: int, epoch: int, seed: int = 0) -> Indices:
    positions = np.arange(epoch * sequences, (epoch + 1) * sequences)
    return sequence_indices(positions, sequences=sequences, seed=seed, shuffle=True)


@given(st.integers(1, 140) | st.integers(1, 5000), st.integers(0, 10**6), st.integers(0, 2**70))
def test_every_epoch_has_every_sequence_once(sequences: int, epoch: int, seed: int) -> None:
    assert np.array_equal(np.sort(epoch_order(sequences, epoch, seed)), np.arange(sequences))


@given(st.integers(1, 2**62), st.integers(0, 2**62), st.integers(0, 100))
def test_any_position_of_any_corpus_has_a_sequence(size: int, position: int, seed: int) -> None:
    (index,) = sequence_indices(np.array([position]), sequences=size, seed=seed, shuffle=True)
    assert 0 <= index < size


def test_positions_can_be_asked_for_in_any_grouping() -> None:
    positions = np.arange(95, 400)  # over several epochs of 101
    together = sequence_indices(positions, sequences=101, seed=5, shuffle=True)
    for i in range(305):
        alone = sequence_indices(positions[i : i + 1], sequences=101, seed=5, shuffle=True)
        assert alone[0] == together[i]


def test_order_is_frozen() -> None:
    """Saved runs continue with it: it may never change."""
    assert epoch_order(10, 0, seed=0).tolist() == [2, 5, 7, 4, 0, 6, 1, 3, 9, 8]
    assert epoch_order(10, 1, seed=0).tolist() == [0, 7, 3, 8, 6, 1, 2, 9, 5, 4]


@pytest.mark.parametrize(("sequences", "possible", "limit"), [(3, 6, 20.5), (4, 24, 49.7)])
def test_all_orders_are_equally_likely(sequences: int, possible: int, limit: float) -> None:
    positions = np.arange(4800 * sequences)
    orders = sequence_indices(positions, sequences=sequences, seed=11, shuffle=True)
    counts = Counter(map(tuple, orders.reshape(-1, sequences).tolist()))
    expected = 4800 / possible
    assert len(counts) == possible
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < limit, "exceeded once in a thousand if they are equally likely"
