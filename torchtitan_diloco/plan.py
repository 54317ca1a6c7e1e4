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
from typing import TYPE_CHECKING

from torchtitan_diloco.config import Config, from_command_line, load_config
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, find_config
from torchtitan_diloco.config.schema import flat_settings, format_value
from torchtitan_diloco.utils import PEAK_BF16_FLOPS

if TYPE_CHECKING:
    from torchtitan_diloco.planner.choice import Plan
    from torchtitan_diloco.planner.prediction import Links
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
    options, settings = _parser().parse_known_args(arguments)
    try:
        _check_flags(options, settings)
        if options.table and options.config is None:
            from torchtitan_diloco.planner.paper import paper_table

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.plan",
        description="Find settings that reach a utilisation with the least risk to the loss.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="NAME_OR_PATH", help="a TOML file, or the name of a preset")
    add(
        "--bandwidth",
        metavar="RATE",
        help="of each worker, as in 2Gbit or 25MB/s; A,B,... for each",
    )
    add("--upload", metavar="RATE", help="where workers send at another rate than they receive")
    add("--latency", metavar="TIME", default="0s", help="one way, half of ping, as in 30ms")
    add("--step-time", metavar="SECONDS", help="compute of one inner step; A,B,... for each worker")
    add("--mfu", metavar="SHARE", help="in place of a step time: share of the peak, as in 40%%")
    add("--device", metavar="NAME", help="accelerator whose peak is known, as in H100")
    add("--peak-tflops", metavar="N", type=float, help="bf16 peak of another accelerator")
    add("--jitter", metavar="SHARE", help="standard deviation of step times, as in 5%%")
    add("--coding", metavar="RATE", help="fp32 bytes a rank codes in a second, as in 2GB/s")
    add("--probe", action="store_true", help="measure links and steps by a short run first")
    add("--run", metavar="RUN", type=Path, help="take links and steps from a finished run")
    add("--utilisation", metavar="SHARE", default="95%", help="wanted utilisation (95%%)")
    add("--table", action="store_true", help="print the paper's table, or that of --config")
    add("--plot", metavar="FILE", type=Path, help="draw utilisation over bandwidth (.png, .svg)")
    add("--write", metavar="FILE", type=Path, help="write the recommended settings as a TOML")
    return parser


def _check_flags(options: argparse.Namespace, settings: Sequence[str]) -> None:
    known = [f"--{name.replace('_', '-')}" for name in vars(options)]
    for word in settings:
        if word.startswith("--") and "." not in word and word != "--print-config":
            nearest = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all flags"
            raise ValueError(f"{word} is unknown: {hint}")
    if options.table and (options.plot or options.write or options.probe or options.run):
        raise ValueError("--table plans nothing: leave out --plot, --write, --probe and --run")
    if options.probe and options.run:
        raise ValueError("--probe and --run both measure: give one of them")
    if options.step_time is not None and options.mfu is not None:
        raise ValueError("--step-time and --mfu both set the step time: give one of them")
    _check_output(options.plot, "--plot", (".png", ".svg"))
    _check_output(options.write, "--write", (".toml",))
    if options.write is not None and options.write.exists():
        raise ValueError(f'--write "{options.write}" exists already: give another name')


def _check_output(path: Path | None, flag: str, suffixes: tuple[str, ...]) -> None:
    if path is not None and path.suffix not in suffixes:
        raise ValueError(f'{flag} "{path}": give a name that ends in {" or ".join(suffixes)}')
    if path is not None and not path.parent.is_dir():
        raise ValueError(f'{flag} "{path}": there is no folder {path.parent}; create it first')


