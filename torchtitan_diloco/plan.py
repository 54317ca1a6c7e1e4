"""Find the settings of the outer loop that a model needs on given links, before a run.

python -m torchtitan_diloco.plan --config 1b --bandwidth 2Gbit --latency 30ms --step-time 0.5
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tomli_w

from torchtitan_diloco.config import Config, from_command_line, load_config
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, find_config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.diloco.config import Fragments, Quantization
from torchtitan_diloco.planner.paper import WIDE_GRID, PaperModel, paper_table
from torchtitan_diloco.planner.prediction import Conditions, Links
from torchtitan_diloco.planner.units import (
    format_bandwidth,
    format_duration,
    parse_bandwidth,
    parse_duration,
    parse_share,
)
from torchtitan_diloco.utils import PEAK_BF16_FLOPS

if TYPE_CHECKING:  # these import torch, which --help and --table do not need
    from torchtitan_diloco.planner.choice import Plan
    from torchtitan_diloco.planner.scenario import Scenario, Workload

REMEDY = (
    "give --step-time (seconds of compute of one inner step), or --mfu with --device or "
    "--peak-tflops, or --probe to measure it"
)
EPILOG = f"""\
Any setting of a run can be given as well, as in --diloco.workers 4 or --parallel.fsdp 8.
Without a step time: {REMEDY}.
How the numbers are computed: docs/planning.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options, settings = _parser().parse_known_args(arguments)
        _check_flags(options, settings)
        if options.table and options.config is None:
            print(f"{_paper_line('nominal size', 100)}\n\n{paper_table()}")
            return 0
        if options.config is None:
            raise ValueError("give a model: --config 1b, or --table alone for the paper's models")
        config = from_command_line(["--config", options.config, *settings])
        if config is not None and options.table:
            print(_table(options, config))
        elif config is not None:  # None: --print-config was answered
            _plan(options, config, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m torchtitan_diloco.plan",
        description="Find settings that reach a utilisation with the least risk to the loss.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    rates, seconds = _list_of(parse_bandwidth), _list_of(_seconds)
    curves, toml = _output(".png", ".svg"), _output(".toml")
    add = parser.add_argument
    add("--config", metavar="NAME_OR_PATH", help="a TOML file, or the name of a preset")
    add("--bandwidth", type=rates, help="of each worker, as in 2Gbit or 25MB/s; A,B,... for each")
    add("--upload", type=rates, help="where workers send at another rate than they receive")
    add("--latency", type=parse_duration, default="0s", help="one way, half of ping, as in 30ms")
    add_step = parser.add_mutually_exclusive_group().add_argument
    add_step("--step-time", type=seconds, help="compute of one inner step; A,B,... for each worker")
    add_step("--mfu", type=parse_share, help="in place of a step time: share of the peak, as 40%%")
    add_peak = parser.add_mutually_exclusive_group().add_argument
    add_peak("--device", type=_peak_of, help="accelerator whose peak is known, as in H100")
    add_peak("--peak-tflops", type=float, help="bf16 peak of another accelerator")
    add("--jitter", type=parse_share, help="standard deviation of step times, as in 5%%")
    add("--coding", type=parse_bandwidth, help="fp32 bytes a rank codes in a second, as in 2GB/s")
    add_run = parser.add_mutually_exclusive_group().add_argument
    add_run("--probe", action="store_true", help="measure links and steps by a short run first")
    add_run("--run", type=Path, help="take links and steps from a finished run")
    add("--utilisation", type=parse_share, default="95%", help="wanted utilisation (95%%)")
    add("--table", action="store_true", help="print the paper's table, or that of --config")
    add("--plot", type=curves, help="draw utilisation over bandwidth (.png, .svg)")
    add("--write", type=toml, help="write the recommended settings as a TOML")
    return parser


def _list_of(parse: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    return lambda text: tuple(parse(word.strip()) for word in text.split(","))


def _seconds(text: str) -> float:
    """Parse a duration, or a bare number of seconds."""
    try:
        return float(text)
    except ValueError:
        return parse_duration(text)


def _peak_of(device: str) -> float:
    known = {name.lower(): flops for name, flops in PEAK_BF16_FLOPS.items()}
    if device.lower() not in known:
        names = ", ".join(PEAK_BF16_FLOPS)
        reason = f'"{device}" is not known: give one of {names}, or --peak-tflops'
        raise argparse.ArgumentTypeError(reason)
    return known[device.lower()]


def _output(*suffixes: str) -> Callable[[str], Path]:
    def check(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            reason = f'"{path}": give a name that ends in {" or ".join(suffixes)}'
            raise argparse.ArgumentTypeError(reason)
        if not path.parent.is_dir():
            reason = f'"{path}": there is no folder {path.parent}; create it first'
            raise argparse.ArgumentTypeError(reason)
        return path

    return check


def _check_flags(options: argparse.Namespace, settings: Sequence[str]) -> None:
    known = [f"--{name.replace('_', '-')}" for name in vars(options)]
    for word in settings:
        if word.startswith("--") and "." not in word and word != "--print-config":
            nearest = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all flags"
            raise ValueError(f"{word} is unknown: {hint}")
    if options.table and (options.plot or options.write or options.probe or options.run):
        raise ValueError("--table plans nothing: leave out --plot, --write, --probe and --run")
    if not 0 < options.utilisation < 1:
        raise ValueError(f"--utilisation {options.utilisation:.0%}: give a share below 100%")
    if options.write is not None and options.write.exists():
        raise ValueError(f'--write "{options.write}" exists already: give another name')


def _plan(options: argparse.Namespace, config: Config, settings: list[str]) -> None:
    from torchtitan_diloco.planner.choice import choose
    from torchtitan_diloco.planner.scenario import Scenario
    from torchtitan_diloco.planner.text import plan_text

    if config.diloco.workers == 1:
        raise ValueError("diloco.workers = 1: there are no links; give --diloco.workers 2 or more")
    load = _workload(config)
    steps, origin = _step_times(options, load)
    conditions = _conditions(options, config, settings, steps)
    if conditions is None:
        print("probed; the first node prints the plan")
        return
    scenario = Scenario(
        load,
        conditions,
        on_cpu=config.run.device == "cpu",
        coding_bytes_per_second=options.coding and options.coding / 8,
    )
    plan = choose(scenario, config.diloco, options.utilisation)
    print(plan_text(config.run.name, scenario, plan, origin))
    if options.plot is not None:
        _plot(options.plot, config.run.name, scenario, plan)
        print(f"\nwrote {options.plot}")
    if options.write is not None:
        comment = (
            f"Planned for {format_bandwidth(conditions.links.slowest)}, latency "
            f"{format_duration(conditions.links.latency_seconds)} one way, steps of "
            f"{format_duration(max(conditions.step_seconds))}: predicted utilisation "
            f"{100 * plan.best.prediction.utilisation:.1f} %"
        )
        planned = replace(config, diloco=plan.best.diloco)
        write_variant(options.write, options.config, planned, comment)
        print(f"\nwrote {options.write}: start it with ./run_train.sh --config {options.write}")


def _conditions(
    options: argparse.Namespace,
    config: Config,
    settings: list[str],
    steps: tuple[float, ...] | None,
) -> Conditions | None:
    """Return what is given, else what is measured. None on nodes that only take part in a probe."""
    from torchtitan_diloco.planner.observed import conditions_of_run, probe

    workers = config.diloco.workers
    links = None
    if options.bandwidth is not None:
        down = _for_each(options.bandwidth, "--bandwidth", workers)
        up = _for_each(options.upload or down, "--upload", workers)
        links = Links(up, down, options.latency)
    if options.probe:
        measured = probe(["--config", options.config, *settings], config.diloco.overlap.delay)
        if measured is None:
            return None
    elif options.run is not None:
        measured = conditions_of_run(options.run)
        if measured.workers != workers:
            raise ValueError(
                f"--run {options.run}: that run had {measured.workers} workers, and "
                f"diloco.workers = {workers}: give a run of as many"
            )
    elif links is None:
        raise ValueError(
            "the links are not known: give --bandwidth, as in 2Gbit, 200Mbit/s or 25MB/s, or "
            "--probe to measure them, or --run RUN to take those of a finished run"
        )
    else:
        assert steps is not None
        return Conditions(links, steps, jitter=options.jitter or 0.0)
    jitter = options.jitter
    if jitter is None:
        jitter = measured.jitter if steps is None else 0.0
    return replace(
        measured,
        links=links or measured.links,
        step_seconds=steps or measured.step_seconds,
        jitter=jitter,
    )


def _for_each(values: tuple[float, ...], flag: str, workers: int) -> tuple[float, ...]:
    """Repeat one value for all workers, or check that there is one for each."""
    if len(values) not in (1, workers):
        raise ValueError(f"{flag} lists {len(values)} values: give one, or {workers}, one a worker")
    return values * workers if len(values) == 1 else values


def _workload(config: Config) -> "Workload":
    from torchtitan_diloco.components.run_plan import vocabulary_rows
    from torchtitan_diloco.data.corpus import open_tokenizer
    from torchtitan_diloco.planner.scenario import Workload

    rows = config.model.vocab_size
    if rows is None:
        rows = vocabulary_rows(config.model, open_tokenizer(config.data).vocab_size)
    return Workload.of(config, rows)


def _step_times(
    options: argparse.Namespace, load: "Workload"
) -> tuple[tuple[float, ...] | None, str]:
    """Return the seconds of every worker and how they were found; None if they are measured."""
    if options.step_time is not None:
        return _for_each(options.step_time, "--step-time", load.workers), "given"
    if options.mfu is None:
        if options.probe or options.run:
            return None, "measured"
        raise ValueError(f"the step time is not known: {REMEDY}")
    peak = options.device or 1e12 * (options.peak_tflops or 0.0)
    if not peak * options.mfu > 0:
        names = ", ".join(PEAK_BF16_FLOPS)
        raise ValueError(
            "--mfu above 0 needs a peak above 0: "
            f"give either --device ({names}) or --peak-tflops, as in 989"
        )
    seconds = load.flops_per_step / (load.ranks * peak * options.mfu)
    origin = (
        f"{load.flops_per_step:.3g} FLOP / ({load.ranks} x {peak / 1e12:g} TFLOP/s x "
        f"{100 * options.mfu:g} %) = {format_duration(seconds)}"
    )
    return (seconds,) * load.workers, origin


def _paper_line(size: str, sync_every: int) -> str:
    return (
        "Paper's model (no embedding, no latency, no coding, any number of workers) of "
        f"{size}, H = {sync_every}; Gbit/s for a utilisation of"
    )


def _table(options: argparse.Namespace, config: Config) -> str:
    load = _workload(config)
    steps, origin = _step_times(options, load)
    assert steps is not None
    seconds = format_duration(max(steps))
    name = f"{config.run.name}, {load.layers} layers, {seconds} a step"
    model = PaperModel(name, load.layers, float(load.parameters), max(steps))
    size = f"{load.parameters:,} parameters, steps of {seconds} ({origin})"
    table = paper_table([model], config.diloco.sync_every, WIDE_GRID)
    return f"{_paper_line(size, config.diloco.sync_every)}\n\n{table}"


def _plot(path: Path, name: str, scenario: "Scenario", plan: "Plan") -> None:
    """Draw utilisation over bandwidth for data parallelism, DiLoCo, present and recommended."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    present = plan.present.diloco
    settings = {
        "data parallel": plan.data_parallel.diloco,
        "DiLoCo": replace(
            present,
            method="streaming",
            fragments=Fragments(layers_per_fragment=0),
            overlap=replace(present.overlap, delay=0),
            quantization=Quantization(codec="bf16"),
        ),
    }
    if present.method == "streaming":
        settings["present"] = present
    if plan.best is not plan.present:
        settings["recommended"] = plan.best.diloco
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = np.geomspace(1e4, 1e14, 81)
    rising = np.zeros(len(rates), dtype=bool)
    for label, diloco in settings.items():
        factors = rates / scenario.conditions.links.slowest
        reached = np.array([scenario.predict(diloco, factor).utilisation for factor in factors])
        rising |= (reached > 0.02) & (reached < 0.995 * reached[-1])
        axes.plot(rates / 1e9, 100 * reached, label=label)
    if rising.any():
        axes.set_xlim(*rates[rising][[0, -1]] / 1e9)
    axes.set(xscale="log", ylim=(0, 102), title=f"{name}: compute utilisation")
    axes.set(xlabel="bandwidth of a worker, Gbit/s", ylabel="% of the time computing")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def write_variant(path: Path, config_name: str, wanted: Config, comment: str) -> None:
    """Write a TOML that extends a config with what `wanted` sets differently."""
    parent = find_config(config_name)
    name = parent.name
    in_presets = parent.resolve().parent == CONFIGS_FOLDER.resolve()
    if not in_presets or path.name == name or (path.parent / name).exists():
        name = os.path.relpath(parent.resolve(), path.parent.resolve())
    before, after = flat_settings(load_config(config_name)), flat_settings(wanted)
    table: dict[str, Any] = {"extends": name}
    for key, value in after.items():
        if value == before[key] or key == "run.name":
            continue
        if value is None:
            raise ValueError(f"{key} = none cannot be written: remove it from {config_name}")
        *sections, leaf = key.split(".")
        section = table
        for one in sections:
            section = section.setdefault(one, {})
        section[leaf] = value
    with path.open("x", encoding="utf-8") as file:
        file.write(f"# {comment}\n{tomli_w.dumps(table)}")


if __name__ == "__main__":
    sys.exit(main())
