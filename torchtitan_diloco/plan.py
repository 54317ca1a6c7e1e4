"""Find the settings of the outer loop that a model needs on given links, before a run.

python -m torchtitan_diloco.plan --config 1b --bandwidth 2Gbit --latency 30ms --step-time 0.5
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_diloco.components.records import Conditions
from torchtitan_diloco.config import Config, from_command_line, load_config
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, OptionParser, find_config
from torchtitan_diloco.config.schema import flat_settings, format_value
from torchtitan_diloco.planner.paper import PAPER_MODELS, PaperModel, paper_table
from torchtitan_diloco.planner.probe import conditions_of_run, probe
from torchtitan_diloco.planner.units import (
    BANDWIDTHS,
    parse_bandwidth,
    parse_duration,
    parse_share,
    quantity,
)
from torchtitan_diloco.utils import PEAK_BF16_FLOPS

if TYPE_CHECKING:  # imports torch, which --help and --table do not need
    from torchtitan_diloco.planner.prediction import Workload

PEAKS = {name.lower(): flops for name, flops in PEAK_BF16_FLOPS.items()}
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
        options, settings = _parse(arguments)
        if options.table and options.config is None:
            _print_table(PAPER_MODELS, "nominal size", 100)
            return 0
        if options.config is None:
            raise ValueError("give a model: --config 1b, or --table alone for the paper's models")
        words = ["--config", options.config, *settings]
        config = from_command_line(words)
        if config is not None:  # None: --print-config was answered
            _answer(options, config, words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


# --- command line ---------------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the remaining words, which are settings of a run."""
    parser = OptionParser(
        prog="python -m torchtitan_diloco.plan",
        description="Find settings that reach a utilisation with the least risk to the loss.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--config", metavar="NAME_OR_PATH", help="a TOML file, or the name of a preset")
    add("--bandwidth", type=parse_bandwidth, help="slowest link of a worker: 2Gbit or 25MB/s")
    add("--latency", type=parse_duration, help="one way, half of ping, as in 30ms")
    add_step = parser.add_mutually_exclusive_group().add_argument
    add_step("--step-time", type=_durations, help="of one inner step; A,B,... for each worker")
    add_step("--mfu", type=parse_share, help="in place of a step time: share of the peak, as 40%%")
    add_peak = parser.add_mutually_exclusive_group().add_argument
    add_peak("--device", type=str.lower, choices=PEAKS, help="accelerator whose peak is known")
    add_peak("--peak-tflops", type=float, help="bf16 peak of another accelerator")
    add("--jitter", type=parse_share, help="standard deviation of step times, as in 5%%")
    add_run = parser.add_mutually_exclusive_group().add_argument
    add_run("--probe", action="store_true", help="measure links and steps by a short run first")
    add_run("--run", type=Path, help="take links and steps from a finished run")
    add_run("--table", action="store_true", help="print the paper's table, or that of --config")
    add("--utilisation", type=parse_share, default="95%", help="wanted utilisation (95%%)")
    add("--write", type=_new_toml, help="write the recommended settings as a TOML")
    options, settings = parser.parse_known_args(arguments)
    if options.table and options.write:
        raise ValueError("--table plans nothing: leave out --write")
    if not 0 < options.utilisation < 1:
        raise ValueError(f"--utilisation {options.utilisation:.0%}: give a share below 100%")
    return options, settings


def _durations(text: str) -> list[float]:
    return [parse_duration(word, default_unit="s") for word in text.split(",")]


def _new_toml(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".toml":
        raise argparse.ArgumentTypeError(f'"{text}": give a name that ends in .toml')
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f'"{text}": there is no folder {path.parent}; create it')
    if path.exists():
        raise argparse.ArgumentTypeError(f'"{text}" exists already: give another name')
    return path


# --- the answer -----------------------------------------------------------------------------------


