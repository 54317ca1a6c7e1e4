"""What a setting of the outer loop may cost in loss, by what is documented: the papers, and docs/algorithm.md.

The percentages are sums of what single comparisons have shown, at other sizes. They put settings in an order, and predict no
loss.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from torchtitan_diloco.diloco.config import FEW_ROUNDS
from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo

SYNC_COSTS = ((1, 0.0), (30, 0.6), (100, 1.4))
"""H -> percent of loss against data parallelism (arXiv 2501.18512), in between and beyond on a line over log H."""
RETUNING_COST = 0.2
"""For every factor of two that H is away from the one that the outer learning rate and momentum were chosen for."""
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
LITTLE_DELAY, MEASURED_DELAY = 5, 10
LOW_MIXING = 0.25
"""Below it, a worker mostly takes the shared parameters, and goes where the outer momentum points."""
LOW_MIXING_COST = 0.5
UNTRIED_FRAGMENTS_COST = 0.05
PAPER_LAYERS = 3


@dataclass(frozen=True)
class Risk:
    percent: float
    reasons: tuple[str, ...]


def risk_of(diloco: DiLoCo, total_steps: int, tuned_sync_every: int) -> Risk:
    """`tuned_sync_every`: the H that the outer optimizer's settings were chosen for."""
    if diloco.method == "none":
        return Risk(0.0, ("what all others are compared with",))
    parts = [
        _sync_risk(diloco.sync_every),
        _retuning_risk(diloco.sync_every, tuned_sync_every),
        _rounds_risk(total_steps // diloco.sync_every),
        _delay_risk(diloco.overlap.delay),
        _codec_risk(diloco.quantization.codec),
        _mixing_risk(diloco.overlap.mixing),
        _fragments_risk(diloco),
    ]
    return Risk(
        math.fsum(cost for cost, _ in parts), tuple(reason for _, reason in parts if reason)
    )


Part = tuple[float, str]


def _sync_risk(sync_every: int) -> Part:
    cost = _between(sync_every)
    return cost, f"H = {sync_every}: {cost:+.1f} %"


def _between(sync_every: int) -> float:
    for (low, low_cost), (high, high_cost) in pairwise(SYNC_COSTS):
        if sync_every <= high or high == SYNC_COSTS[-1][0]:
            share = math.log(sync_every / low) / math.log(high / low)
            return low_cost + share * (high_cost - low_cost)
    raise AssertionError


def _retuning_risk(sync_every: int, tuned: int) -> Part:
    if sync_every == tuned:
        return 0.0, ""
    cost = RETUNING_COST * abs(math.log2(sync_every / tuned))
    return cost, f"outer lr and momentum were chosen for H = {tuned}: {cost:+.1f} %"


def _rounds_risk(rounds: int) -> Part:
    if rounds >= FEW_ROUNDS:
        return 0.0, f"{rounds:,} rounds are enough"
    cost = math.log2(FEW_ROUNDS / max(1, rounds))
    return cost, f"{rounds} rounds are fewer than {FEW_ROUNDS}: {cost:+.1f} %"


def _delay_risk(delay: int) -> Part:
    if delay == 0:
        return 0.0, "tau = 0: training waits for every exchange"
    if delay <= LITTLE_DELAY:
        return 0.01 * delay, f"tau = {delay}: nearly free up to {LITTLE_DELAY}"
    if delay <= MEASURED_DELAY:
        return 0.02 * delay, f"tau = {delay}: less than 0.2 % up to {MEASURED_DELAY}"
    return (
        0.05 * delay,
        f"tau = {delay}: beyond {MEASURED_DELAY} nobody has measured it, {0.05 * delay:+.1f} % assumed",
    )


def _codec_risk(codec: str) -> Part:
    cost = CODEC_COSTS[codec]
    if cost < 0.1:
        return cost, f"{codec}: no cost that could be seen"
    return cost, f"{codec}: at most {cost:+.1f} %"


def _mixing_risk(mixing: float) -> Part:
    if mixing >= LOW_MIXING:
        return 0.0, ""
    return (
        LOW_MIXING_COST,
        f"alpha = {mixing:g} is worse than 0.5, in short runs by far: {LOW_MIXING_COST:+.1f} %",
    )


def _fragments_risk(diloco: DiLoCo) -> Part:
    fragments = diloco.fragments
    if fragments.pattern in ("strided", "sequential") and fragments.layers_per_fragment in (
        0,
        PAPER_LAYERS,
    ):
        return 0.0, ""
    return (
        UNTRIED_FRAGMENTS_COST,
        f"fragments other than the papers' ({PAPER_LAYERS} layers): no cost known",
    )
