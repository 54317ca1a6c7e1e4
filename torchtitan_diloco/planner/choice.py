"""The settings that reach a wanted utilisation with the least risk to the loss."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan_diloco.diloco.config import CodecName, DiLoCoConfig as DiLoCo, Fragments, Quantization
from torchtitan_diloco.planner.memory import Memory
from torchtitan_diloco.planner.prediction import Prediction
from torchtitan_diloco.planner.risk import LOW_MIXING, PAPER_LAYERS, Risk, risk_of
from torchtitan_diloco.planner.scenario import Scenario

SYNC_EVERY = (10, 20, 30, 50, 70, 100, 150, 200, 300, 500)
DELAYS = (0, 1, 2, 5, 10)
CODECS: tuple[CodecName, ...] = ("bf16", "int8", "fp4_e3m0", "ternary")
FRAGMENTS = (
    Fragments(layers_per_fragment=PAPER_LAYERS),
    Fragments(layers_per_fragment=1),
    Fragments(pattern="balanced", layers_per_fragment=PAPER_LAYERS),
)
MIXING = 0.5
WORTH_A_CHANGE = 0.05
"""Percent of risk for which one more setting is changed."""


@dataclass(frozen=True)
class Option:
    """A setting and all that is said about it."""

    name: str
    diloco: DiLoCo
    fragments: int
    prediction: Prediction
    memory: Memory
    hours: float
    needed_bits_per_second: float | None
    """Of the slowest link, for the wanted utilisation."""
    risk: Risk


@dataclass(frozen=True)
class Plan:
    wanted: float
    """Utilisation."""
    present: Option
    best: Option
    """May be the present one."""
    alternatives: tuple[Option, ...]
    data_parallel: Option
    data_parallel_without_latency: float | None
    """Bandwidth in bits a second that data parallelism would need."""

    @property
    def reached(self) -> bool:
        return self.best.prediction.utilisation >= self.wanted

    @property
    def options(self) -> tuple[Option, ...]:
        best = () if self.best is self.present else (self.best,)
        control = () if self.present.diloco.method == "none" else (self.data_parallel,)
        return (self.present, *best, *self.alternatives, *control)


def choose(scenario: Scenario, present: DiLoCo, wanted: float) -> Plan:
    """The least risky settings of all, and with every format on the wire, that reach the wanted utilisation. Where none does:
    those that come closest."""
    ranked = sorted(
        candidates(present, scenario.workload.total_steps),
        key=lambda one: _rank(one, present, scenario),
    )
    by_codec: dict[str, DiLoCo] = {}
    closest, highest = present, -1.0
    for diloco in ranked:
        if diloco.quantization.codec in by_codec or scenario.most_utilisation(diloco) < min(
            wanted, highest
        ):
            continue
        utilisation = scenario.predict(diloco).utilisation
        if utilisation >= wanted:
            by_codec[diloco.quantization.codec] = diloco
        if utilisation > highest + 1e-4:  # of equals the less risky, which came first
            closest, highest = diloco, utilisation
    found = sorted(by_codec.values(), key=lambda one: _rank(one, present, scenario)) or [closest]

    def option(name: str, diloco: DiLoCo) -> Option:
        return describe_option(name, scenario, diloco, present, wanted)

    shown = option("present", present)
    best = shown if found[0] == present else option("recommended", found[0])
    others = [option(f"with {one.quantization.codec}", one) for one in found[1:] if one != present]
    control = option("data parallel", replace(present, method="none"))
    no_latency = scenario.without_latency().needed_bits_per_second(control.diloco, wanted)
    return Plan(wanted, shown, best, tuple(others), control, no_latency)


def candidates(present: DiLoCo, total_steps: int) -> Iterator[DiLoCo]:
    """The present settings, and what may be set instead. What somebody has listed by hand is left as it is."""
    if present.method == "streaming":
        yield present
    by_hand = present.fragments.pattern == "explicit"
    fragments = {present.fragments: None} | ({} if by_hand else dict.fromkeys(FRAGMENTS))
    codecs = {present.quantization.codec: None} | dict.fromkeys(CODECS)
    mixing = present.overlap.mixing if present.overlap.mixing >= LOW_MIXING else MIXING
    for sync_every in sorted({present.sync_every, *SYNC_EVERY}):
        if sync_every > total_steps:
            continue
        for delay in sorted({present.overlap.delay, *DELAYS}):
            if delay >= sync_every:
                continue
            for cut in fragments:
                for codec in codecs:
                    yield replace(
                        present,
                        method="streaming",
                        sync_every=sync_every,
                        fragments=cut,
                        overlap=replace(present.overlap, delay=delay, mixing=mixing),
                        quantization=_with_codec(present, codec),
                    )


def describe_option(
    name: str, scenario: Scenario, diloco: DiLoCo, present: DiLoCo, wanted: float
) -> Option:
    prediction = scenario.predict(diloco)
    return Option(
        name=name,
        diloco=diloco,
        fragments=0
        if diloco.method == "none"
        else len(scenario.workload.fragments(diloco.fragments)),
        prediction=prediction,
        memory=scenario.memory(diloco, prediction),
        hours=scenario.hours(prediction),
        needed_bits_per_second=scenario.needed_bits_per_second(diloco, wanted),
        risk=risk_of(diloco, scenario.workload.total_steps, present.sync_every),
    )


def _rank(diloco: DiLoCo, present: DiLoCo, scenario: Scenario) -> tuple[float, int]:
    """The risk, and a little for every change; among equals the smaller delay."""
    risk = risk_of(diloco, scenario.workload.total_steps, present.sync_every).percent
    pairs = (
        (diloco.sync_every, present.sync_every),
        (diloco.fragments, present.fragments),
        (diloco.overlap, present.overlap),
        (diloco.quantization, present.quantization),
    )
    changes = sum(one != other for one, other in pairs)
    return round(risk + WORTH_A_CHANGE * changes, 4), diloco.overlap.delay


def _with_codec(present: DiLoCo, codec: CodecName) -> Quantization:
    """What only makes sense with the present format goes with it."""
    given = present.quantization
    if codec == given.codec:
        return given
    block_size = Quantization.block_size if codec == "bf16" else given.block_size
    return replace(
        given, codec=codec, gather_codec="same", error_feedback=False, block_size=block_size
    )