def _plan(options: argparse.Namespace, config: Config, settings: list[str]) -> None:
    # Imported here: torch takes seconds, which --help and --table do not need.
    from torchtitan_diloco.planner.choice import choose
    from torchtitan_diloco.planner.observed import conditions_of_run, probe
    from torchtitan_diloco.planner.prediction import Conditions
    from torchtitan_diloco.planner.scenario import Scenario
    from torchtitan_diloco.planner.text import (
        format_bandwidth,
        format_duration,
        parse_bandwidth,
        parse_share,
        plan_text,
    )

    wanted = parse_share(options.utilisation, "--utilisation")
    if not 0 < wanted < 1:
        raise ValueError(f'--utilisation "{options.utilisation}": give a share below 100%')
    workers = config.diloco.workers
    if workers == 1:
        raise ValueError("diloco.workers = 1: there are no links; give --diloco.workers 2 or more")
    links = _links(options, workers)
    jitter = parse_share(options.jitter or "0", "--jitter")
    coding = options.coding and parse_bandwidth(options.coding, "--coding") / 8
    load = _workload(config)
    steps, origin = _step_times(options, load)
    measured: Conditions | None = None
    if options.probe:
        measured = probe(["--config", options.config, *settings], config.diloco.overlap.delay)
        if measured is None:
            print("probed; the first node prints the plan")
            return
    elif options.run is not None:
        measured = conditions_of_run(options.run)
        if measured.workers != workers:
            raise ValueError(
                f"--run {options.run}: that run had {measured.workers} workers, and "
                f"diloco.workers = {workers}: give a run of as many"
            )
    if measured is None:
        assert links is not None
        assert steps is not None
        conditions = Conditions(links, steps, jitter=jitter)
    else:  # what is given overrides what was measured
        given = steps is not None or options.jitter is not None
        conditions = replace(
            measured,
            links=links or measured.links,
            step_seconds=steps or measured.step_seconds,
            jitter=jitter if given else measured.jitter,
        )
    on_cpu = config.run.device == "cpu"
    scenario = Scenario(load, conditions, on_cpu=on_cpu, coding_bytes_per_second=coding)
    plan = choose(scenario, config.diloco, wanted)
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
        write_variant(
            options.write, options.config, replace(config, diloco=plan.best.diloco), comment
        )
        print(f"\nwrote {options.write}: start it with ./run_train.sh --config {options.write}")


def _links(options: argparse.Namespace, workers: int) -> "Links | None":
    from torchtitan_diloco.planner.prediction import Links
    from torchtitan_diloco.planner.text import parse_bandwidth, parse_duration

    if options.bandwidth is None:
        if options.probe or options.run:
            return None
        raise ValueError(
            "the links are not known: give --bandwidth, as in 2Gbit, 200Mbit/s or 25MB/s, or "
            "--probe to measure them, or --run RUN to take those of a finished run"
        )
    down = _each(options.bandwidth, "--bandwidth", workers, parse_bandwidth)
    up = down
    if options.upload is not None:
        up = _each(options.upload, "--upload", workers, parse_bandwidth)
    return Links(up, down, parse_duration(options.latency, "--latency"))


def _each(
    text: str, flag: str, workers: int, parse: Callable[[str, str], float]
) -> tuple[float, ...]:
    """Parse one value for all workers, or a list with one for each."""
    values = [parse(word.strip(), flag) for word in text.split(",")]
    if len(values) not in (1, workers):
        raise ValueError(f"{flag} lists {len(values)} values: give one, or {workers}, one a worker")
    return tuple(values * workers if len(values) == 1 else values)


def _workload(config: Config) -> "Workload":
    from torchtitan_diloco.components.run_plan import vocabulary_rows
    from torchtitan_diloco.data.loader import open_tokenizer
    from torchtitan_diloco.planner.scenario import Workload

    rows = config.model.vocab_size
    if rows is None:
        rows = vocabulary_rows(config.model, open_tokenizer(config.data).vocab_size)
    return Workload.of(config, rows)


