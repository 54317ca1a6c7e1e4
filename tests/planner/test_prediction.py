"""Properties of predictions."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diloco.config import CodecName, DiLoCoConfig, Overlap, Quantization
from torchtitan_diloco.planner.prediction import (
    Conditions,
    Links,
    all_reduce_bytes,
    even_links,
    predict_data_parallel,
)
from torchtitan_diloco.planner.scenario import payloads_of, predict_diloco

BY_BITS: tuple[CodecName, ...] = ("fp32", "bf16", "int8", "fp4_e3m0", "ternary")
FRAGMENTS = st.lists(st.integers(1, 50_000_000), min_size=1, max_size=12)
BANDWIDTH = st.floats(1e5, 1e12)


@st.composite
def conditions(draw: st.DrawFn) -> Conditions:
    workers = draw(st.integers(1, 5))
    rates = st.tuples(*[BANDWIDTH] * workers)
    links = Links(draw(rates), draw(rates), draw(st.sampled_from([0.0, 0.001, 0.1])))
    return Conditions(
        links,
        draw(st.tuples(*[st.floats(0.01, 3.0)] * workers)),
        jitter=draw(st.sampled_from([0.0, 0.1])),
        coding_bytes_per_second=draw(st.sampled_from([math.inf, 1e9])),
        outer_bytes_per_second=draw(st.sampled_from([math.inf, 3e9])),
    )


@st.composite
def settings(draw: st.DrawFn) -> DiLoCoConfig:
    sync_every = draw(st.integers(1, 60))
    delay = draw(st.integers(0, sync_every - 1))
    codec = draw(st.sampled_from(BY_BITS))
    return DiLoCoConfig(
        sync_every=sync_every, overlap=Overlap(delay=delay), quantization=Quantization(codec=codec)
    )


STEPS = st.one_of(st.none(), st.integers(1, 400))
BLOCKING = DiLoCoConfig(sync_every=10, overlap=Overlap(delay=0))


@given(FRAGMENTS, settings(), conditions(), STEPS)
def test_utilisation_is_a_share(
    fragments: list[int], diloco: DiLoCoConfig, given_: Conditions, steps: int | None
) -> None:
    found = predict_diloco(fragments, diloco, given_, steps=steps)
    assert 0 < found.utilisation <= 1
    assert found.step_seconds == pytest.approx(given_.mean_step_seconds / found.utilisation)
    fastest = max(given_.links.up)
    assert found.peak_bits_per_second <= fastest * 1.000001
    if steps is None:  # a short run may end while much is on the way
        assert found.mean_bits_per_second <= fastest * 1.1


@given(FRAGMENTS, settings(), conditions(), STEPS, st.floats(1.0, 100.0))
def test_more_bandwidth_never_hurts(
    fragments: list[int], diloco: DiLoCoConfig, given_: Conditions, steps: int | None, factor: float
) -> None:
    slow = predict_diloco(fragments, diloco, given_, steps=steps)
    fast = predict_diloco(fragments, diloco, given_.with_bandwidth(factor), steps=steps)
    assert fast.utilisation >= slow.utilisation - 1e-9
    assert fast.sent_bytes_per_step == slow.sent_bytes_per_step


@given(FRAGMENTS, settings(), conditions(), STEPS)
def test_a_longer_delay_never_hurts(
    fragments: list[int], diloco: DiLoCoConfig, given_: Conditions, steps: int | None
) -> None:
    without = replace(diloco, overlap=Overlap(delay=0))
    longest = replace(diloco, overlap=Overlap(delay=diloco.sync_every - 1))
    blocked, some, most = (
        predict_diloco(fragments, one, given_, steps=steps) for one in (without, diloco, longest)
    )
    assert blocked.utilisation <= some.utilisation + 1e-9
    assert some.utilisation <= most.utilisation + 1e-9


@given(FRAGMENTS, settings(), conditions(), STEPS)
def test_fewer_bits_never_hurt(
    fragments: list[int], diloco: DiLoCoConfig, given_: Conditions, steps: int | None
) -> None:
    large = [values + 10_000 for values in fragments]
    plain = replace(given_, coding_bytes_per_second=math.inf)  # few bits take longer to encode
    settings_ = [replace(diloco, quantization=Quantization(codec=codec)) for codec in BY_BITS]
    reached = [predict_diloco(large, one, plain, steps=steps) for one in settings_]
    for more, fewer in pairwise(reached):
        assert fewer.utilisation >= more.utilisation - 1e-9
        assert fewer.sent_bytes_per_step <= more.sent_bytes_per_step


@given(FRAGMENTS, settings(), st.integers(1, 8), st.floats(0.01, 3.0), STEPS)
def test_links_without_limits_and_latency_hide_all(
    fragments: list[int], diloco: DiLoCoConfig, workers: int, seconds: float, steps: int | None
) -> None:
    perfect = Conditions(even_links(workers, math.inf), (seconds,) * workers)
    assert predict_diloco(fragments, diloco, perfect, steps=steps).utilisation == 1


def test_latency_is_hidden_by_a_delay_that_is_long_enough() -> None:
    far = Conditions(even_links(2, math.inf, latency_seconds=0.25), (0.1, 0.1))
    settings_ = [replace(BLOCKING, overlap=Overlap(delay=delay)) for delay in range(4)]
    waits = [predict_diloco([1000], one, far).exposed_seconds_per_step for one in settings_]
    assert waits == pytest.approx([0.025, 0.015, 0.005, 0.0])


def test_a_blocking_exchange_waits_for_all_of_it() -> None:
    link = Conditions(even_links(2, 8e6), (0.1, 0.1))
    found = predict_diloco([250_000 - 16], BLOCKING, link)
    assert found.utilisation == pytest.approx(0.5)
    assert found.sent_bytes_per_step == pytest.approx(100_000)
    assert found.mean_bits_per_second == pytest.approx(4e6)
    assert found.peak_bits_per_second == pytest.approx(8e6)


def test_the_slower_end_of_a_link_decides() -> None:
    values, step_seconds = [1_000_000], (0.1, 0.1)
    even = predict_diloco(values, BLOCKING, Conditions(even_links(2, 1e8), step_seconds))
    for links in (Links((1e8, 1e9), (1e9, 1e9)), Links((1e9, 1e9), (1e9, 1e8))):
        found = predict_diloco(values, BLOCKING, Conditions(links, step_seconds))
        assert found.utilisation == pytest.approx(even.utilisation)


def test_everybody_waits_for_the_slowest_worker() -> None:
    uneven = Conditions(even_links(2, math.inf), (0.1, 0.2))
    found = predict_diloco([1000], BLOCKING, uneven)
    assert found.step_seconds == pytest.approx(0.2)
    assert found.utilisation == pytest.approx(0.75)


def test_jitter_costs_and_is_the_same_every_time() -> None:
    even = Conditions(even_links(4, math.inf), (0.1,) * 4)
    uneven = replace(even, jitter=0.2)
    often = predict_diloco([1000], BLOCKING, uneven)
    assert often == predict_diloco([1000], BLOCKING, uneven)
    rarely = predict_diloco([1000], replace(BLOCKING, sync_every=100), uneven)
    every_step = predict_data_parallel([1000], uneven)
    assert every_step.utilisation < often.utilisation < rarely.utilisation < 1, "chance evens out"
    assert predict_diloco([1000], BLOCKING, even).utilisation == 1


def test_several_fragments_are_in_flight_with_a_long_delay() -> None:
    link = Conditions(even_links(2, 1e9), (0.1, 0.1))
    for delay, expected in ((1, 1), (2, 1), (3, 2), (9, 5)):
        diloco = replace(BLOCKING, overlap=Overlap(delay=delay))
        found = predict_diloco([1000] * 5, diloco, link)
        assert found.in_flight == expected, delay


def test_a_run_without_an_exchange_waits_for_nothing() -> None:
    link = Conditions(even_links(2, 1e5), (0.1, 0.1))
    found = predict_diloco([10**9], DiLoCoConfig(sync_every=100), link, steps=99)
    assert found.utilisation == 1
    assert found.sent_bytes_per_step == 0


def test_a_long_run_comes_near_the_steady_state() -> None:
    link = Conditions(even_links(2, 2e8, 0.02), (0.1, 0.1))
    diloco = DiLoCoConfig(sync_every=20, overlap=Overlap(delay=2))
    steady = predict_diloco([3_000_000] * 4, diloco, link)
    long = predict_diloco([3_000_000] * 4, diloco, link, steps=1_000_000)
    assert steady.utilisation < 0.95
    assert long.utilisation == pytest.approx(steady.utilisation, rel=0.01)
    assert long.sent_bytes_per_step == pytest.approx(steady.sent_bytes_per_step, rel=0.001)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=20), conditions())
def test_data_parallelism_sends_what_the_summary_says(
    buckets: list[int], given_: Conditions
) -> None:
    found = predict_data_parallel(buckets, given_)
    expected = all_reduce_bytes(sum(buckets), given_.workers)
    assert found.sent_bytes_per_step == pytest.approx(expected)
    assert 0 < found.utilisation <= 1
    faster = predict_data_parallel(buckets, given_.with_bandwidth(3.0))
    assert faster.utilisation >= found.utilisation - 1e-12


def test_data_parallelism_hides_all_but_the_last_bucket_at_best() -> None:
    link = Conditions(even_links(2, 8e9), (0.3, 0.3))
    found = predict_data_parallel([500_000] * 10, link)  # 1 MB of bf16 a bucket: a millisecond
    assert found.exposed_seconds_per_step == pytest.approx(0.001)


def test_impossible_conditions_are_refused() -> None:
    links, steps = even_links(2, 1e9), (0.1, 0.1)
    attempts: dict[str, Callable[[], object]] = {
        "above 0": lambda: even_links(2, 0.0),
        "latency": lambda: even_links(2, 1e9, -1.0),
        "step time": lambda: Conditions(links, (0.1, 0.0)),
        "jitter": lambda: Conditions(links, steps, jitter=-0.1),
    }
    for message, attempt in attempts.items():
        with pytest.raises(ValueError, match=message):
            attempt()


def test_ranks_share_a_fragment_and_the_link() -> None:
    (alone,) = payloads_of([3_000_001], Quantization(codec="fp4_e3m0"), workers=2)
    (shared,) = payloads_of([3_000_001], Quantization(codec="fp4_e3m0"), workers=2, ranks=4)
    assert shared.sent[0] == pytest.approx(alone.sent[0], rel=0.001)
    assert shared.state_bytes == alone.state_bytes
