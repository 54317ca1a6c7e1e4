"""Search for the settings that reach a wanted utilisation with the least risk to the loss.

Risks are sums of percentages from single comparisons in the papers and in docs/measurements.md, at
other sizes. They rank settings, but do not predict a loss.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from torchtitan_diloco.components.records import Conditions
from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import (
    FEW_ROUNDS,
    CodecName,
    DiLoCoConfig,
    Fragments,
    Quantization,
)
from torchtitan_diloco.planner.prediction import CODEC_TRAITS, Prediction, Workload
from torchtitan_diloco.planner.units import quantity

PAPER_LAYERS = 3
SYNC_EVERY = (10, 20, 30, 50, 70, 100, 150, 200, 300, 500)
DELAYS = (0, 1, 2, 5, 10)
CODECS: tuple[CodecName, ...] = ("bf16", "int8", "fp4_e3m0", "ternary")
FRAGMENTS = (
    Fragments(layers_per_fragment=PAPER_LAYERS),
    Fragments(layers_per_fragment=1),
)
MIXING = 0.5
LOW_MIXING, LOW_MIXING_COST = 0.25, 0.5
WORTH_A_CHANGE = 0.05
"""Percent of risk that justifies changing one more setting."""
RETUNING_COST = 0.2
"""Percent for each factor of two between H and the H for which the outer lr was tuned."""
UNTRIED_FRAGMENTS_COST = 0.05


@dataclass(frozen=True)
class Option:
    name: str
    diloco: DiLoCoConfig
    prediction: Prediction
    needed_bits_per_second: float | None
    """Rate of the slowest link for the wanted utilisation; None if no rate is enough."""
    risks: dict[str, float]
    """Percent of loss by reason."""

    @property
    def risk(self) -> float:
        return math.fsum(self.risks.values())


@dataclass(frozen=True)
class Plan:
    wanted: float
    """Wanted utilisation."""
    options: tuple[Option, ...]
    """The present settings, the recommended ones if they differ, the least risky ones of each other
    codec, and data parallelism."""
    best: Option
    """The recommended settings."""

    @property
    def reached(self) -> bool:
        return self.best.prediction.utilisation >= self.wanted


def choose(load: Workload, conditions: Conditions, present: DiLoCoConfig, wanted: float) -> Plan:
    """Choose the least risky settings of each codec, or those that come closest to `wanted`."""
    total_steps = load.plan.total_steps

    def rank(diloco: DiLoCoConfig) -> tuple[float, int]:
        """Order by the risk plus a little for each change, then by the delay."""
        changed = ("sync_every", "fragments", "overlap", "quantization")
        changes = sum(getattr(diloco, name) != getattr(present, name) for name in changed)
        risk = math.fsum(risks_of(diloco, total_steps, present.sync_every).values())
        return round(risk + WORTH_A_CHANGE * changes, 4), diloco.overlap.delay

    by_codec: dict[str, DiLoCoConfig] = {}
    closest, highest = present, -1.0
    for diloco in sorted(candidates(present, total_steps), key=rank):
        if diloco.quantization.codec in by_codec:
            continue
        utilisation = load.predict(diloco, conditions).utilisation
        if utilisation >= wanted:
            by_codec[diloco.quantization.codec] = diloco
        if utilisation > highest + 1e-4:  # of equals the first, which is the least risky
            closest, highest = diloco, utilisation
    best, *others = sorted(by_codec.values(), key=rank) or [closest]

    chosen = {present: "present", best: "recommended"}
    chosen |= {other: f"with {other.quantization.codec}" for other in others}
    chosen |= {replace(present, method="none"): "data parallel", present: "present"}
    options = {
        diloco: Option(
            name=name,
            diloco=diloco,
            prediction=load.predict(diloco, conditions),
            needed_bits_per_second=load.needed_bits_per_second(diloco, conditions, wanted),
            risks=risks_of(diloco, total_steps, present.sync_every),
        )
        for diloco, name in chosen.items()
    }
    return Plan(wanted, tuple(options.values()), options[best])


def candidates(present: DiLoCoConfig, total_steps: int) -> Iterator[DiLoCoConfig]:
    """Yield the present settings and all combinations. Keep explicit fragments."""
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
            quantizations.append(Quantization(codec, block_size, threads=wire.threads))
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


def risks_of(diloco: DiLoCoConfig, total_steps: int, tuned_sync_every: int) -> dict[str, float]:
    """Return percent of loss by reason. The outer lr was tuned for H = `tuned_sync_every`."""
    if diloco.method == "none":
        return {}
    sync_every, delay, mixing = diloco.sync_every, diloco.overlap.delay, diloco.overlap.mixing
    # The paper's loss against data parallelism is linear in log H on both sides of H = 30.
    slope = 0.6 / math.log(30) if sync_every <= 30 else 0.8 / math.log(100 / 30)
    risks = {f"H = {sync_every}": 0.6 + slope * math.log(sync_every / 30)}
    if sync_every != tuned_sync_every:
        retuning = RETUNING_COST * abs(math.log2(sync_every / tuned_sync_every))
        risks[f"outer lr and momentum are for H = {tuned_sync_every}"] = retuning
    if (rounds := total_steps // sync_every) < FEW_ROUNDS:
        too_few = math.log2(FEW_ROUNDS / max(1, rounds))
        risks[f"{rounds} rounds are fewer than {FEW_ROUNDS}"] = too_few
    risks[f"tau = {delay}"] = delay * (0.01 if delay <= 5 else 0.02 if delay <= 10 else 0.05)
    risks[diloco.quantization.codec] = CODEC_TRAITS[diloco.quantization.codec].risk
    if mixing < LOW_MIXING:
        risks[f"alpha = {mixing:g} is below {LOW_MIXING}"] = LOW_MIXING_COST
    fragments = diloco.fragments
    is_common = fragments.layers_per_fragment in (0, PAPER_LAYERS)
    if fragments.pattern not in ("strided", "sequential") or not is_common:
        risks["not the papers' fragments"] = UNTRIED_FRAGMENTS_COST
    return risks


# --- text ----------------------------------------------------------------------------------------


def plan_text(name: str, load: Workload, conditions: Conditions, plan: Plan, origin: str) -> str:
    """Return the assumptions, a table with a column for each option, and the reasons.

    `origin` says where the step time comes from.
    """
    wanted = f"{100 * plan.wanted:g} %"
    columns = [_cells(option, load, wanted) for option in plan.options]
    names = [f"* {one.name}" if one is plan.best else one.name for one in plan.options]
    rows = [["", *names], *([label, *(one[label] for one in columns)] for label in columns[0])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" + ">" * len(columns)
    if not plan.reached:
        result = f"No setting reaches {wanted} on these links. The one marked * comes closest."
    elif plan.best is plan.options[0]:
        result = f"The present settings reach {wanted}, and no others do so with less risk."
    else:
        result = f"The one marked * reaches {wanted} with the least risk to the loss."
    lines = [
        *_assumptions(name, load, conditions, origin, plan.best.diloco),
        "",
        *("  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows),
        "",
        result,
    ]
    for one in plan.options:
        reasons = [f"{reason} ({percent:+.2f} %)" for reason, percent in one.risks.items()]
        lines += [f"- {one.name}: {', '.join(reasons)}"] if reasons else []
    lines.append(
        "Risks add up single comparisons (docs/planning.md). They rank, and predict no loss."
    )
    return "\n".join(lines)


def _assumptions(
    name: str, load: Workload, conditions: Conditions, origin: str, diloco: DiLoCoConfig
) -> list[str]:
    run, first = load.plan, diloco.beginning
    counted = "steady state of a long run"
    if first.steps:
        counted = f"with a beginning of {first.steps} steps, in which H = {first.sync_every}"
    coding = "no time on the accelerator; on the host as docs/performance.md"
    if math.isfinite(conditions.coding_bytes_per_second):
        rate = quantity(conditions.coding_bytes_per_second, "B/s")
        coding = f"{rate} of fp32 a worker with {conditions.codec}, as measured"
    elif load.on_cpu:
        coding = "one core a rank, at the speeds of docs/performance.md"
    steps = dict.fromkeys(quantity(seconds, "s") for seconds in conditions.step_seconds)
    lines = {
        "model": f"{name}: {run.parameters:,} parameters, {run.embedding_parameters:,} of them "
        f"embedding, {load.layers} layers",
        "run": f"{run.total_steps:,} steps of {run.tokens_per_step:,} tokens, {load.workers} "
        f"workers x {load.ranks} {'processes' if load.on_cpu else 'accelerators'}",
        "links": f"{quantity(conditions.bits_per_second, 'bit/s')} for the slowest worker, latency "
        f"{quantity(conditions.latency_seconds, 's')} one way",
        "step": f"{' / '.join(steps)} of compute ({origin}), jitter "
        f"{100 * conditions.jitter:.3g} %",
        "coding": coding,
        "prediction": f"extended model of docs/planning.md, {counted}; --table prints the paper's "
        "model",
    }
    return [f"{key:<11} {text}" for key, text in lines.items()]


def _cells(option: Option, load: Workload, wanted: str) -> dict[str, str]:
    """Return the cells of an option by the label of the row."""
    diloco, prediction, needed = option.diloco, option.prediction, option.needed_bits_per_second
    pattern, layers = diloco.fragments.pattern, diloco.fragments.layers_per_fragment
    settings = {
        "H, a fragment every ... steps": str(diloco.sync_every),
        "fragments": str(len(load.fragments(diloco.fragments))),
        "pattern": pattern if pattern == "explicit" else f"{pattern} {layers or 'all layers'}",
        "tau, applied after ... steps": str(diloco.overlap.delay),
        "alpha, local share": f"{diloco.overlap.mixing:g}",
        "format on the wire": diloco.quantization.codec,
        "bits/parameter": f"{bits_per_parameter(build_codec(diloco.quantization)):g}",
    }
    if diloco.method == "none":
        settings = dict.fromkeys(settings, "-")
        settings |= {"format on the wire": "bf16", "bits/parameter": "16"}
    # rounded down: 94.99 % must not look like 95 %
    utilisation = math.floor(1e3 * prediction.utilisation + 1e-8) / 10
    return settings | {
        "utilisation, %": f"{utilisation:.1f}",
        "training waits, ms/step": _number(1e3 * prediction.exposed_seconds_per_step),
        "sent by a worker, MB/step": _number(prediction.sent_bytes_per_step / 1e6),
        f"bandwidth for {wanted}, Mbit/s": _number(needed / 1e6) if needed else "out of reach",
        "whole run, hours": _number(load.plan.total_steps * prediction.step_seconds / 3600),
        "risk to the loss, %": f"{option.risk:.2f}",
    }


def _number(value: float) -> str:
    """Return four digits, or all before the point."""
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"
