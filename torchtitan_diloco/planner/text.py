"""A plan as text: assumptions, a table with a column for each option, and reasons."""

import math
from collections.abc import Callable

from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.planner.choice import Option, Plan
from torchtitan_diloco.planner.scenario import Scenario
from torchtitan_diloco.planner.units import format_bandwidth, format_bytes, format_duration
from torchtitan_diloco.utils import GIB


def plan_text(name: str, scenario: Scenario, plan: Plan, step_time_origin: str) -> str:
    """Return the assumptions, a table with a column for each option, and the reasons."""
    parts = (_assumptions(name, scenario, step_time_origin), _table(plan), _reasons(plan))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _assumptions(name: str, scenario: Scenario, step_time_origin: str) -> list[str]:
    load, conditions = scenario.workload, scenario.conditions
    links = conditions.links
    ranks = "processes" if scenario.on_cpu else "accelerators"
    lines = {
        "model": f"{name}: {load.parameters:,} parameters, {load.embedding_parameters:,} of them "
        f"embedding, {load.layers} layers",
        "run": f"{load.total_steps:,} steps of {load.tokens_per_step:,} tokens, {load.workers} "
        f"workers x {load.ranks} {ranks}",
        "links": f"sending {_each(links.up, format_bandwidth)}, receiving "
        f"{_each(links.down, format_bandwidth)}, latency {format_duration(links.latency_seconds)} "
        "one way",
        "step": f"{_each(conditions.step_seconds, format_duration)} of compute "
        f"({step_time_origin}), jitter {100 * conditions.jitter:g} %",
        "coding": _coding_line(scenario),
        "prediction": "extended model of docs/planning.md, steady state of a long run; --table "
        "prints the paper's model",
    }
    return [f"{key:<11} {text}" for key, text in lines.items()]


def _each(values: tuple[float, ...], show: Callable[[float], str]) -> str:
    return " / ".join(map(show, values if len(set(values)) > 1 else values[:1]))


def _coding_line(scenario: Scenario) -> str:
    if scenario.coding_bytes_per_second is not None:
        return f"{format_bytes(scenario.coding_bytes_per_second)}/s of fp32 a rank (given)"
    measured = scenario.conditions
    if math.isfinite(measured.coding_bytes_per_second):
        speed = format_bytes(measured.coding_bytes_per_second)
        return f"{speed}/s of fp32 a worker with {measured.codec}, as the run measured"
    if scenario.on_cpu:
        return "one core a rank, at the speeds of docs/performance.md"
    return "no time on the accelerator (--coding gives a rate); on the host as docs/performance.md"


def _table(plan: Plan) -> list[str]:
    def streaming(show: Callable[[Option], str]) -> Callable[[Option], str]:
        return lambda one: "-" if one.diloco.method == "none" else show(one)

    rows: list[tuple[str, str, Callable[[Option], str]]] = [
        ("H, a fragment every", "steps", streaming(lambda one: str(one.diloco.sync_every))),
        ("fragments", "", streaming(lambda one: str(one.fragments))),
        ("pattern", "", streaming(_pattern)),
        ("tau, applied after", "steps", streaming(lambda one: str(one.diloco.overlap.delay))),
        ("alpha, local share", "", streaming(lambda one: f"{one.diloco.overlap.mixing:g}")),
        ("format on the wire", "", lambda one: _codec(one)[0]),
        ("on the wire", "bits/param.", lambda one: _codec(one)[1]),
        # rounded down: 94.99 % must not look like 95 %
        (
            "utilisation",
            "%",
            lambda one: f"{math.floor(1e3 * one.prediction.utilisation + 1e-8) / 10:.1f}",
        ),
        (
            "training waits",
            "ms/step",
            lambda one: _number(1e3 * one.prediction.exposed_seconds_per_step),
        ),
        ("sent by a worker", "MB/step", lambda one: _mega(one.prediction.sent_bytes_per_step)),
        ("mean rate", "Mbit/s", lambda one: _mega(one.prediction.mean_bits_per_second)),
        ("peak rate", "Mbit/s", lambda one: _mega(one.prediction.peak_bits_per_second)),
        (
            f"bandwidth for {100 * plan.wanted:g} %",
            "Mbit/s",
            lambda one: _mega(one.needed_bits_per_second),
        ),
        ("memory of the device, a rank", "GiB", lambda one: _number(one.device_bytes / GIB)),
        ("memory of the host, a rank", "GiB", lambda one: _number(one.host_bytes / GIB)),
        ("whole run", "hours", lambda one: _number(one.hours)),
        ("risk to the loss, for ranking", "%", lambda one: f"{one.risk.percent:.2f}"),
    ]
    names = [f"* {one.name}" if one is plan.best else one.name for one in plan.options]
    lines = [["", "", *names]]
    lines += [[what, unit, *(show(one) for one in plan.options)] for what, unit, show in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = "<<" + ">" * len(names)
    return ["  ".join(map("{:{}{}}".format, line, sides, widths)).rstrip() for line in lines]


def _reasons(plan: Plan) -> list[str]:
    wanted = f"{100 * plan.wanted:g} %"
    if not plan.reached:
        first = f"No setting reaches {wanted} on these links. The one marked * comes closest."
    elif plan.best is plan.present:
        first = f"The present settings reach {wanted}, and no others do so with less risk."
    else:
        first = f"The one marked * reaches {wanted} with the least risk to the loss."
    lines = [first, *(f"- {one.name}: {'; '.join(one.risk.reasons)}" for one in plan.options)]
    if plan.data_parallel_without_latency is not None:
        needed = format_bandwidth(plan.data_parallel_without_latency)
        lines.append(f"Data parallelism would need {needed} for {wanted} on links without latency.")
    return [
        *lines,
        "Risks add up single comparisons (docs/planning.md). They rank, and predict no loss.",
        "Memory: parameters, gradients, AdamW, outer state and exchange buffers, no activations.",
    ]


def _pattern(one: Option) -> str:
    fragments = one.diloco.fragments
    if fragments.pattern == "explicit":
        return "explicit"
    layers = fragments.layers_per_fragment
    return f"{fragments.pattern} {layers}" if layers else "whole model"


def _codec(one: Option) -> tuple[str, str]:
    if one.diloco.method == "none":
        return "bf16", "16"
    quantization = one.diloco.quantization
    return quantization.codec, f"{bits_per_parameter(build_codec(quantization)):g}"


def _number(value: float) -> str:
    """Return four digits, or all before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _mega(value: float | None) -> str:
    return "out of reach" if value is None else _number(value / 1e6)
