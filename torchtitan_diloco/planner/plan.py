"""Find settings of the outer loop for a link by prediction, before or after a run.

.venv/bin/torchtitan-diloco plan --config 1b --bandwidth 2Gbit --latency 30ms --step-time 0.5s
"""

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.user import Parser, UserError, command_line, no_run
from torchtitan_diloco.config import Config, from_command_line, load_config
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, find_config
from torchtitan_diloco.config.schema import Parallel, flat_settings, format_value
from torchtitan_diloco.diloco.config import MOST_STREAMS, STREAM_BYTES

if TYPE_CHECKING:
    from torchtitan_diloco.diloco.config import DiLoCoConfig, Link
    from torchtitan_diloco.planner.prediction import Conditions, Workload

LOCATION = "."
"""Location of islands whose settings have none: only its kind, a folder, changes a plan."""
_BANDWIDTH = re.compile(r"(\d*\.?\d+)\s*([kmgt]?)(bits?|bytes?|b)(?:ps|/s)?", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SECONDS["y"] = 365 * _SECONDS["d"]
_LONGEST = 10_000 * _SECONDS["y"]
_DURATION = re.compile(rf"(\d*\.?\d+)\s*({'|'.join(_SECONDS)})", re.IGNORECASE)
TOO_FAST = "a link too fast to be measured"
"""Description of a link whose transfers were too short to be measured."""
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        if "--failures" in words:
            options, settings = _parse_failures(words)
            _plan_failures(options, _load(options, settings))
            return 0
        options, settings = _parse(words)
        if settings and (options.table or options.presets):
            option = "--table" if options.table else "--presets"
            raise UserError(f"{settings[0]}: {option} takes no settings: remove it")
        if options.table:
            from torchtitan_diloco.planner.paper import SYNC_EVERY, paper_table

            print(f"Gbit/s for a utilization, H = {SYNC_EVERY} (arXiv 2501.18512, Table 4)\n")
            print(paper_table())
            return 0
        if options.presets:
            from torchtitan_diloco.planner.prediction import presets_table

            print(presets_table(options.gpus, options.mfu))
            return 0
        _plan(options, _load(options, settings))
    except (ValueError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _load(options: argparse.Namespace, settings: Sequence[str]) -> Config:
    return from_command_line(["--config", options.config, *settings], location=LOCATION)


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the remaining words, which are settings of a run."""
    parser = Parser(
        prog=command_line("plan"),
        description=(
            "Find settings that reach a utilization on a link, changing one setting at a time."
        ),
        epilog="You can also give settings: --diloco.workers 4. See docs/report-and-plan.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    config_help = "a TOML file, or the name of a preset (that of --run)"
    add("--config", metavar="NAME_OR_PATH", help=config_help)
    add("--bandwidth", type=parse_bandwidth, help="slowest link of a worker: 2Gbit or 25MB/s")
    add("--latency", type=parse_duration, help="one way, half the ping time, as in 30ms")
    add("--step-time", type=parse_duration, help="step time of the slowest worker, as in 0.5s")
    add("--run", type=Path, help="folder of a run that supplies whatever you do not give")
    add(
        "--utilization",
        type=float,
        default=0.95,
        help="share of the speed on an unlimited link to reach (0.95)",
    )
    add("--write", type=Path, help="write the chosen settings as a TOML that extends the config")
    add("--table", action="store_true", help="print the paper's table of bandwidths")
    add("--presets", action="store_true", help="print what each preset needs")
    add("--gpus", type=int, default=8, help="with --presets: GPUs per worker (8)")
    add("--mfu", type=float, default=0.4, help="with --presets: share of the peak (0.4)")
    add("--failures", action="store_true", help="predict what failures cost: --failures --help")
    options, settings = parser.parse_known_args(words)
    _check_unused(options, parser)
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: give a number of at least 1, such as 8")
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu:g}: give a share between 0 and 1, such as 0.4")
    if options.run is not None:
        config = options.run / "config.toml"
        is_there = options.run.is_dir() if options.config else config.is_file()
        if not is_there:
            raise UserError(f"--run {options.run}: {no_run(options.run, config.name)}")
        options.config = options.config or str(config)
    if options.config is None and not (options.table or options.presets):
        raise UserError(
            "give a model with --config, such as 1b, or a run of it with --run; for the paper's "
            "models, give only --table"
        )
    if not 0 < options.utilization < 1:
        raise UserError(
            f"--utilization {options.utilization:g}: give a share between 0 and 1, such as 0.95"
        )
    return options, settings


def _check_unused(options: argparse.Namespace, parser: Parser) -> None:
    """Raise an error for an option that is not used with --table or --presets, or without it."""
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    used = set(vars(options)) - {"gpus", "mfu"}
    mode = ""
    if options.table or options.presets:
        mode = "--table" if options.table else "--presets"
        used = {"table"} if options.table else {"presets", "gpus", "mfu"}
    for name in given:
        if name not in used:
            option = f"--{name.replace('_', '-')}"
            where = f"is not used with {mode}" if mode else "is only used with --presets"
            raise UserError(f"{option} {where}: remove it")


def _parse_failures(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `plan --failures`, and the remaining words, which are settings."""
    prog = f"{command_line('plan')} --failures"
    parser = Parser(
        prog=prog,
        usage=f"{prog} --chips N --mtbf TIME [options]",
        description="Predict the kept time when chips fail, how many islands are enough, and "
        "how often to save a checkpoint. TIME has a unit: s, min, h, d or y.",
        epilog="You can also give settings: --diloco.sync_every 50. See docs/report-and-plan.md.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    time = partial(add, metavar="TIME", type=parse_duration)
    add("--failures", action="store_true", help=argparse.SUPPRESS)
    add("--chips", type=int, metavar="N", help="accelerators of all islands together")
    time("--mtbf", help="mean time between two failures of a chip, as in 3y")
    add("--islands", type=int, nargs="+", metavar="N", default=[2, 4, 8], help="default 2 4 8")
    time("--detect", default=30.0, help="time to detect a failure (30s)")
    time("--restart", default=120.0, help="time to start new processes (2min)")
    time("--rejoin", default=60.0, help="time until these train with the others (1min)")
    time("--save", default=10.0, help="time for which a checkpoint stops training (10s)")
    time("--checkpoint", help="time between two checkpoints (the best)")
    time("--step-time", default=1.0, help="time of an inner step (1s)")
    time("--grace", help="islands.grace_seconds, if not that of the config")
    add("--config", metavar="NAME_OR_PATH", default="1b", help="settings of the islands (1b)")
    add("--plot", type=Path, metavar="FILE", help="draw the lost time, as .svg or .png")
    options, settings = parser.parse_known_args(words)
    if None in (options.chips, options.mtbf):
        raise UserError("give the accelerators and how often one fails: --chips 512 --mtbf 3y")
    return options, settings


def _plan_failures(options: argparse.Namespace, config: Config) -> None:
    """Print what failures cost."""
    from torchtitan_diloco.planner.failures import Fleet, Rules, outlooks, outlooks_text

    diloco = config.diloco
    fleet = Fleet(
        chips=options.chips,
        mtbf=options.mtbf,
        detect=options.detect,
        restart=options.restart,
        rejoin=options.rejoin,
        save=options.save,
    )
    grace = config.islands.grace_seconds if options.grace is None else options.grace
    rules = [
        Rules(
            islands=count,
            sync_every=diloco.sync_every,
            delay=diloco.overlap.delay,
            step_seconds=options.step_time,
            grace_seconds=grace,
        )
        for count in options.islands
    ]
    predicted, chosen = outlooks(fleet, rules, options.checkpoint)
    print(
        f"{fleet.chips:,} chips, MTBF {fleet.mtbf / _SECONDS['y']:.3g} years; H {diloco.sync_every}"
        f", tau {diloco.overlap.delay}, steps of {options.step_time:g} s, grace {grace:g} s\n"
    )
    print(outlooks_text(predicted, chosen))
    if options.plot is not None:
        from torchtitan_diloco.planner.failures_plot import write_plot  # imports matplotlib

        write_plot(options.plot, fleet, rules)
        print(f"\nwrote {options.plot}")


def _workload(config: Config) -> "Workload":
    # These import torch, which --help does not need.
    from torchtitan_diloco.data.tokenizer import build_tokenizer
    from torchtitan_diloco.models import vocabulary_rows
    from torchtitan_diloco.planner.prediction import Workload

    rows = config.model.vocab_size
    if rows is None:
        rows = vocabulary_rows(config.model, build_tokenizer(config.data.tokenizer).vocab_size)
    return Workload.of(config, rows)


def _plan(options: argparse.Namespace, config: Config) -> None:
    """Print the ladder, and write the chosen settings on request."""
    from torchtitan_diloco.models.interface import blocks_of  # imports torch
    from torchtitan_diloco.planner.ladder import climb, ladder_text

    if config.workers == 1:
        key = "islands.local" if config.islands.local else "diloco.workers"
        raise UserError(f"{key} = 1: there are no links; give --{key} 2 or more")
    load = _workload(config)
    conditions = _conditions(options, load.workers)
    conditions = replace(conditions, backward_waits=config.run.device == "cpu")
    tried, best = climb(load, conditions, given=config.diloco, wanted=options.utilization)
    is_limited = conditions.bits_per_second < math.inf
    link = quantity(conditions.bits_per_second, "bit/s") if is_limited else TOO_FAST
    link += f", latency {quantity(conditions.latency_seconds, 's')} one way, steps of "
    link += quantity(max(conditions.step_seconds), "s")
    size = f"{load.plan.parameters:,} parameters, {len(blocks_of(load.model))} layers"
    grid = f"{load.workers} workers x {counted(load.ranks, 'rank')}"
    print(f"{config.run.name}: {size}, {grid}; {link}\n")
    print(ladder_text(load, conditions, tried=tried, best=best, wanted=options.utilization))
    on_gpus = config.run.device != "cpu"
    if on_gpus and options.step_time and (warning := load.peak_warning(options.step_time)):
        print(f"warning: {warning}", file=sys.stderr)
    if is_limited and conditions.bytes_in_flight > STREAM_BYTES:
        print(f"\n{streams_text(conditions, best.link, load.ranks)}")
    print(f"\n{traffic_text(load, best, tried[best].step_seconds)}")
    if options.write is not None:
        comment = f"Utilization of {tried[best].utilization:.1%} predicted for {link}"
        text = variant_text(
            options.write, options.config, config=config, diloco=best, comment=comment
        )
        try:
            options.write.parent.mkdir(parents=True, exist_ok=True)
            with options.write.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UserError(
                f"--write {options.write}: {error.strerror}: give the path of a new file"
            ) from error
        written = shlex.quote(str(options.write))
        print(f"\nwrote {written}: start it with {command_line('train')} --config {written}")


def streams_text(conditions: "Conditions", link: "Link", ranks: int) -> str:
    """Describe the TCP streams to another worker, and the buffers that they need."""
    in_flight = conditions.bytes_in_flight
    streams = ranks * link.streams_of_rank(ranks)
    of_stream = in_flight / streams
    text = (
        f"a link to another worker has {quantity(in_flight, 'B')} in flight, "
        f"{quantity(of_stream, 'B')} in each of {streams} TCP streams (diloco.link.streams)"
    )
    if of_stream <= STREAM_BYTES:
        return f"{text}, as the default buffers of Linux allow"
    needed = math.ceil(in_flight / STREAM_BYTES)
    if needed <= MOST_STREAMS:
        return f"{text}, more than the default buffers of Linux allow: set it to {needed}"
    most = 2 * math.ceil(of_stream)  # half of a buffer is the window
    return (
        f"{text}; on all machines: sysctl net.ipv4.tcp_rmem='4096 131072 {most}' "
        f"net.ipv4.tcp_wmem='4096 16384 {most}'"
    )


def traffic_text(load: "Workload", diloco: "DiLoCoConfig", step_seconds: float) -> str:
    """Describe the traffic with these settings, and say which ones would halve it."""
    from torchtitan_diloco.components.traffic import traffic_table, ways_to_meet
    from torchtitan_diloco.planner.ladder import halvings, halvings_text

    price = load.config.price
    meetings = ways_to_meet(load.traffic(diloco))
    parties = {name: meeting.parties(step_seconds) for name, meeting in meetings.items()}
    fewer = {
        other: load.traffic(other).parties(step_seconds)
        for other in halvings(diloco, load.plan.total_steps)
    }
    return (
        f"traffic at steps of {quantity(step_seconds, 's')}, in GB of 10^9 bytes:\n\n"
        f"{traffic_table(parties, price)}\n\n{halvings_text(diloco, fewer, price)}"
    )


def _conditions(options: argparse.Namespace, workers: int) -> "Conditions":
    """Return the given conditions, and measured ones for those that are not given."""
    from torchtitan_diloco.planner.observed import observed_conditions
    from torchtitan_diloco.planner.prediction import Conditions

    given = {"bits_per_second": options.bandwidth, "latency_seconds": options.latency}
    if options.step_time is not None:
        given |= {"step_seconds": (options.step_time,) * workers, "jitter": 0.0}
    given = {key: value for key, value in given.items() if value is not None}
    if options.run is not None:
        return replace(observed_conditions(options.run, workers), **given)
    if options.bandwidth is None or options.step_time is None:
        raise UserError(
            "give --bandwidth, such as 200Mbit/s, and --step-time, such as 500ms; or "
            "--run with the folder of a finished run"
        )
    return Conditions(**given)


def variant_text(
    path: Path, config_name: str, *, config: Config, diloco: "DiLoCoConfig", comment: str
) -> str:
    """Return a TOML for `path` that extends a config and sets what differs in `config` with this
    `diloco`."""
    wanted = replace(config, diloco=diloco)
    if diloco.method != "none":  # only data parallelism averages gradients in another dtype
        parallel = replace(config.parallel, reduce_dtype=Parallel.reduce_dtype)
        wanted = replace(wanted, parallel=parallel)
    parent = find_config(config_name)
    name = parent.name
    if parent.parent != CONFIGS_FOLDER or (path.parent / name).exists() or path.name == name:
        name = os.path.relpath(parent.resolve(), path.parent.resolve())
    before = flat_settings(load_config(config_name, location=LOCATION))
    lines = [f"# {comment}", f"extends = {format_value(name)}"]
    for key, value in flat_settings(wanted).items():
        if value is None and before[key] is not None:
            raise UserError(f"{key} = none cannot be written: remove it from {config_name}")
        if value != before[key] and key != "run.name":
            lines.append(f"{key} = {format_value(value)}")
    return "\n".join(lines) + "\n"


# --- units ----------------------------------------------------------------------------------------


def parse_bandwidth(text: str) -> float:
    """Return bits per second. A unit is required: `b` or `bit`, `B` or `byte`."""
    if match := _BANDWIDTH.fullmatch(text.strip()):
        number, prefix, kind = match.groups()
        is_bytes = kind == "B" or kind.lower().startswith("byte")
        scale = 1000.0 ** " kmgt".index(prefix.lower() or " ")
        return float(number) * scale * (8 if is_bytes else 1)
    raise argparse.ArgumentTypeError(
        f'"{text}" is not a bandwidth: give 2Gbit, 200Mbit/s or 25MB/s'
    )


def parse_duration(text: str) -> float:
    """Return seconds. A unit is required."""
    if match := _DURATION.fullmatch(text.strip()):
        if (seconds := float(match[1]) * _SECONDS[match[2].lower()]) <= _LONGEST:
            return seconds
        raise argparse.ArgumentTypeError(f'"{text}" is longer than {_LONGEST / _SECONDS["y"]:g}y')
    raise argparse.ArgumentTypeError(
        f'"{text}" is not a time: give a number of at least 0 with a unit, as in 30ms or 0.5s'
    )


def quantity(value: float, unit: str) -> str:
    """Return four digits with a prefix: `2 Gbit/s`, `30 ms`."""
    for prefix, size in _PREFIXES.items():
        if value >= 0.99995 * size:  # four digits would round up
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
