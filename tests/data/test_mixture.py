"""The turns of corpora keep their shares at every position, and resuming changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.config.weights import MOST_TURNS, turns_of, weight_mistake
from torchtitan_diloco.data.mixture import (
    Mixture,
    Segment,
    check_fingerprints,
    plan_segments,
)

NAMES = "abcdef"
WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(
    lambda weights: dict(zip(NAMES, map(float, weights), strict=False))
)
IN_ANY_ORDER = st.permutations("abc").flatmap(
    lambda names: st.fixed_dictionaries({name: st.integers(1, 3).map(float) for name in names})
)
"""Weights that often let several corpora be due at the same time."""


def located(mixture: Mixture, start: int, stop: int) -> list[tuple[int, int]]:
    corpora, samples = mixture.locate(np.arange(start, stop))
    return list(zip(corpora.tolist(), samples.tolist(), strict=True))


@given(WEIGHTS, st.integers(0, 10**12))
def test_counts_are_within_a_sample_of_the_weights(weights: dict[str, float], far: int) -> None:
    names = list(weights)
    total = sum(weights.values())
    mixture = Mixture(names, [Segment(0, weights)])
    counts = dict.fromkeys(names, 0)
    for number, (corpus, sample) in enumerate(located(mixture, 0, 300), start=1):
        assert sample == counts[names[corpus]], "each sample of a corpus once, in order"
        counts[names[corpus]] += 1
        for name, count in counts.items():
            assert abs(count - number * weights[name] / total) < 1
    assert {name: mixture.read_before(300).get(name, 0) for name in names} == counts
    for name, count in mixture.read_before(far).items():
        assert abs(count - far * weights[name] / total) < 1 + far * 1e-15


@given(WEIGHTS, WEIGHTS, WEIGHTS, st.integers(1, 200), st.integers(0, 200), st.integers(0, 300))
def test_resumed_is_uninterrupted_across_phases(
    first: dict[str, float],
    second: dict[str, float],
    third: dict[str, float],
    begins: int,
    lasts: int,
    stop: int,
) -> None:
    phases = [(begins, second), (begins + lasts + 1, third)]
    whole = Mixture(NAMES, plan_segments(first, phases, names=NAMES))
    saved = whole.segment_at(stop)
    segments = plan_segments(first, phases, names=NAMES, position=stop, before=saved)
    resumed = Mixture(NAMES, segments)
    assert located(resumed, stop, 500) == located(whole, stop, 500)
    assert resumed.read_before(500) == whole.read_before(500)


@given(WEIGHTS, WEIGHTS, st.integers(0, 300))
def test_new_weights_count_from_the_resume_on(
    old: dict[str, float], new: dict[str, float], stop: int
) -> None:
    """No sample of a corpus is skipped or repeated, and the new shares hold from there."""
    before = Mixture(NAMES, plan_segments(old, [], names=NAMES))
    saved = before.segment_at(stop)
    segments = plan_segments(new, [], names=NAMES, position=stop, before=saved)
    after = Mixture(NAMES, segments)
    counts = [before.read_before(stop).get(name, 0) for name in NAMES]
    began = list(counts)
    total = sum(new.values())
    for corpus, sample in located(after, stop, stop + 200):
        assert sample == counts[corpus]
        counts[corpus] += 1
    if turns_of(old) != turns_of(new):
        for name, count, start in zip(NAMES, counts, began, strict=True):
            assert abs(count - start - 200 * new.get(name, 0) / total) < 1


@given(st.permutations(NAMES), st.lists(st.tuples(IN_ANY_ORDER, st.integers(0, 20)), min_size=2))
def test_each_sample_is_read_once_whatever_the_order_of_the_weights(
    names: list[str], cuts: list[tuple[dict[str, float], int]]
) -> None:
    """The weights may list the corpora in another order than the stream."""
    position = 0
    saved = None
    counts = dict.fromkeys(names, 0)
    for weights, count in cuts:
        mixture = Mixture(
            names, plan_segments(weights, [], names=names, position=position, before=saved)
        )
        for corpus, sample in located(mixture, position, position + count):
            assert sample == counts[names[corpus]]
            counts[names[corpus]] += 1
        position += count
        saved = mixture.segment_at(position)


def test_weights_are_exact_or_rounded() -> None:
    assert turns_of({"a": 0.7, "b": 0.3}) == {"a": 7, "b": 3}
    assert turns_of({"a": 3, "b": 1}) == {"a": 3, "b": 1}
    rounded = turns_of({"a": 0.123456789, "b": 1})
    assert sum(rounded.values()) == MOST_TURNS


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": -1.0, "b": 1.0}, 'the weight of "a" is -1.0: give a number of at least 0'),
        ({"a": float("nan")}, 'the weight of "a" is nan'),
        ({"a": 0.0, "b": 0.0}, "all weights are 0"),
        ({"a": 1.0, "b": 1e-9}, 'the weight of "b" is below 1/20,000 of the sum'),
    ],
)
def test_bad_weights(weights: dict[str, float], message: str) -> None:
    assert message in weight_mistake(weights)


def test_a_corpus_is_named_once() -> None:
    with pytest.raises(ValueError, match='"b" and "a" hold the same tokens'):
        check_fingerprints({"a": "1", "b": "1"})
