"""Properties of predictions, bytes against a real exchange, memory."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import ProcessPool
from torchtitan_diloco.components.metrics import all_reduce_bytes
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import (
    MOST_STREAMS,
    STREAM_BYTES,
    Beginning,
    DiLoCoConfig,
    Link,
    Overlap,
    Quantization,
)
from torchtitan_diloco.diloco.exchange import CHUNK, Exchange
from torchtitan_diloco.diloco.transport import Header
from torchtitan_diloco.planner.prediction import (
    Conditions,
    predict,
    predict_data_parallel,
    predict_exchange,
)

BY_BITS: tuple[str, ...] = ("fp32", "bf16", "int8", "fp4_e3m0")
FRAGMENTS = st.lists(st.integers(1, 50_000_000), min_size=1, max_size=12)
STEPS = st.one_of(st.none(), st.integers(1, 400))
CONDITIONS = st.builds(
    Conditions,
    st.floats(1e5, 1e12),
    st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5).map(tuple),
    latency_seconds=st.sampled_from([0.0, 0.001, 0.1]),
    jitter=st.sampled_from([0.0, 0.1]),
    coding_bytes_per_second=st.sampled_from([math.inf, 1e9]),
    outer_bytes_per_second=st.sampled_from([math.inf, 3e9]),
)
BLOCKING = DiLoCoConfig(sync_every=10, overlap=Overlap(delay=0))
UNLIMITED = Conditions(math.inf, (0.1, 0.1))


@st.composite
def settings(draw: st.DrawFn) -> DiLoCoConfig:
    sync_every = draw(st.integers(1, 60))
    overlap = Overlap(delay=draw(st.integers(0, sync_every - 1)))
    quantization = Quantization(codec=draw(st.sampled_from(BY_BITS)))
    return DiLoCoConfig(sync_every=sync_every, overlap=overlap, quantization=quantization)


@given(FRAGMENTS, settings(), CONDITIONS, STEPS, st.floats(1.0, 100.0))
def test_more_bandwidth_and_delay_and_fewer_bits_never_hurt(
    fragments: list[int], diloco: DiLoCoConfig, link: Conditions, steps: int | None, factor: float
) -> None:
    fast = replace(link, bits_per_second=factor * link.bits_per_second)
    without = replace(diloco, overlap=Overlap(delay=0))
    longest = replace(diloco, overlap=Overlap(delay=diloco.sync_every - 1))
    blocked, some, faster, most = (
        predict(fragments, one, where, steps=steps)
        for one, where in ((without, link), (diloco, link), (diloco, fast), (longest, link))
    )
    assert 0 < blocked.utilization <= some.utilization + 1e-9
    assert some.utilization <= faster.utilization + 1e-9
    assert some.utilization <= most.utilization + 1e-9
    assert max(faster.utilization, most.utilization) <= 1
    assert faster.sent_bytes_per_step == some.sent_bytes_per_step
    perfect = Conditions(math.inf, (max(link.step_seconds),) * link.workers)
    assert predict(fragments, diloco, perfect, steps=steps).utilization == 1
    large = [values + 10_000 for values in fragments]
    plain = replace(link, coding_bytes_per_second=math.inf)  # few bits take longer to encode
    codecs = [replace(diloco, quantization=Quantization(codec=codec)) for codec in BY_BITS]
    for more, fewer in pairwise(predict(large, one, plain, steps=steps) for one in codecs):
        assert fewer.utilization >= more.utilization - 1e-9
        assert fewer.sent_bytes_per_step <= more.sent_bytes_per_step


def test_what_training_waits_for() -> None:
    def waits(values: int, link: Conditions, delay: int = 0) -> float:
        settings = replace(BLOCKING, overlap=Overlap(delay=delay))
        return predict([values], settings, link).exposed_seconds_per_step

    far = replace(UNLIMITED, latency_seconds=0.25)
    found = [waits(1000, far, delay) for delay in range(4)]
    assert found == pytest.approx([0.025, 0.015, 0.005, 0.0]), "a delay hides latency"
    transfer = waits(250_000 - 17, Conditions(8e6, (0.1, 0.1)))
    assert transfer == pytest.approx(0.1), "100 kB a step at 1 MB a second"
    uneven = waits(1000, replace(UNLIMITED, step_seconds=(0.1, 0.2)))
    assert uneven == pytest.approx(0.05), "the mean of none and of the slowest worker's lead"
    fast = Conditions(8e9, (0.3, 0.3))
    last_bucket = predict_data_parallel([500_000] * 10, fast, gradient_bytes=4)
    assert last_bucket.exposed_seconds_per_step == pytest.approx(0.002), "2 MB of fp32"
    assert last_bucket.sent_bytes_per_step == all_reduce_bytes(5_000_000, workers=2, each=4)
    waits_for_each = replace(fast, backward_waits=True)
    all_buckets = predict_data_parallel([500_000] * 10, waits_for_each, gradient_bytes=4)
    assert all_buckets.exposed_seconds_per_step == pytest.approx(0.02), "one after the other"


def test_runs_from_no_exchange_to_the_steady_state() -> None:
    slow = Conditions(2e8, (0.1, 0.1), latency_seconds=0.02)
    diloco = DiLoCoConfig(sync_every=20, overlap=Overlap(delay=2))
    none, long, steady = (
        predict([3_000_000] * 4, diloco, slow, steps=steps) for steps in (19, 20 * 300, None)
    )
    assert (none.utilization, none.sent_bytes_per_step) == (1, 0)
    assert steady.utilization < 0.95
    assert long.utilization == pytest.approx(steady.utilization, rel=0.01)
    assert long.sent_bytes_per_step == pytest.approx(steady.sent_bytes_per_step, rel=0.01)


def test_the_beginning_is_counted() -> None:
    """20 steps with H = 2 make 10 rounds of a fragment, 80 or 9,980 with H = 10 eight or 998."""
    plain = BLOCKING
    first = Beginning(length=20, sync_every=2)
    found = replace(plain, beginning=first)
    once = 10 * predict([1000], plain, UNLIMITED).sent_bytes_per_step
    short, long = (predict([1000], found, UNLIMITED, steps=steps) for steps in (100, 10_000))
    assert short.sent_bytes_per_step == pytest.approx((10 + 8) * once / 100)
    assert long.sent_bytes_per_step == pytest.approx((10 + 998) * once / 10_000)
    share = replace(plain, beginning=Beginning(length=0.2))
    assert predict([1000], share, UNLIMITED, steps=100) == short
    slow = replace(UNLIMITED, bits_per_second=1e5)
    assert predict([1000], found, slow, steps=100).utilization < (
        predict([1000], plain, slow, steps=100).utilization
    )


@given(FRAGMENTS, settings(), CONDITIONS, st.sets(st.integers(1, MOST_STREAMS), max_size=4))
def test_more_streams_never_hurt_and_as_many_as_needed_are_enough(
    fragments: list[int], diloco: DiLoCoConfig, link: Conditions, counts: set[int]
) -> None:
    needed = max(1, math.ceil(link.bytes_in_flight / STREAM_BYTES))
    found = {
        count: predict(fragments, replace(diloco, link=Link(streams=count)), link).utilization
        for count in sorted({1, min(needed, MOST_STREAMS), MOST_STREAMS, *counts})
    }
    assert all(less <= more + 1e-9 for less, more in pairwise(found.values()))
    if needed < MOST_STREAMS and link.bits_per_second < 1e9:
        assert found[needed] > 0.9 * found[MOST_STREAMS]


# --- bytes ---------------------------------------------------------------------------------------

SIZES = [10_000, 100_001, CHUNK, 2 * CHUNK + 7777]


def _traffic(wire: Quantization) -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    codec = build_codec(wire)
    cpu = torch.device("cpu")
    exchange = Exchange(group, codec, largest=max(SIZES), device=cpu, timeout_seconds=600)
    header = Header(flags=0, run=1, fragment=0, outer_round=1, step=1, weight=1.0, checksum=0)
    traffic = [exchange.average(torch.ones(values), header)[1] for values in SIZES]
    return [(one.bytes_sent, one.bytes_received) for one in traffic]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("codec", ["fp32", "fp4_e3m0", "topk"])
def test_bytes_are_those_of_a_real_exchange(
    processes: ProcessPool, workers: int, codec: str
) -> None:
    """With more than two workers slices are of whole units, so small ones differ in size."""
    wire = Quantization(codec=codec)
    link = Conditions(1e9, (1.0,) * workers)
    sent = [predict_exchange(values, max(SIZES), wire, link)[0] for values in SIZES]
    for counted in processes.run(_traffic, workers, wire):
        if workers == 2:
            assert counted == [(count, count) for count in sent]
        else:
            for both, count in zip(counted[2:], sent[2:], strict=True):
                assert both == pytest.approx((count, count), rel=0.01)


def test_ranks_share_a_fragment_and_the_link() -> None:
    wire = Quantization(codec="fp4_e3m0")
    link = Conditions(1e8, (1.0, 1.0))
    alone, shared = (predict_exchange(3 * 10**6, 3 * 10**6, wire, link, ranks) for ranks in (1, 4))
    assert shared == pytest.approx(alone, rel=0.001)
