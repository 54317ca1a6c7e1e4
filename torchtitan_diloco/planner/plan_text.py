"""A plan in words: what it rests on, a table with one column for every setting, and the reasons."""

import math
from collections.abc import Callable

from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo
from torchtitan_diloco.planner.choice import Option, Plan
from torchtitan_diloco.planner.scenario import Scenario
from torchtitan_diloco.planner.units import format_bandwidth, format_bytes, format_duration
from torchtitan_diloco.planner.workload import model_facts
from torchtitan_diloco.utils import GIB


def plan_text(name: str, scenario: Scenario, plan: Plan, step_time_origin: str) -> str:
    return "\n\n".join(
        [
            "\n".join(_assumptions(name, scenario, step_time_origin)),
            _table(plan),
            "\n".join(_reasons(plan)),
        ]
    )


def _assumptions(name: str, scenario: Scenario, step_time_origin: str) -> list[str]:
    workload, conditions = scenario.workload, scenario.conditions
    facts = model_facts(workload.model, workload.vocabulary, workload.sequence_length)
    links = conditions.links
    rank = "process" if scenario.on_cpu else "accelerator"
    lines = {
        "model": f"{name}: {facts.parameters:,} parameters, {facts.embedding_parameters:,} of them embedding, "
        f"{facts.layers} layers",
        "run": f"{workload.total_steps:,} steps of {workload.tokens_per_step:,} tokens, {workload.workers} workers x "
        f"{workload.ranks} {rank}{'' if workload.ranks == 1 else 'es' if scenario.on_cpu else 's'}",
        "links": f"sending {_each(links.up, format_bandwidth)}, receiving {_each(links.down, format_bandwidth)}, latency "
        f"{format_duration(links.latency_seconds)} one way",
        "step": f"{_each(conditions.step_seconds, format_duration)} of compute ({step_time_origin}), jitter "
        f"{100 * conditions.jitter:g} %",
        "coding": _coding_line(scenario),
        "prediction": "extended model of docs/planning.md, steady state of a long run; not the paper's (--table prints that)",
    }
    return [f"{key:<11} {text}" for key, text in lines.items()]


def _each(values: tuple[float, ...], show: Callable[[float], str]) -> str:
    """Once where all workers have the same."""
    return " / ".join(map(show, values if len(set(values)) > 1 else values[:1]))


def _coding_line(scenario: Scenario) -> str:
    if scenario.coding_bytes_per_second is not None:
        return f"{format_bytes(scenario.coding_bytes_per_second)}/s of fp32 a rank (given)"
    met = scenario.conditions
    if math.isfinite(met.coding_bytes_per_second):
        speed = f"{format_bytes(met.coding_bytes_per_second)}/s of fp32 a worker with {met.codec}"
        others = (
            "in proportion"
            if scenario.on_cpu
            else "as fast on an accelerator, in proportion on the host"
        )
        return f"{speed}, as the run has met it; other formats {others}"
    if scenario.on_cpu:
        return "on one core a rank, as docs/performance.md has it; what it takes from training is not counted"
    return "no time on the accelerator (--coding gives a rate); as docs/performance.md has it with outer state on the host"


Row = tuple[str, str, Callable[[Option], str]]
"""What, unit, value."""


