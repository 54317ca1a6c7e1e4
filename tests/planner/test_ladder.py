"""Rungs, and the one that is chosen."""

from dataclasses import replace
from functools import cache

import pytest

from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.diloco.config import (
    DiLoCoConfig,
    OuterOptimizer,
    Overlap,
    Quantization,
    diloco_mistakes,
)
from torchtitan_diloco.planner.ladder import climb, ladder_text, rungs
from torchtitan_diloco.planner.prediction import Conditions, Workload

GIVEN = replace(load_config("35m").diloco, quantization=Quantization(codec="fp32"))


@cache
def workload() -> Workload:
    return Workload.of(load_config("35m", {"training.steps": "20000"}), vocabulary=32_000)


def link(bits_per_second: float, latency: float = 0.03) -> Conditions:
    return Conditions(bits_per_second, (0.2, 0.2), latency_seconds=latency)


def name(one: DiLoCoConfig) -> str:
    return f"{one.sync_every} {one.overlap.delay} {one.quantization.codec}"


ONE_BY_ONE = ["30 1 fp32", "30 2 fp32", "30 5 fp32", "30 10 fp32", "30 10 int8", "30 10 fp4_e3m0"]
DOUBLED = ["60 10 fp4_e3m0", "120 10 fp4_e3m0", "240 10 fp4_e3m0", "480 10 fp4_e3m0"]


@pytest.mark.parametrize(
    ("total_steps", "expected"),
    [
        (50_000, ONE_BY_ONE + DOUBLED),
        (12_000, ONE_BY_ONE + DOUBLED[:2]),  # of 100 rounds or more
        (1500, ["6 3 fp4_e2m1", "6 5 fp4_e2m1", "12 5 fp4_e2m1"]),
        (1500, ["10 0 int8", "10 1 int8", "10 2 int8", "10 5 int8", "10 5 fp4_e3m0"]),
        (1500, ["1 0 topk", "2 0 topk", "4 0 topk", "8 0 topk"]),
        (1500, ["500 20 fp8_e4m3", "500 20 fp4_e3m0"]),
    ],
)
def test_rungs_change_one_setting_after_the_other_if_it_is_a_gain(
    total_steps: int, expected: list[str]
) -> None:
    sync_every, delay, codec = expected[0].split()
    wire, overlap = replace(GIVEN.quantization, codec=codec), Overlap(delay=int(delay))  # type: ignore[arg-type]
    outer = OuterOptimizer("sgd" if codec == "topk" else "nesterov")
    given = replace(
        GIVEN,
        sync_every=int(sync_every),
        overlap=overlap,
        quantization=wire,
        outer_optimizer=outer,
    )
    for start in (given, replace(given, method="none")):
        found = list(rungs(start, total_steps))
        assert [name(one) for one in found] == expected
        assert not [mistake for one in found for mistake in diloco_mistakes(one)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (link(1e11), "30 1 fp32"),
        (link(6e7), "30 10 int8"),
        (link(4e7), "30 10 fp4_e3m0"),
        (link(1e5), "120 10 fp4_e3m0"),
        (link(1e2), "120 10 fp4_e3m0"),  # small utilisations differ, too
        (Conditions(1e12, (0.1, 0.2)), "30 1 fp32"),  # no change for a gain below a percent
    ],
)
def test_the_first_rung_that_reaches_the_target_is_chosen_or_the_best(
    where: Conditions, expected: str
) -> None:
    tried, best = climb(workload(), where, GIVEN, 0.95)
    assert name(best) == expected
    text, result = ladder_text(workload(), where, tried, best, 0.95), "first to reach 95 %"
    if reached := [one for one in tried if tried[one].utilisation >= 0.95]:
        assert reached == [best] == list(tried)[-1:]
    else:
        assert list(tried) == list(rungs(GIVEN, 20_000))
        result = "none reaches 95 %; * comes closest"
    assert (text.count("\n| "), text.count("| * ")) == (len(tried) + 2, 1)
    assert result in text