def _step_times(
    options: argparse.Namespace, load: "Workload"
) -> tuple[tuple[float, ...] | None, str]:
    """Return the seconds of every worker and how they were found; None if they are measured."""
    from torchtitan_diloco.planner.text import format_duration, parse_duration, parse_share

    if options.step_time is not None:
        times = _each(options.step_time, "--step-time", load.workers, _seconds_or(parse_duration))
        return times, "given"
    if options.mfu is None and (options.probe or options.run):
        return None, "measured"
    if options.mfu is None:
        raise ValueError(f"the step time is not known: {REMEDY}")
    share = parse_share(options.mfu, "--mfu")
    if not 0 < share <= 1:
        raise ValueError(f'--mfu "{options.mfu}": give a share of the peak, as in 40%')
    known = {name.lower(): flops for name, flops in PEAK_BF16_FLOPS.items()}
    if (options.device is None) == (options.peak_tflops is None):
        names = ", ".join(PEAK_BF16_FLOPS)
        raise ValueError(f"--mfu needs a peak: give either --device ({names}) or --peak-tflops")
    if options.device is not None and options.device.lower() not in known:
        names = ", ".join(PEAK_BF16_FLOPS)
        raise ValueError(
            f'--device "{options.device}" is not known: give one of {names}, or --peak-tflops'
        )
    peak = known[options.device.lower()] if options.device else 1e12 * options.peak_tflops
    if not peak > 0:
        raise ValueError(f"--peak-tflops {options.peak_tflops:g}: give the bf16 peak, as in 989")
    seconds = load.flops_per_step / (load.ranks * peak * share)
    origin = (
        f"{load.flops_per_step:.3g} FLOP / ({load.ranks} x {peak / 1e12:g} TFLOP/s x "
        f"{100 * share:g} %) = {format_duration(seconds)}"
    )
    return (seconds,) * load.workers, origin


def _seconds_or(parse: Callable[[str, str], float]) -> Callable[[str, str], float]:
    """Accept a bare number as seconds."""

    def read(word: str, flag: str) -> float:
        try:
            return float(word)
        except ValueError:
            return parse(word, flag)

    return read


def _paper_line(size: str, sync_every: int) -> str:
    return (
        "Paper's model (no embedding, no latency, no coding, any number of workers) of "
        f"{size}, H = {sync_every}; Gbit/s for a utilisation of"
    )


def _table(options: argparse.Namespace, config: Config) -> str:
    from torchtitan_diloco.planner.paper import WIDE_GRID, PaperModel, paper_table
    from torchtitan_diloco.planner.text import format_duration

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

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from torchtitan_diloco.diloco.config import DiLoCoConfig, Fragments, Quantization

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

    def curve(diloco: DiLoCoConfig, bits_per_second: Sequence[float]) -> list[float]:
        slowest = scenario.conditions.links.slowest
        return [scenario.predict(diloco, rate / slowest).utilisation for rate in bits_per_second]

    # Whole powers of ten, from where all curves are near zero to where all have reached their top.
    grid = [10.0**exponent for exponent in range(4, 15)]
    curves = [curve(diloco, grid) for diloco in settings.values()]
    low = [i for i in range(len(grid)) if all(curve[i] <= 0.02 for curve in curves)]
    tops = [next(i for i, y in enumerate(one) if y >= 0.995 * one[-1]) for one in curves]
    rates = np.geomspace(grid[max(low, default=0)], grid[max(tops)], 49)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, diloco in settings.items():
        axes.plot(rates / 1e9, 100 * np.array(curve(diloco, rates.tolist())), label=label)
    axes.set(xscale="log", ylim=(0, 102), title=f"{name}: compute utilisation")
    axes.set(xlabel="bandwidth of a worker, Gbit/s", ylabel="% of the time computing")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)
    plt.close(figure)


def write_variant(path: Path, config_name: str, wanted: Config, comment: str) -> None:
    """Write a TOML that extends a config with what `wanted` sets differently, and read it back."""
    parent, base = find_config(config_name), load_config(config_name)
    name = parent.name
    in_presets = parent.resolve().parent == CONFIGS_FOLDER.resolve()
    if not in_presets or path.name == name or (path.parent / name).exists():
        name = os.path.relpath(parent.resolve(), path.parent.resolve())
    before, after = flat_settings(base), flat_settings(wanted)
    unset = [key for key, value in after.items() if value is None and before[key] is not None]
    if unset:
        raise ValueError(f"{unset[0]} = none cannot be written: remove it from {config_name}")
    lines = [f"# {comment}", f"extends = {format_value(name)}"]
    section = ""
    for key, value in after.items():
        if value != before[key] and key != "run.name":
            new_section, _, leaf = key.rpartition(".")
            if new_section != section:
                section = new_section
                lines += ["", f"[{section}]"]
            lines.append(f"{leaf} = {format_value(value)}")
    with path.open("x", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    loaded, expected = (
        flat_settings(one) | {"run.name": ""} for one in (load_config(str(path)), wanted)
    )
    assert loaded == expected, "the file does not load to the planned settings"


if __name__ == "__main__":
    sys.exit(main())
