"""How the numbers of rounds, steps and ranks merge, and what may be declared."""

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.components.metrics import METRICS
from torchtitan_diloco.diloco.metrics import (
    OUTER_METRICS,
    Merge,
    Merging,
    Metric,
    Scope,
    merge_parts,
)
from torchtitan_diloco.diloco.round import Meter, Round

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)
EXPECTED: dict[Merge, Callable[[Sequence[float]], float]] = {
    Merge.SUM: math.fsum,
    Merge.MEAN: lambda values: math.fsum(values) / len(values),
    Merge.MAX: max,
    Merge.LAST: lambda values: values[-1],
    Merge.NORM: lambda values: math.hypot(*values),
}


@given(VALUES)
def test_values_merge_one_after_the_other_as_all_at_once(values: Sequence[float]) -> None:
    names = [merge.value for merge in Merge]
    merging = Merging(dict(zip(names, Merge, strict=True)))
    for value in values:
        merging.add(dict.fromkeys(names, value))
        merging.add(dict.fromkeys(names, math.nan))  # is not known
    taken = merging.take()
    for merge in Merge:
        expected = EXPECTED[merge](values)
        assert merge.of(values) == pytest.approx(expected)
        assert taken[merge.value] == pytest.approx(expected)
    assert merging.take() == {}


def test_what_one_rank_does_not_know_the_worker_does_not_know() -> None:
    metrics = {merge.value: Metric("", "", ranks=merge) for merge in Merge}
    known = dict.fromkeys(metrics, 2.0)
    merged = merge_parts([known, known | {"max": math.nan}], metrics)
    assert math.isnan(merged.pop("max"))
    assert merged == {"sum": 4.0, "mean": 2.0, "last": 2.0, "norm": pytest.approx(math.sqrt(8))}
    same_on_all = {"same": Metric("", "")}
    assert merge_parts([{"same": 1.0}, {"same": 1.0}], same_on_all) == {"same": 1.0}


def test_a_name_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(KeyError, match="worker/typo"):
        Merging({"worker/steps": Merge.SUM}).add({"worker/typo": 1.0})


def test_the_rounds_of_a_step_merge_as_declared() -> None:
    """Sums are 0 without rounds, and a maximum is not known."""
    meter = Meter()
    for largest in (2.0, 5.0, 3.0):
        round_ = Round(0, 1, 1, participants=2)
        round_.begun = 1.0
        round_.ready = 1.5
        round_.asked = 2.0
        round_.fetched = 2.0
        round_.applied = 2.0
        round_.traffic.bytes_sent = 10
        round_.numbers["sync/largest_mean_delta"] = largest
        meter.applied(round_)
    loaded = Round.loaded(0, 1, sent_step=1, participants=2, flags=0, is_in_model=True)
    loaded.asked = 2.0
    loaded.fetched = 2.0
    loaded.applied = 2.0
    meter.applied(loaded)
    taken = meter.take()
    assert taken["sync/largest_mean_delta"] == 5.0
    assert (taken["worker/sent_bytes"], taken["worker/exchange_seconds"]) == (30, 1.5)
    assert (taken["worker/fragments_applied"], taken["worker/participants"]) == (4, 8)
    summed = {name for name, one in OUTER_METRICS.items() if one.fragments is Merge.SUM}
    assert meter.take() == dict.fromkeys(summed, 0.0)


@pytest.mark.parametrize("name", METRICS)
def test_a_declaration_is_possible(name: str) -> None:
    metric = METRICS[name]
    if metric.fragments is not None:
        assert metric.steps is not None, "what rounds give a step is recorded with it"
    if metric.scope is Scope.JOB:
        assert metric.ranks in (None, Merge.SUM, Merge.MEAN, Merge.MAX), "has no other reduction"
    if metric.scope is Scope.RUN:
        assert metric.ranks is None, "has one value"
    if metric.of_job:
        assert name.startswith("worker/"), "its mean is under world/"
        assert metric.ranks in (Merge.SUM, Merge.MEAN)