def _rows(wanted: float) -> list[Row]:
    return [
        (
            "H, a fragment is exchanged every",
            "steps",
            lambda one: _streaming(one, str(one.diloco.sync_every)),
        ),
        ("fragments", "", lambda one: _streaming(one, str(one.fragments))),
        ("cut", "", lambda one: _streaming(one, _cut(one.diloco))),
        ("tau, applied after", "steps", lambda one: _streaming(one, str(one.diloco.overlap.delay))),
        ("alpha, local share", "", lambda one: _streaming(one, f"{one.diloco.overlap.mixing:g}")),
        (
            "format on the wire",
            "",
            lambda one: one.diloco.quantization.codec if _is_streaming(one) else "bf16",
        ),
        ("on the wire", "bits/param.", _bits),
        ("utilisation", "%", lambda one: _floor_percent(one.prediction.utilisation)),
        (
            "training waits",
            "ms/step",
            lambda one: _number(1e3 * one.prediction.exposed_seconds_per_step),
        ),
        (
            "sent by a worker",
            "MB/step",
            lambda one: _number(one.prediction.sent_bytes_per_step / 1e6),
        ),
        (
            "sent by a worker, mean",
            "Mbit/s",
            lambda one: _number(one.prediction.mean_bits_per_second / 1e6),
        ),
        (
            "sent by a worker, peak",
            "Mbit/s",
            lambda one: _number(one.prediction.peak_bits_per_second / 1e6),
        ),
        (
            f"bandwidth needed for {100 * wanted:g} %",
            "Mbit/s",
            lambda one: _needed(one.needed_bits_per_second),
        ),
        ("memory of the device, a rank", "GiB", lambda one: _number(one.memory.device_bytes / GIB)),
        ("memory of the host, a rank", "GiB", lambda one: _number(one.memory.host_bytes / GIB)),
        ("whole run", "hours", lambda one: _number(one.hours)),
        ("risk to the loss, as an order", "%", lambda one: f"{one.risk.percent:.2f}"),
    ]


def _table(plan: Plan) -> str:
    columns = plan.options
    names = [f"* {one.name}" if one is plan.best else one.name for one in columns]
    cells = [
        [what, unit, *(value(one) for one in columns)] for what, unit, value in _rows(plan.wanted)
    ]
    lines = [["", "", *names], *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in lines)


def _aligned(line: list[str], widths: list[int]) -> list[str]:
    pairs = list(zip(line, widths, strict=True))
    return [text.ljust(width) for text, width in pairs[:2]] + [
        text.rjust(width) for text, width in pairs[2:]
    ]


def _reasons(plan: Plan) -> list[str]:
    lines = []
    if not plan.reached:
        lines.append(
            f"No setting reaches {100 * plan.wanted:g} % on these links: the one marked * comes closest."
        )
    elif plan.best is plan.present:
        lines.append(
            f"The present settings reach {100 * plan.wanted:g} %, and no others do so with less risk."
        )
    else:
        lines.append(
            f"The one marked * reaches {100 * plan.wanted:g} % with the least risk to the loss."
        )
    lines += [f"- {one.name}: {'; '.join(one.risk.reasons)}" for one in plan.options]
    if plan.data_parallel_without_latency is not None:
        needed = format_bandwidth(plan.data_parallel_without_latency)
        lines.append(
            f"Data parallelism would need {needed} for {100 * plan.wanted:g} % on links without any latency."
        )
    lines.append(
        "Risks add up what single comparisons showed (docs/planning.md; H: the papers' +0.6 % at 30, +1.4 % at 100): they"
    )
    lines.append(
        "put settings in an order, and predict no loss: short runs from scratch lose more (docs/algorithm.md)."
    )
    lines.append(
        "Memory: parameters, gradients, AdamW, outer state and buffers of the exchange; activations come on top."
    )
    return lines


def _is_streaming(one: Option) -> bool:
    return one.diloco.method == "streaming"


def _streaming(one: Option, text: str) -> str:
    return text if _is_streaming(one) else "-"


def _cut(diloco: DiLoCo) -> str:
    fragments = diloco.fragments
    if fragments.pattern == "explicit":
        return "explicit"
    return (
        f"{fragments.pattern} {fragments.layers_per_fragment}"
        if fragments.layers_per_fragment
        else "whole model"
    )


def _bits(one: Option) -> str:
    if not _is_streaming(one):
        return "16"
    return f"{bits_per_parameter(build_codec(one.diloco.quantization)):g}"


def _number(value: float) -> str:
    """Four digits, or all before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _floor_percent(share: float) -> str:
    """Rounded down, so that 94.99 % does not look like 95 %."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}"


def _needed(bits_per_second: float | None) -> str:
    return "out of reach" if bits_per_second is None else _number(bits_per_second / 1e6)