def _answer(options: argparse.Namespace, config: Config, words: list[str]) -> None:
    """Print the paper's table for the model, or a plan."""
    from torchtitan_diloco.data.tokenizer import build_tokenizer
    from torchtitan_diloco.models import vocabulary_rows
    from torchtitan_diloco.planner.prediction import Workload
    from torchtitan_diloco.planner.search import choose, plan_text

    rows = config.model.vocab_size
    if rows is None:
        rows = vocabulary_rows(config.model, build_tokenizer(config.data.tokenizer).vocab_size)
    load = Workload.of(config, rows)
    steps, origin = _step_times(options, load)
    if options.table:
        assert steps is not None
        seconds, parameters = quantity(max(steps), "s"), load.plan.parameters
        name = f"{config.run.name}, {load.layers} layers, {seconds} a step"
        model = PaperModel(name, load.layers, parameters, max(steps))
        size = f"{parameters:,} parameters, steps of {seconds} ({origin})"
        _print_table([model], size, config.diloco.sync_every)
        return
    if load.workers == 1:
        raise ValueError("diloco.workers = 1: there are no links; give --diloco.workers 2 or more")
    conditions = _conditions(options, words, config, steps)
    if conditions is None:
        print("probed; the first node prints the plan")
        return
    plan = choose(load, conditions, config.diloco, options.utilisation)
    print(plan_text(config.run.name, load, conditions, plan, origin))
    if options.write is not None:
        comment = (
            f"Planned for {quantity(conditions.bits_per_second, 'bit/s')}, latency "
            f"{quantity(conditions.latency_seconds, 's')} one way, steps of "
            f"{quantity(max(conditions.step_seconds), 's')}: predicted utilisation "
            f"{100 * plan.best.prediction.utilisation:.1f} %"
        )
        planned = replace(config, diloco=plan.best.diloco)
        write_variant(options.write, options.config, planned, comment)
        print(f"\nwrote {options.write}: start it with ./run_train.sh --config {options.write}")


def _print_table(models: Sequence[PaperModel], size: str, sync_every: int) -> None:
    assumed = "no embedding, no latency, no coding, any number of workers"
    print(f"Paper's model ({assumed}) of {size}, H = {sync_every}; Gbit/s for a utilisation of\n")
    print(paper_table(models, sync_every))


def _step_times(
    options: argparse.Namespace, load: "Workload"
) -> tuple[tuple[float, ...] | None, str]:
    """Return the seconds of each worker, or None if they are measured, and their origin."""
    if options.step_time is not None:
        count = len(options.step_time)
        if count not in (1, load.workers):
            raise ValueError(
                f"--step-time lists {count} values: give one, or {load.workers}, one a worker"
            )
        return tuple(options.step_time * (load.workers // count)), "given"
    if options.mfu is None:
        if options.probe or options.run:
            return None, "measured"
        raise ValueError(f"the step time is not known: {REMEDY}")
    peak = PEAKS.get(options.device, 1e12 * (options.peak_tflops or 0.0))
    if not peak * options.mfu > 0:
        raise ValueError(
            "--mfu above 0 needs a peak above 0: give either --device "
            f"({', '.join(PEAK_BF16_FLOPS)}) or --peak-tflops, as in 989"
        )
    seconds = load.flops_per_step / (load.ranks * peak * options.mfu)
    origin = (
        f"{load.flops_per_step:.3g} FLOP / ({load.ranks} x {peak / 1e12:g} TFLOP/s x "
        f"{100 * options.mfu:g} %) = {quantity(seconds, 's')}"
    )
    return (seconds,) * load.workers, origin


def _conditions(
    options: argparse.Namespace, words: list[str], config: Config, steps: tuple[float, ...] | None
) -> Conditions | None:
    """Return the given or else the measured conditions; None on other nodes of a probe."""
    given: dict[str, Any] = {
        "bits_per_second": options.bandwidth,
        "latency_seconds": options.latency,
        "step_seconds": steps,
        "jitter": 0.0 if steps and options.jitter is None else options.jitter,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if options.probe:
        measured = probe(words, config.diloco.overlap.delay)
        return measured and replace(measured, **given)
    if options.run is not None:
        measured = conditions_of_run(options.run)
        if measured.workers != config.diloco.workers:
            raise ValueError(
                f"--run {options.run}: that run had {measured.workers} workers, and "
                f"diloco.workers = {config.diloco.workers}: give a run of as many"
            )
        return replace(measured, **given)
    if options.bandwidth is None:
        raise ValueError(
            f"the links are not known: give --bandwidth, as in {BANDWIDTHS}, or --probe to measure "
            "them, or --run RUN to take those of a finished run"
        )
    return Conditions(**given)


def write_variant(path: Path, config_name: str, wanted: Config, comment: str) -> None:
    """Write a TOML that extends a config and sets what differs in `wanted`."""
    parent = find_config(config_name)
    name = parent.name
    in_presets = parent.resolve().parent == CONFIGS_FOLDER.resolve()
    if not in_presets or path.name == name or (path.parent / name).exists():
        name = os.path.relpath(parent.resolve(), path.parent.resolve())
    before = flat_settings(load_config(config_name))
    lines = [f"# {comment}", f"extends = {format_value(name)}"]
    for key, value in flat_settings(wanted).items():
        if value is None and before[key] is not None:
            raise ValueError(f"{key} = none cannot be written: remove it from {config_name}")
        if value != before[key] and key != "run.name":
            lines.append(f"{key} = {format_value(value)}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as error:
        raise ValueError(f"--write {path}: {error.strerror}: give another path") from error


if __name__ == "__main__":
    sys.exit(main())
