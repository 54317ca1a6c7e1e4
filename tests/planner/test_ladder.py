"""Rungs, the one that is chosen, and settings that a run proposes while it goes on."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import (
    DiLoCoConfig,
    OuterOptimizer,
    Overlap,
    Quantization,
    diloco_mistakes,
)
from torchtitan_diloco.islands.config import Islands, change_commands
from torchtitan_diloco.islands.rules.changes import changed
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.run_settings import change_of, in_diloco, of_diloco
from torchtitan_diloco.planner.ladder import MARGIN, climb, ladder_text, rungs, settings_that_fit
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
    wire = replace(GIVEN.quantization, codec=codec)
    overlap = Overlap(delay=int(delay))
    outer = OuterOptimizer("sgd", lr=1.0) if codec == "topk" else OuterOptimizer()
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
        (link(1e2), "120 10 fp4_e3m0"),  # small utilizations differ, too
        (Conditions(1e12, (0.1, 0.2)), "30 1 fp32"),  # no change for a gain below a percent
    ],
)
def test_the_first_rung_that_reaches_the_target_is_chosen_or_the_best(
    where: Conditions, expected: str
) -> None:
    tried, best = climb(workload(), where, GIVEN, 0.95)
    assert name(best) == expected
    text = ladder_text(workload(), where, tried, best, 0.95)
    result = "first to reach 95 %"
    if reached := [one for one in tried if tried[one].utilization >= 0.95]:
        assert reached == [best] == list(tried)[-1:]
    else:
        assert list(tried) == list(rungs(GIVEN, 20_000))
        result = "none reaches 95 %; * comes closest"
    assert (text.count("\n| "), text.count("| * ")) == (len(tried) + 2, 1)
    assert result in text


# --- settings that fit ----------------------------------------------------------------------------


def config(every: int, codec: str, delay: int = 1) -> DiLoCoConfig:
    overlap = Overlap(delay=min(delay, every - 1))
    wire = Quantization(codec=codec)
    return DiLoCoConfig(sync_every=every, overlap=overlap, quantization=wire)


def bits(one: DiLoCoConfig) -> float:
    return bits_per_parameter(build_codec(one.quantization))


@given(
    every=st.integers(2, 400),
    delay=st.integers(0, 5),
    codec=st.sampled_from(["fp32", "int8", "fp4_e3m0"]),
    fragments=st.integers(1, 24),
    cycles=st.floats(1.0, 300.0, exclude_min=True),
    step=st.floats(0.01, 10.0),
)
def test_proposed_settings_fit_and_islands_can_change_to_them(
    every: int, delay: int, codec: str, fragments: int, cycles: float, step: float
) -> None:
    before = config(every, codec, delay)
    transfers = cycles * every * step
    found = settings_that_fit(before, fragments, transfers, step)
    assert found
    settings = Settings(
        **of_diloco(before), total_tokens=10**9, slots=2, start_with=2, streams=2, block=1
    )
    for key, value in found.items():
        settings = changed(settings, change_of(settings, key, str(value)))
    new = in_diloco(before, settings)
    seconds = MARGIN * transfers * bits(new) / bits(before)
    assert seconds <= new.sync_every * step * 1.0001
    assert seconds <= fragments * new.overlap.delay * step * 1.0001, "each in its own tau"


@pytest.mark.parametrize(
    ("given", "fragments", "transfers", "delay", "codec", "every"),
    [
        (config(50, "fp32"), 5, 60.0, 4, "int8", None),
        (config(50, "fp32"), 5, 2000.0, 62, "fp4_e3m0", 400),
        (config(50, "fp32"), 5, 2e6, 61_875, "fp4_e3m0", 309_375),
        (config(10, "topk"), 1, 30.0, 36, None, 40),
        (config(10, "fp4_e3m0"), 1, 30.0, 36, None, 40),
    ],
)
def test_tau_rises_first_then_bits_fall_then_h_rises(
    given: DiLoCoConfig,
    fragments: int,
    transfers: float,
    delay: int | None,
    codec: str | None,
    every: int | None,
) -> None:
    names = "diloco.sync_every", "diloco.overlap.delay", "diloco.quantization.codec"
    expected = dict(zip(names, (every, delay, codec), strict=True))
    found = settings_that_fit(given, fragments, transfers, 1.0)
    assert found == {name: value for name, value in expected.items() if value is not None}


def test_commands_name_the_location_of_the_run() -> None:
    found = change_commands(Islands(join="my runs/a"), {"diloco.sync_every": 80, "slots": 3})
    first, second = found.split(" && ")
    assert first.endswith("islands change diloco.sync_every 80 --join 'my runs/a'")
    assert second.endswith("islands change slots 3 --join 'my runs/a'")
