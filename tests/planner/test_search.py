"""Search for settings, and risks."""

from dataclasses import replace
from functools import cache

import pytest

from torchtitan_diloco.components.records import Conditions
from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.diloco.codecs import CODECS
from torchtitan_diloco.diloco.config import (
    DiLoCoConfig,
    Fragments,
    Overlap,
    Quantization,
    diloco_mistakes,
)
from torchtitan_diloco.planner.prediction import CODEC_TRAITS, Workload
from torchtitan_diloco.planner.search import Plan, candidates, choose, risks_of

PRESENT = load_config("35m").diloco


@cache
def workload(workers: int = 2) -> Workload:
    flags = {"training.steps": 20_000, "diloco.workers": workers}
    flags["training.global_batch_size"] = 4 * workers
    config = load_config("35m", {key: str(value) for key, value in flags.items()})
    return Workload.of(config, vocabulary=32_000)


def plan(
    bits_per_second: float, wanted: float, present: DiLoCoConfig = PRESENT, latency: float = 0.03
) -> Plan:
    workers = present.workers
    conditions = Conditions(bits_per_second, (0.2,) * workers, latency_seconds=latency)
    return choose(workload(workers), conditions, present, wanted)


def test_candidates_are_settings_that_a_run_would_take() -> None:
    for present in (PRESENT, load_config("150m").diloco, load_config("35m-data-parallel").diloco):
        found = list(candidates(present, total_steps=5000))
        assert len(set(found)) > 100
        for one in found:
            assert one.method == "streaming"
            assert not list(diloco_mistakes(one))
    by_hand = Fragments(pattern="explicit", modules=(("blocks.0",), ("blocks.1",)))
    found = list(candidates(replace(PRESENT, fragments=by_hand), 5000))
    assert {one.fragments for one in found} == {by_hand}


def test_the_present_settings_stay_where_the_links_are_fast() -> None:
    present = replace(PRESENT, quantization=Quantization(codec="bf16"))
    found = plan(1e11, 0.95, present, latency=0.0)
    assert found.best is found.options[0]
    assert found.reached


@pytest.mark.parametrize(("bits_per_second", "workers"), [(1e7, 2), (3e7, 4), (1e9, 2)])
def test_the_choice_reaches_the_target_with_the_least_risk(
    bits_per_second: float, workers: int
) -> None:
    found = plan(bits_per_second, 0.9, replace(PRESENT, workers=workers))
    assert found.reached
    assert found.best.needed_bits_per_second is not None
    assert found.best.needed_bits_per_second <= 1.005 * bits_per_second
    present, *others, data_parallel = found.options
    assert (present.name, data_parallel.name) == ("present", "data parallel")
    codecs = [one.diloco.quantization.codec for one in others]
    assert len(set(codecs)) == len(codecs)
    assert all(one.prediction.utilisation >= 0.9 for one in others)
    if present.prediction.utilisation >= 0.9:
        assert found.best.risk <= present.risk


def test_slower_links_take_more_risk_until_nothing_is_enough() -> None:
    risks = [plan(rate, 0.95).best.risk for rate in (1e9, 3e7, 5e6)]
    assert risks == sorted(risks)
    assert risks[0] < risks[-1]
    found = plan(2e4, 0.95)
    assert not found.reached
    assert found.best.prediction.utilisation > 10 * found.options[0].prediction.utilisation


def test_risks_are_those_that_are_documented() -> None:
    assert set(CODEC_TRAITS) == set(CODECS)

    def percent(diloco: DiLoCoConfig, steps: int = 10**6, tuned: int = 0) -> float:
        return sum(risks_of(diloco, steps, tuned or diloco.sync_every).values())

    plain = DiLoCoConfig(sync_every=30, overlap=Overlap(delay=0))
    four_bits = replace(plain, quantization=Quantization(codec="fp4_e3m0"))
    assert percent(plain) == percent(plain, steps=30 * 100) == pytest.approx(0.6)
    assert percent(plain, steps=30 * 50) == pytest.approx(1.6), "half of the rounds that are enough"
    assert percent(replace(plain, sync_every=100)) == pytest.approx(1.4)
    assert percent(replace(plain, sync_every=1)) == pytest.approx(0)
    assert percent(replace(plain, overlap=Overlap(delay=5))) == pytest.approx(0.65)
    assert percent(replace(plain, overlap=Overlap(delay=10))) == pytest.approx(0.8)
    assert percent(four_bits) == pytest.approx(0.9)
    assert percent(plain, tuned=60) == pytest.approx(0.8)
    assert percent(replace(plain, method="none"), 10, 30) == 0
