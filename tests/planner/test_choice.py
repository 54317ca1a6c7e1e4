"""Choice of settings, risks, memory."""

from dataclasses import replace
from functools import cache

import pytest
from torch import nn

from torchtitan_diloco.components.run_plan import INNER_BYTES
from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.codecs import CODECS
from torchtitan_diloco.diloco.config import (
    DiLoCoConfig,
    Fragments,
    OuterOptimizer,
    Overlap,
    Quantization,
    diloco_mistakes,
    quantization_mistakes,
)
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.planner.choice import CODEC_COSTS, candidates, choose, risk_of
from torchtitan_diloco.planner.prediction import Conditions, Links, even_links
from torchtitan_diloco.planner.scenario import (
    HOST_CODING,
    Scenario,
    Workload,
    outer_bytes_per_parameter,
)

PRESENT = load_config("35m").diloco


@cache
def workload(workers: int = 2, ranks: int = 1) -> Workload:
    settings = {"training.steps": 20_000, "diloco.workers": workers, "parallel.fsdp": ranks}
    settings["training.global_batch_size"] = 4 * workers * ranks
    config = load_config("35m", {key: str(value) for key, value in settings.items()})
    return Workload.of(config, vocabulary=32_000)


def scenario(
    bits_per_second: float, latency: float = 0.03, step: float = 0.2, workers: int = 2
) -> Scenario:
    links = even_links(workers, bits_per_second, latency)
    return Scenario(workload(workers), Conditions(links, (step,) * workers))


def test_measured_speeds_override_the_table() -> None:
    met = Conditions(
        even_links(2, 1e9),
        (0.2, 0.2),
        coding_bytes_per_second=1e8,
        outer_bytes_per_second=5e8,
        codec="int8",
    )
    for on_cpu in (True, False):
        one = Scenario(workload(), met, on_cpu=on_cpu)
        int8, fp4 = (
            one.conditions_for(replace(PRESENT, quantization=Quantization(codec=codec)))
            for codec in ("int8", "fp4_e3m0")
        )
        assert (int8.coding_bytes_per_second, int8.outer_bytes_per_second) == (1e8, 5e8)
        ratio = HOST_CODING["fp4_e3m0"] / HOST_CODING["int8"] if on_cpu else 1.0
        assert fp4.coding_bytes_per_second == pytest.approx(1e8 * ratio)
    given = Scenario(workload(), met, on_cpu=True, coding_bytes_per_second=3e9)
    assert given.conditions_for(PRESENT).coding_bytes_per_second == 3e9


def test_fragments_and_buckets_hold_every_parameter_once() -> None:
    one = workload()
    for config in (Fragments(), Fragments(layers_per_fragment=0), Fragments(pattern="balanced")):
        assert sum(one.fragments(config)) == one.parameters
    assert sum(one.gradient_buckets()) == one.parameters
    assert len(one.gradient_buckets()) == one.layers + 1
    assert one.fragments(Fragments())[-1] >= one.embedding_parameters


@pytest.mark.parametrize("workers", [2, 5])
def test_candidates_are_settings_that_a_run_would_take(workers: int) -> None:
    for present in (PRESENT, load_config("150m").diloco, load_config("35m-data-parallel").diloco):
        found = list(candidates(present, total_steps=5000))
        assert len(set(found)) > 100
        for one in found:
            assert one.method == "streaming"
            assert not list(diloco_mistakes(one))
            assert not list(quantization_mistakes(one.quantization, workers))


def test_explicit_fragments_are_kept() -> None:
    by_hand = Fragments(pattern="explicit", modules=(("blocks.0",), ("blocks.1",)))
    found = candidates(replace(PRESENT, fragments=by_hand), 5000)
    assert {one.fragments for one in found} == {by_hand}


def test_the_present_settings_stay_where_the_links_are_fast() -> None:
    present = replace(PRESENT, quantization=Quantization(codec="bf16"))
    plan = choose(scenario(1e11, latency=0.0), present, 0.95)
    assert plan.best is plan.present
    assert plan.reached


@pytest.mark.parametrize(("bits_per_second", "workers"), [(1e7, 2), (3e7, 4), (1e9, 2)])
def test_what_is_chosen_reaches_what_is_wanted_with_the_least_risk(
    bits_per_second: float, workers: int
) -> None:
    present = replace(PRESENT, workers=workers)
    plan = choose(scenario(bits_per_second, workers=workers), present, 0.9)
    assert plan.reached
    assert plan.best.needed_bits_per_second is not None
    assert plan.best.needed_bits_per_second <= 1.005 * bits_per_second
    for other in plan.alternatives:
        assert other.prediction.utilisation >= 0.9
        assert other.diloco.quantization.codec != plan.best.diloco.quantization.codec
    if plan.present.prediction.utilisation >= 0.9:
        assert plan.best.risk.percent <= plan.present.risk.percent


