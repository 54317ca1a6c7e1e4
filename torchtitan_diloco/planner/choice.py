"""Choose the settings that reach a wanted utilisation with the least risk to the loss.

Risks are sums of percentages from single comparisons in the papers and in docs/algorithm.md, at
other sizes. They rank settings; they do not predict a loss.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from torchtitan_diloco.diloco.config import (
    FEW_ROUNDS,
    CodecName,
    DiLoCoConfig,
    Fragments,
    Quantization,
)
from torchtitan_diloco.planner.prediction import Prediction
from torchtitan_diloco.planner.scenario import Scenario

PAPER_LAYERS = 3
SYNC_EVERY = (10, 20, 30, 50, 70, 100, 150, 200, 300, 500)
DELAYS = (0, 1, 2, 5, 10)
CODECS: tuple[CodecName, ...] = ("bf16", "int8", "fp4_e3m0", "ternary")
FRAGMENTS = (
    Fragments(layers_per_fragment=PAPER_LAYERS),
    Fragments(layers_per_fragment=1),
    Fragments(pattern="balanced", layers_per_fragment=PAPER_LAYERS),
)
MIXING = 0.5
LOW_MIXING, LOW_MIXING_COST = 0.25, 0.5
WORTH_A_CHANGE = 0.05
"""Percent of risk that justifies changing one more setting."""
RETUNING_COST = 0.2
"""Percent for every factor of two between H and the H that the outer lr was tuned for."""
UNTRIED_FRAGMENTS_COST = 0.05
CODEC_COSTS = {
    "fp32": 0.0,
    "bf16": 0.0,
    "int8": 0.02,
    "fp8_e4m3": 0.03,
    "fp8_e5m2": 0.05,
    "fp4_e2m1": 0.3,
    "fp4_e3m0": 0.3,
    "ternary": 1.7,
}


@dataclass(frozen=True)
class Risk:
    percent: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """Settings and what they lead to."""

    name: str
    diloco: DiLoCoConfig
    fragments: int
    prediction: Prediction
    device_bytes: float
    host_bytes: float
    hours: float
    needed_bits_per_second: float | None
    """Rate of the slowest link for the wanted utilisation; None if no rate is enough."""
    risk: Risk


@dataclass(frozen=True)
class Plan:
    wanted: float
    """Wanted utilisation."""
    present: Option
    best: Option
    """Recommended settings, possibly the present ones."""
    alternatives: tuple[Option, ...]
    data_parallel: Option
    data_parallel_without_latency: float | None
    """Bits a second that data parallelism would need without latency."""

    @property
    def reached(self) -> bool:
        return self.best.prediction.utilisation >= self.wanted

    @property
    def options(self) -> tuple[Option, ...]:
        best = () if self.best is self.present else (self.best,)
        control = () if self.present.diloco.method == "none" else (self.data_parallel,)
        return (self.present, *best, *self.alternatives, *control)


def choose(scenario: Scenario, present: DiLoCoConfig, wanted: float) -> Plan:
    """Return the least risky settings overall and for each codec, or those that come closest."""
    total_steps = scenario.workload.total_steps

    def rank(diloco: DiLoCoConfig) -> tuple[float, int]:
        """Return the risk plus a little for every change; then prefer the smaller delay."""
        changed = ("sync_every", "fragments", "overlap", "quantization")
        changes = sum(getattr(diloco, name) != getattr(present, name) for name in changed)
        risk = risk_of(diloco, total_steps, present.sync_every).percent
        return round(risk + WORTH_A_CHANGE * changes, 4), diloco.overlap.delay

    by_codec: dict[str, DiLoCoConfig] = {}
    closest, highest = present, -1.0
    for diloco in sorted(candidates(present, total_steps), key=rank):
        codec = diloco.quantization.codec
        if codec in by_codec or scenario.utilisation_bound(diloco) < min(wanted, highest):
            continue
        utilisation = scenario.predict(diloco).utilisation
        if utilisation >= wanted:
            by_codec[codec] = diloco
        if utilisation > highest + 1e-4:  # of equals the first, which is the least risky
            closest, highest = diloco, utilisation
    found = sorted(by_codec.values(), key=rank) or [closest]

    def option(name: str, diloco: DiLoCoConfig) -> Option:
        prediction, load = scenario.predict(diloco), scenario.workload
        streaming = diloco.method != "none"
        device_bytes, host_bytes = scenario.memory(diloco, prediction.in_flight)
        return Option(
            name=name,
            diloco=diloco,
            fragments=len(load.fragments(diloco.fragments)) if streaming else 0,
            prediction=prediction,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            hours=total_steps * prediction.step_seconds / 3600,
            needed_bits_per_second=scenario.needed_bits_per_second(diloco, wanted),
            risk=risk_of(diloco, total_steps, present.sync_every),
        )

    shown, control = option("present", present), replace(present, method="none")
    links = replace(scenario.conditions.links, latency_seconds=0.0)
    near = replace(scenario, conditions=replace(scenario.conditions, links=links))
    return Plan(
        wanted=wanted,
        present=shown,
        best=shown if found[0] == present else option("recommended", found[0]),
        alternatives=tuple(
            option(f"with {one.quantization.codec}", one) for one in found[1:] if one != present
        ),
        data_parallel=option("data parallel", control),
        data_parallel_without_latency=near.needed_bits_per_second(control, wanted),
    )


def candidates(present: DiLoCoConfig, total_steps: int) -> Iterator[DiLoCoConfig]:
    """Yield the present settings and all combinations. Explicit fragments are kept."""
    if present.method == "streaming":
        yield present
    explicit = present.fragments.pattern == "explicit"
    fragments = dict.fromkeys((present.fragments, *(() if explicit else FRAGMENTS)))
    mixing = present.overlap.mixing if present.overlap.mixing >= LOW_MIXING else MIXING
    periods = sorted({present.sync_every, *SYNC_EVERY})
    delays = sorted({present.overlap.delay, *DELAYS})
    wire = present.quantization
    quantizations = [wire]
    for codec in CODECS:  # without what only makes sense with the present codec
        if codec != wire.codec:
            block_size = Quantization.block_size if codec == "bf16" else wire.block_size
            other = replace(wire, codec=codec, gather_codec="same", error_feedback=False)
            quantizations.append(replace(other, block_size=block_size))
    for sync_every, delay, cut, quantization in product(periods, delays, fragments, quantizations):
        if delay < sync_every <= total_steps:
            yield replace(
                present,
                method="streaming",
                sync_every=sync_every,
                fragments=cut,
                overlap=replace(present.overlap, delay=delay, mixing=mixing),
                quantization=quantization,
            )


def risk_of(diloco: DiLoCoConfig, total_steps: int, tuned_sync_every: int) -> Risk:
    """Return the risk of settings whose outer lr was tuned for `tuned_sync_every`."""
    if diloco.method == "none":
        return Risk(0.0, ("the control that all others are compared with",))
    sync_every, codec = diloco.sync_every, diloco.quantization.codec
    rounds, fragments = total_steps // sync_every, diloco.fragments
    cost = _sync_cost(sync_every)
    parts = [(cost, f"H = {sync_every}: {cost:+.1f} %")]
    if sync_every != tuned_sync_every:
        cost = RETUNING_COST * abs(math.log2(sync_every / tuned_sync_every))
        parts.append((cost, f"outer lr and momentum are for H = {tuned_sync_every}: {cost:+.1f} %"))
    if rounds >= FEW_ROUNDS:
        parts.append((0.0, f"{rounds:,} rounds are enough"))
    else:
        cost = math.log2(FEW_ROUNDS / max(1, rounds))
        parts.append((cost, f"{rounds} rounds are fewer than {FEW_ROUNDS}: {cost:+.1f} %"))
    parts.append(_delay_risk(diloco.overlap.delay))
    cost = CODEC_COSTS[codec]
    text = f"{cost:+.1f} % at most" if cost >= 0.1 else "no cost seen"
    parts.append((cost, f"{codec}: {text}"))
    if diloco.overlap.mixing < LOW_MIXING:
        text = f"alpha = {diloco.overlap.mixing:g} is worse than 0.5: {LOW_MIXING_COST:+.1f} %"
        parts.append((LOW_MIXING_COST, text))
    common = fragments.layers_per_fragment in (0, PAPER_LAYERS)
    if fragments.pattern not in ("strided", "sequential") or not common:
        text = f"not the papers' fragments of {PAPER_LAYERS} layers: no cost known"
        parts.append((UNTRIED_FRAGMENTS_COST, text))
    return Risk(math.fsum(cost for cost, _ in parts), tuple(reason for _, reason in parts))


def _sync_cost(sync_every: int) -> float:
    """Return percent of loss against data parallelism (arXiv 2501.18512), linear in log H."""
    if sync_every <= 30:
        return 0.6 * math.log(sync_every) / math.log(30)
    return 0.6 + 0.8 * math.log(sync_every / 30) / math.log(100 / 30)


def _delay_risk(delay: int) -> tuple[float, str]:
    if delay == 0:
        return 0.0, "tau = 0: training waits for every exchange"
    if delay <= 5:
        return 0.01 * delay, f"tau = {delay}: nearly free up to 5"
    if delay <= 10:
        return 0.02 * delay, f"tau = {delay}: less than 0.2 % up to 10"
    return 0.05 * delay, f"tau = {delay}: not measured beyond 10, {0.05 * delay:+.1f} % assumed"
