"""Which methods two machines are compared by, and which is the best."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_diloco.config.loader import load_config, shipped_configs
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco.config import diloco_mistakes
from torchtitan_diloco.machines.comparison import (
    ALMOST,
    Row,
    best_of,
    bits,
    compare,
    hours,
    methods,
    table,
    verdict,
)
from torchtitan_diloco.planner.prediction import Conditions, Workload

NAMES = "node0", "node1"
ETHERNET = Conditions(1e9, (0.5, 0.5), latency_seconds=1e-4)
CONDITIONS = st.builds(
    Conditions,
    st.floats(1e6, 1e11),
    st.tuples(st.floats(0.05, 3.0), st.floats(0.05, 3.0)),
    latency_seconds=st.sampled_from([0.0, 1e-4, 0.03]),
    jitter=st.sampled_from([0.0, 0.1]),
    backward_waits=st.booleans(),
)


@cache
def preset(name: str) -> Config:
    config = load_config(name)
    return replace(config, diloco=replace(config.diloco, workers=2))


@cache
def load_of(name: str) -> Workload:
    return Workload.of(preset(name), preset(name).model.vocab_size or 320)


def rows_of(conditions: Conditions, name: str = "100m") -> list[Row]:
    return compare(load_of(name), conditions, preset(name).diloco, NAMES)


def by_name(rows: list[Row], begin: str) -> Row:
    return next(row for row in rows if row.name.startswith(begin))


@pytest.mark.parametrize("name", shipped_configs())
def test_every_preset_can_be_compared(name: str) -> None:
    rows = rows_of(ETHERNET, name)
    kinds = "node0 alone", "node1 alone", "data parallelism", "DiLoCo, H", "streaming, H"
    for begin, row in zip(kinds, rows, strict=False):
        assert row.name.startswith(begin)
    assert all(bits(row.diloco.quantization) <= 4.2 for row in rows[len(kinds) :])
    for row in rows:
        assert list(diloco_mistakes(row.diloco)) == [] or row.diloco.method == "none"
        assert math.isfinite(row.tokens_per_second)
    assert "| * " in table(load_of(name), rows, best_of(rows))


@settings(max_examples=10)
@given(CONDITIONS)
def test_the_slower_machine_sets_the_pace_of_two(conditions: Conditions) -> None:
    rows = rows_of(conditions)
    tokens = load_of("100m").plan.tokens_per_step
    for row in rows[:2]:
        assert row.machine is not None
        seconds = conditions.step_seconds[row.machine]
        assert row.tokens_per_second == pytest.approx(tokens / 2 / seconds)
    slowest = min(row.tokens_per_second for row in rows[:2])
    for row in rows[2:]:
        drawn = 0.02 if conditions.jitter else 1e-9
        assert row.tokens_per_second <= 2 * slowest * (1 + drawn)
    best = best_of(rows)
    assert best.tokens_per_second >= ALMOST * max(row.tokens_per_second for row in rows)
    assert best in (*rows[2:], max(rows[:2], key=lambda row: row.tokens_per_second))


@settings(max_examples=10)
@given(CONDITIONS, st.floats(1.0, 100.0))
def test_a_faster_link_never_hurts(conditions: Conditions, factor: float) -> None:
    faster = replace(conditions, bits_per_second=factor * conditions.bits_per_second)
    load = load_of("100m")
    diloco = preset("100m").diloco
    for method in methods(load, conditions, diloco).values():
        slow, fast = (load.predict(method, one).step_seconds for one in (conditions, faster))
        assert fast <= slow * (1 + 1e-9)


@pytest.mark.parametrize(
    ("conditions", "best", "says"),
    [
        (replace(ETHERNET, bits_per_second=1e12), "data parallelism", "two machines 2.00 x as"),
        (replace(ETHERNET, bits_per_second=1e10), "DiLoCo, H 30", "two machines 1.96 x as fast"),
        (ETHERNET, "streaming, 4 bits, H 30", "data parallelism makes two machines 0.33 x as fast"),
        (replace(ETHERNET, bits_per_second=1e7), "streaming, 4 bits, H 120", "machines 0.004 x as"),
        (replace(ETHERNET, step_seconds=(0.5, 2.0)), "node0 alone", "second machine gains nothing"),
    ],
)
def test_the_best_is_the_first_that_is_almost_the_fastest(
    conditions: Conditions, best: str, says: str
) -> None:
    rows = rows_of(conditions)
    found = best_of(rows)
    assert found.name.startswith(best)
    assert re.search(says, verdict(rows, found)), verdict(rows, found)


def test_machines_of_different_speed_do_not_make_the_settings_worse() -> None:
    """They wait for the slower one, and no H changes that."""
    uneven = replace(ETHERNET, step_seconds=(0.5, 0.8))
    assert [row.name for row in rows_of(uneven)] == [row.name for row in rows_of(ETHERNET)]
    assert rows_of(replace(uneven, bits_per_second=1e7))[-1].diloco.sync_every > 30


def test_sparse_deltas_stay() -> None:
    given_ = preset("100m").diloco
    sparse = replace(
        given_,
        quantization=replace(given_.quantization, codec="topk"),
        outer_optimizer=replace(given_.outer_optimizer, name="sgd", lr=1.0),
    )
    found = methods(load_of("100m"), ETHERNET, sparse)
    assert [one.quantization.codec for one in found.values()][3:] == ["topk"]


def test_hours() -> None:
    assert [hours(3600 * one) for one in (0.0123456, 0.5, 7.77, 123.4, 12_345.6)] == [
        "0.012",
        "0.50",
        "7.8",
        "123",
        "12,346",
    ]