def test_slower_links_take_more_risk() -> None:
    risks = [choose(scenario(rate), PRESENT, 0.95).best.risk.percent for rate in (1e9, 3e7, 5e6)]
    assert risks == sorted(risks)
    assert risks[0] < risks[-1]


def test_the_closest_is_recommended_where_nothing_is_enough() -> None:
    plan = choose(scenario(2e4), PRESENT, 0.95)
    assert not plan.reached
    assert plan.best.prediction.utilisation > 10 * plan.present.prediction.utilisation


def test_the_slowest_worker_of_many_decides() -> None:
    even = scenario(1e8, workers=3)
    one_slow = Links((1e8, 1e8, 1e7), (1e8,) * 3, 0.03)
    uneven = replace(even, conditions=replace(even.conditions, links=one_slow))
    present = replace(PRESENT, workers=3)
    slow, mixed, fast = (
        one.predict(present).utilisation for one in (scenario(1e7, workers=3), uneven, even)
    )
    assert slow == pytest.approx(mixed, rel=0.01), "but for slices of unequal size"
    assert mixed < fast


def test_the_bound_holds() -> None:
    slow = scenario(3e6)
    for diloco in list(candidates(PRESENT, 20_000))[::37]:
        assert slow.predict(diloco).utilisation <= slow.utilisation_bound(diloco) * 1.06


def test_risks_are_those_that_are_documented() -> None:
    def percent(diloco: DiLoCoConfig, steps: int = 10**6) -> float:
        return risk_of(diloco, steps, tuned_sync_every=diloco.sync_every).percent

    plain = DiLoCoConfig(sync_every=30, overlap=Overlap(delay=0))
    four_bits = replace(plain, quantization=Quantization(codec="fp4_e3m0"))
    assert percent(plain) == percent(plain, steps=30 * 100) == pytest.approx(0.6)
    assert percent(plain, steps=30 * 50) == pytest.approx(1.6), "half of the rounds that are enough"
    assert percent(replace(plain, sync_every=100)) == pytest.approx(1.4)
    assert percent(replace(plain, sync_every=1)) == 0
    assert percent(replace(plain, overlap=Overlap(delay=5))) == pytest.approx(0.65)
    assert percent(replace(plain, overlap=Overlap(delay=10))) == pytest.approx(0.8)
    assert percent(four_bits) == pytest.approx(0.9)
    assert risk_of(plain, 10**6, tuned_sync_every=60).percent == pytest.approx(0.8)
    assert risk_of(replace(plain, method="none"), 10, 30).percent == 0


def test_every_format_has_a_risk_and_a_rate() -> None:
    assert set(CODEC_COSTS) == set(HOST_CODING) == set(CODECS)


@pytest.mark.parametrize("name", ["nesterov", "sgd", "adam"])
@pytest.mark.parametrize("feedback", [False, True])
def test_memory_is_that_of_the_real_outer_state(name: str, feedback: bool) -> None:
    outer = OuterOptimizer(name=name)  # type: ignore[arg-type]
    diloco = DiLoCoConfig(
        outer_optimizer=outer, quantization=Quantization(codec="int8", error_feedback=feedback)
    )
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 30))
    whole = replace(diloco, fragments=Fragments(layers_per_fragment=0), quantization=Quantization())
    (fragment,) = StreamingDiLoCo(model, None, whole).fragments
    state = OuterState(fragment, outer, next(model.parameters()).device, error_feedback=feedback)
    assert state.bytes == outer_bytes_per_parameter(diloco) * fragment.parameters


def test_memory_on_the_host_leaves_what_is_in_flight_on_the_device() -> None:
    load = workload(ranks=2)
    one = Scenario(load, Conditions(even_links(2, 1e9), (0.2, 0.2)))
    on_device = replace(PRESENT, link=replace(PRESENT.link, backend="nccl", outer_state="device"))
    on_host = replace(on_device, link=replace(on_device.link, outer_state="cpu"))
    device, none = one.memory(on_device, in_flight=1)
    rest, host = one.memory(on_host, in_flight=1)
    inner = INNER_BYTES * load.parameters / 2
    assert none == 0
    assert rest == pytest.approx(inner + 4 * max(load.fragments(PRESENT.fragments)) / 2)
    assert device - inner >= 12 * load.parameters / 2
    assert device - inner <= host <= 2 * (device - inner), "in powers of two"
    assert one.memory(replace(on_host, method="none"), in_flight=1) == (inner, 0.0)
