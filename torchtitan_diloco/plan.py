"""Which settings of the outer loop a model needs on given links, before a run is started.

python -m torchtitan_diloco.plan --config 1b --bandwidth 2Gbit --latency 30ms --step-time 0.5
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_diloco.config import Config, from_command_line
from torchtitan_diloco.pictures.files import check_picture_path
from torchtitan_diloco.planner.conditions import Conditions, Links
from torchtitan_diloco.planner.observed import conditions_of_run, probe
from torchtitan_diloco.planner.paper_model import PaperModel, paper_methods
from torchtitan_diloco.planner.paper_table import paper_table, table_like_the_papers
from torchtitan_diloco.planner.step_time import (
    REMEDY,
    one_for_each,
    parse_step_times,
    step_seconds_from_flops,
)
from torchtitan_diloco.planner.units import (
    format_bandwidth,
    format_duration,
    parse_bandwidth,
    parse_byte_rate,
    parse_duration,
    parse_share,
)

if TYPE_CHECKING:
    from torchtitan_diloco.planner.workload import Workload

PAPER_LINE = "Paper's model (no embedding, no latency, no coding, any number of workers)"
EPILOG = f"""\
Any setting of a run can be given as well, such as --diloco.workers 4 or --parallel.fsdp 8 (accelerators of a worker).
Without a step time: {REMEDY}.
How the numbers come about: docs/planning.md."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.plan",
        description="Settings (H, fragments, tau, format) that reach a wanted utilisation with the least risk to the loss.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config", metavar="NAME_OR_PATH", help="a TOML file, or the name of one in train_configs/"
    )
    add(
        "--bandwidth",
        metavar="RATE",
        help="of each worker, such as 2Gbit or 25MB/s; A,B,... one for each worker",
    )
    add(
        "--upload",
        metavar="RATE",
        help="where workers send at another rate than they receive; A,B,... as above",
    )
    add(
        "--latency",
        metavar="TIME",
        default="0s",
        help="one way, half of what ping shows, such as 30ms (default 0)",
    )
    add(
        "--step-time",
        metavar="SECONDS",
        help="compute of one inner step of one worker; A,B,... one for each worker",
    )
    add(
        "--mfu",
        metavar="SHARE",
        help="instead of a step time: share of the peak that training reaches, such as 40%%",
    )
    add("--device", metavar="NAME", help="accelerator whose peak is known, such as H100")
    add(
        "--peak-tflops",
        metavar="N",
        type=float,
        help="bf16 peak of an accelerator, where it is not known",
    )
    add(
        "--jitter",
        metavar="SHARE",
        help="standard deviation of step times, such as 5%% (default 0)",
    )
    add(
        "--coding",
        metavar="RATE",
        help="fp32 bytes a rank encodes or decodes in a second, such as 2GB/s",
    )
    add(
        "--probe",
        action="store_true",
        help="measure links and steps first, by a short run of --config between the real workers",
    )
    add(
        "--run",
        metavar="RUN",
        type=Path,
        help="take links and steps as a finished run has met them: its folder",
    )
    add("--utilisation", metavar="SHARE", default="95%", help="that is wanted (default 95%%)")
    add(
        "--table",
        action="store_true",
        help="print the paper's table: for the paper's models, or with --config for that one",
    )
    add(
        "--plot", metavar="FILE", type=Path, help="draw utilisation over bandwidth, as .png or .svg"
    )
    add(
        "--write",
        metavar="FILE",
        type=Path,
        help="write the recommended settings as a TOML that extends the given one",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options, settings = _parser().parse_known_args(words)
    try:
        _check_flags(settings)
        if options.table and (options.plot or options.write or options.probe or options.run):
            raise ValueError(
                "--table prints a table and plans nothing: leave it out, or leave out --plot, --write, --probe and --run"
            )
        if options.table and options.config is None:
            print(
                f"{PAPER_LINE} of nominal size, H = 100; Gbit/s for a utilisation of\n\n{paper_table()}"
            )
            return 0
        config = _config(options, settings)
        if config is not None:  # None: --print-config, which is answered
            _answer(options, config, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check_flags(settings: Sequence[str]) -> None:
    """What is no setting of a run is a slip in one of the flags here."""
    known = [f"--{name.replace('_', '-')}" for name in vars(_parser().parse_args([]))]
    for word in settings:
        if word.startswith("--") and "." not in word and word != "--print-config":
            nearest = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            raise ValueError(
                f"{word} is unknown: "
                + (f"did you mean {nearest[0]}?" if nearest else "--help lists all flags")
            )


def _config(options: argparse.Namespace, settings: list[str]) -> Config | None:
    if options.config is None:
        raise ValueError(
            "which model? give --config, such as --config 1b, or --table alone for the paper's models"
        )
    return from_command_line(["--config", options.config, *settings])


def _answer(options: argparse.Namespace, config: Config, settings: list[str]) -> None:
    if options.table:
        print(_table(options, config))
        return
    wanted = parse_share(options.utilisation, "--utilisation")
    if not 0 < wanted < 1:
        raise ValueError(
            f'--utilisation "{options.utilisation}" cannot be planned for: give less than 100%, such as 95%'
        )
    workers = config.diloco.workers
    if workers == 1:
        raise ValueError(
            "diloco.workers = 1: nothing goes between workers; give another config, or --diloco.workers 2"
        )
    if options.probe and options.run:
        raise ValueError("--probe and --run both say what was measured: give one of them")
    if not (options.probe or options.run):
        _links(options, workers)  # a mistake in them is told before anything takes long
    coding = None if options.coding is None else parse_byte_rate(options.coding, "--coding")

    # Imported here: they take seconds, which `--help`, `--table` and a mistake in a unit must not.
    from torchtitan_diloco.planner.choice import choose
    from torchtitan_diloco.planner.curves import write_curves
    from torchtitan_diloco.planner.plan_text import plan_text
    from torchtitan_diloco.planner.scenario import Scenario
    from torchtitan_diloco.planner.variant import check_variant_path, write_variant

    if options.plot is not None:
        check_picture_path(options.plot, "--plot")
    if options.write is not None:
        check_variant_path(options.write)
    workload = _workload(config)
    measured = None
    if options.probe:
        measured = probe(["--config", options.config, *settings], config.diloco.overlap.delay)
        if measured is None:
            print("probed; the first node prints the plan")
            return
    elif options.run is not None:
        measured = conditions_of_run(options.run)
    conditions, origin = _conditions(options, workload, measured)
    links = conditions.links
    on_cpu = config.run.device == "cpu"
    scenario = Scenario(workload, conditions, on_cpu=on_cpu, coding_bytes_per_second=coding)
    plan = choose(scenario, config.diloco, wanted)
    print(plan_text(config.run.name, scenario, plan, origin))
    if options.plot is not None:
        write_curves(options.plot, config.run.name, scenario, plan)
        print(f"\nwrote {options.plot}")
    if options.write is not None:
        share = f"{100 * plan.best.prediction.utilisation:.1f} %"
        comment = (
            f"Planned for {format_bandwidth(links.slowest)}, latency {format_duration(links.latency_seconds)} one way, steps "
            f"of {format_duration(max(conditions.step_seconds))}: predicted utilisation {share}"
        )
        write_variant(
            options.write, options.config, replace(config, diloco=plan.best.diloco), comment
        )
        print(f"\nwrote {options.write}: start it with ./run_train.sh --config {options.write}")


def _links(options: argparse.Namespace, workers: int) -> Links:
    if options.bandwidth is None:
        raise ValueError(
            "how fast are the links between workers? give --bandwidth, such as 2Gbit, 200Mbit/s or 25MB/s, or --probe to "
            "measure them, or --run RUN to take those that a run has met"
        )
    down = _rates(options.bandwidth, workers, "--bandwidth")
    up = down if options.upload is None else _rates(options.upload, workers, "--upload")
    return Links(up, down, parse_duration(options.latency, "--latency"))


def _rates(text: str, workers: int, flag: str) -> tuple[float, ...]:
    return one_for_each([parse_bandwidth(word, flag) for word in text.split(",")], workers, flag)


def _workload(config: Config) -> "Workload":
    import torch

    from torchtitan_diloco.components.run_plan import plan_run, vocabulary_rows
    from torchtitan_diloco.data.corpus import open_tokenizer
    from torchtitan_diloco.distributed.world import World
    from torchtitan_diloco.planner.workload import Workload, model_facts

    rows = config.model.vocab_size or vocabulary_rows(
        config.model, open_tokenizer(config.data).vocab_size
    )
    length, workers, ranks = (
        config.training.sequence_length,
        config.diloco.workers,
        max(1, config.parallel.fsdp),
    )
    facts = model_facts(config.model, rows, length)
    world = World(rank=0, size=workers * ranks, workers=workers, device=torch.device("cpu"))
    plan = plan_run(config.training, world, facts.parameters, facts.embedding_parameters)
    return Workload(
        config.model, rows, length, plan.tokens_per_step, plan.total_steps, workers, ranks
    )


def _conditions(
    options: argparse.Namespace, workload: "Workload", measured: Conditions | None
) -> tuple[Conditions, str]:
    """Links and steps as the plan takes them to be, and where the step times come from. What is given goes before what was
    measured."""
    if measured is not None and measured.workers != workload.workers:
        raise ValueError(
            f"--run {options.run}: that run had {measured.workers} workers, and diloco.workers = {workload.workers}: give a "
            "run of as many, or --diloco.workers"
        )
    links = (
        _links(options, workload.workers)
        if measured is None or options.bandwidth is not None
        else measured.links
    )
    jitter = parse_share(options.jitter, "--jitter") if options.jitter is not None else 0.0
    if measured is None or options.step_time is not None or options.mfu is not None:
        step_seconds, origin = _step_times(options, workload)
    else:
        step_seconds, origin = measured.step_seconds, "measured"
        jitter = measured.jitter if options.jitter is None else jitter
    if measured is None:
        return Conditions(links, step_seconds, jitter=jitter), origin
    return replace(measured, links=links, step_seconds=step_seconds, jitter=jitter), origin


def _step_times(options: argparse.Namespace, workload: "Workload") -> tuple[tuple[float, ...], str]:
    """Seconds of every worker, and where they come from."""
    if options.step_time is not None:
        if options.mfu is not None:
            raise ValueError(
                "--step-time and --mfu both say how long a step takes: give one of them"
            )
        return parse_step_times(options.step_time, workload.workers), "given"
    from torchtitan_diloco.utils import PEAK_BF16_FLOPS

    seconds, origin = step_seconds_from_flops(
        workload.flops_per_step,
        workload.ranks,
        options.mfu,
        options.peak_tflops,
        options.device,
        PEAK_BF16_FLOPS,
    )
    return (seconds,) * workload.workers, origin


def _table(options: argparse.Namespace, config: Config) -> str:
    workload = _workload(config)
    step_seconds, origin = _step_times(options, workload)
    from torchtitan_diloco.planner.workload import model_facts

    layers = model_facts(workload.model, workload.vocabulary, workload.sequence_length).layers
    seconds = max(step_seconds)
    name = f"{config.run.name}, {layers} layers, {format_duration(seconds)} a step"
    sync_every = config.diloco.sync_every
    model = PaperModel(name, layers, float(workload.parameters), seconds)
    return (
        f"{PAPER_LINE} of {workload.parameters:,} parameters, H = {sync_every},\n"
        f"steps of {format_duration(seconds)} ({origin}); Gbit/s for a utilisation of\n\n"
        + table_like_the_papers(model, paper_methods(sync_every))
    )


if __name__ == "__main__":
    sys.exit(main())
