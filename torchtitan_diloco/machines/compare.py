"""Measure two machines and their link, and compare what training on both gains over one.

node0$ .venv/bin/torchtitan-diloco compare --config 100m --endpoint node0:29500 --listen
node1$ .venv/bin/torchtitan-diloco compare --config 100m --endpoint node0:29500
one$   .venv/bin/torchtitan-diloco compare --config 100m --bandwidth 1Gbit
"""

import argparse
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from torchtitan_diloco.base.formatting import brief, counted
from torchtitan_diloco.base.hardware import (
    GLOO_INTERFACE,
    crowded,
    interfaces,
    is_loopback,
    release_of,
)
from torchtitan_diloco.base.reach import split_address
from torchtitan_diloco.base.user import PACKAGE, USER_ERROR, Parser, UserError, command_line
from torchtitan_diloco.config import Config, from_command_line
from torchtitan_diloco.machines.trial import (
    Step,
    StepTimes,
    Trial,
    doubts_about,
    has_enough_steps,
    warm,
)
from torchtitan_diloco.planner.plan import parse_bandwidth, parse_duration, quantity, variant_text

if TYPE_CHECKING:
    from torchtitan_diloco.machines.comparison import Row
    from torchtitan_diloco.machines.pair import Pair
    from torchtitan_diloco.planner.prediction import Conditions, Workload

MACHINES = 2
MARK = "# Written by `compare`: "
"""First words of the files that this command writes, and may overwrite."""
SAY_SECONDS = 10.0
"""Seconds between two lines about the progress of the steps."""


class Machine(msgspec.Struct):
    """Name and facts that each machine sends to the other before the measurement."""

    name: str
    facts: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options, settings = _parse(words)
        training = ["--config", options.config, "--diloco.workers", str(MACHINES), *settings]
        _compare(options, from_command_line(training), training)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        say("stopped")
        return 130
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the remaining words, which are settings of a run."""
    parser = Parser(
        prog=command_line("compare"),
        usage=f"{command_line('compare')} --config 100m (--endpoint HOST:PORT [--listen] | "
        "--bandwidth 1Gbit) [options]",
        description="Measure a training step on each of two machines, and the link between them, "
        "and print what data parallelism, DiLoCo and streaming would gain over one machine. Start "
        "it on both, with --listen on the one that has the address.",
        epilog="You can also give settings, the same on both: --training.batch_size 4. See "
        "docs/two-machines.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="NAME_OR_PATH", help="a TOML file, or the name of a preset")
    add("--endpoint", metavar="HOST:PORT", help="where the first machine listens")
    add("--listen", action="store_true", help="this is the first machine")
    add(
        "--bandwidth",
        type=parse_bandwidth,
        help="rate of the link, if there is no second machine, such as 1Gbit",
    )
    add(
        "--latency",
        type=parse_duration,
        help="with --bandwidth: latency one way, such as 0.1ms (0)",
    )
    add(
        "--seconds",
        type=parse_duration,
        default=15.0,
        help="how long to measure steps, after as long to warm up; while they vary, both take up "
        "to twice as long (15s)",
    )
    add(
        "--wait",
        type=parse_duration,
        default=300.0,
        help="how long to wait for the other machine (5min)",
    )
    add("--write", type=Path, help="TOML to write (outputs/CONFIG-two-machines.toml)")
    options, settings = parser.parse_known_args(words)
    _check_options(options)
    if options.write is None:
        options.write = Path("outputs", f"{Path(options.config).stem}-two-machines.toml")
    return options, settings


def _check_options(options: argparse.Namespace) -> None:
    """Raise a UserError for options that are missing or contradict each other."""
    if options.config is None:
        raise UserError("give a model with --config, such as 100m")
    if options.seconds == 0:
        raise UserError("--seconds 0s: give a time above 0, such as 15s")
    if options.endpoint is None and options.bandwidth is None:
        raise UserError(
            "give --endpoint HOST:PORT on both machines, or --bandwidth, such as "
            "1Gbit, on one machine"
        )
    if options.endpoint is not None and options.bandwidth is not None:
        raise UserError(
            f"--bandwidth: with --endpoint {options.endpoint}, the link is "
            "measured: remove one of the two"
        )
    if options.bandwidth is None and options.latency is not None:
        raise UserError("--latency: with --endpoint, it is measured: remove it")
    if options.bandwidth is not None and (options.listen or not options.bandwidth > 0):
        problem = "--bandwidth must be above 0"
        if options.listen:
            problem = "--listen is only used with --endpoint"
        raise UserError(f"{problem}: give --bandwidth, such as 1Gbit, without --listen")
    if options.endpoint is not None:
        split_address(options.endpoint)


def _compare(options: argparse.Namespace, config: Config, training: list[str]) -> None:
    from torchtitan_diloco.components.run_plan import (  # imports torch
        check_host_memory,
        state_on_host,
    )
    from torchtitan_diloco.launching.launch import processes_of_node
    from torchtitan_diloco.launching.preflight import vocabulary_rows_of
    from torchtitan_diloco.machines.pair import meet
    from torchtitan_diloco.planner.prediction import Workload

    _check(config, options.write)
    processes = processes_of_node(config, MACHINES)
    rows = vocabulary_rows_of(config)
    load = Workload.of(replace(config, parallel=replace(config.parallel, fsdp=processes)), rows)
    if not _on_gpu(config):
        streaming = replace(config.diloco, method="streaming")
        saves = config.checkpoint.is_used
        check_host_memory(load.plan, state_on_host(load.plan, streaming, saves=saves))
    say(
        f"{config.run.name}: {load.plan.parameters:,} parameters, "
        f"{counted(processes, 'process', 'processes')} on this machine; starting "
        "the trainer and training for a few steps takes about a minute, and longer "
        "for large models"
    )
    rank = 0 if options.listen or options.bandwidth is not None else 1
    pair = None
    if options.endpoint:
        pair = meet(options.endpoint, rank=rank, patience=options.wait, say=say)
    with pair or nullcontext():
        names = _agree(pair, config, options, processes)
        is_local = options.endpoint and is_loopback(split_address(options.endpoint)[0])
        with Trial(
            training,
            config,
            workers=MACHINES,
            processes=processes,
            trials=MACHINES if is_local else 1,
            vocabulary=rows,
        ) as trial:
            times = _measure_steps(trial, pair, options.seconds, config)
        link = _measured_link(pair, config, load) if pair else _given_link(options)
    _answer(options, config, load, machines=(names, times), link=link, rank=rank)


def _check(config: Config, write: Path) -> None:
    """Raise an error for settings that do not suit two machines, or if --write names another
    file."""
    if config.islands.join or config.islands.local:
        raise UserError("compare is for the workers of one job: remove the settings of islands")
    if config.diloco.workers != MACHINES:
        raise UserError(
            f"diloco.workers = {config.diloco.workers}: compare is for {MACHINES} "
            "machines with one worker each: remove it"
        )
    try:
        write.parent.mkdir(parents=True, exist_ok=True)
        may_write = not write.exists() or write.read_bytes().startswith(MARK.encode())
    except OSError as error:
        raise UserError(
            f"--write {write}: {error.strerror}: give the path of a new file"
        ) from error
    if not may_write:
        raise UserError(f"--write {write}: another file exists there: give the path of a new file")


def _on_gpu(config: Config) -> bool:
    import torch

    return config.run.device != "cpu" and torch.cuda.is_available()


def _agree(
    pair: "Pair | None", config: Config, options: argparse.Namespace, processes: int
) -> list[str]:
    """Return the names of the machines, after checking that their code and settings are the
    same."""
    if pair is None:
        return ["this machine"]
    import torch

    from torchtitan_diloco.components.common_facts import common_settings
    from torchtitan_diloco.diloco.agreement import code_fingerprint, find_differences

    facts = common_settings(config) | {
        "code (install the same commit on both)": code_fingerprint(PACKAGE),
        "torch": release_of(torch.__version__),
        "device": "cuda" if _on_gpu(config) else "cpu",
        "processes (NPROC, CUDA_VISIBLE_DEVICES)": str(processes),
        "name of --write": options.write.stem,
    }
    machines = pair.exchange(Machine(socket.gethostname(), facts))
    say(f"connected to {machines[1 - pair.rank].name}")
    numbered = {f"on machine {rank}": machine.facts for rank, machine in enumerate(machines)}
    if differences := find_differences(numbered):
        raise UserError(f"the two machines differ: {'; '.join(differences)}; use the same on both")
    names = [machine.name for machine in machines]
    return names if names[0] != names[1] else [f"machine {rank}" for rank in range(MACHINES)]


# --- measuring ------------------------------------------------------------------------------------


def _measure_steps(
    trial: Trial, pair: "Pair | None", seconds: float, config: Config
) -> list[StepTimes]:
    """Measure the steps of this machine while the other one, if any, also trains."""
    compiles = ", which compiles the model" if config.compile.enable else ""
    say(f"starting the trainer{compiles}")

    def look(steps: list[Step]) -> None:
        if pair is not None:
            pair.check()
        report(steps)

    report = _progress_report(seconds)
    trial.wait_for_steps(since=0.0, is_enough=bool, meanwhile=look)  # its first steps
    if pair is not None:
        say(f"this machine is ready; waiting for {pair.other}")
        pair.exchange("ready", trial.check)
    begun = time.time()
    is_enough = partial(has_enough_steps, seconds=seconds)
    trial.wait_for_steps(since=begun, is_enough=is_enough, meanwhile=look)
    if pair is not None:
        pair.exchange("measured", trial.check)  # it trains until the other has measured, too
    own_times = _step_times(warm(trial.steps(begun)), trial.threads, config)
    say(f"measured {counted(own_times.count, 'step')} of {brief(own_times.mean_seconds)}")
    return [own_times] if pair is None else pair.exchange(own_times)


def _progress_report(seconds: float) -> Callable[[list[Step]], None]:
    """Return a function that reports the progress of the measurement from time to time."""
    told_at = time.monotonic()

    def report(steps: list[Step]) -> None:
        nonlocal told_at
        if time.monotonic() > told_at + SAY_SECONDS:
            told_at = time.monotonic()
            last = f"the last of {brief(steps[-1].seconds)}, " if steps else ""
            seconds_so_far = sum(step.seconds for step in steps)
            progress = f"{seconds_so_far:.0f} of {2 * seconds:.0f} s"
            say(f"{counted(len(steps), 'step')} so far, {last}{progress}")

    return report


def _step_times(steps: Sequence[Step], threads: int, config: Config) -> StepTimes:
    import torch

    from torchtitan_diloco.base.hardware import describe_device

    device = torch.device("cuda" if _on_gpu(config) else "cpu")
    crowding = crowded(threads) if device.type == "cpu" else ""
    return StepTimes.of(steps, device=describe_device(device), crowded=crowding)


class LinkSpeeds(msgspec.Struct):
    bits_per_second: float
    latency_seconds: float
    description: str
    all_reduce_bits_per_second: float = math.inf
    interface: str = ""
    """Network interface that leads to the other machine, if gloo would choose another one."""


def _given_link(options: argparse.Namespace) -> LinkSpeeds:
    latency = options.latency or 0.0
    rate = quantity(options.bandwidth, "bit/s")
    text = f"{rate}, latency {quantity(latency, 's')} one way, as given"
    return LinkSpeeds(options.bandwidth, latency_seconds=latency, description=text)


def _measured_link(pair: "Pair", config: Config, load: "Workload") -> LinkSpeeds:
    from torchtitan_diloco.machines.pair import measure_all_reduce, measure_link, slower
    from torchtitan_diloco.models.parallelize import DTYPES

    # As many as a run has. On one machine it has one for each rank.
    is_one_machine = is_loopback(pair.addresses[0])
    used = load.ranks * (1 if is_one_machine else config.diloco.link.streams_of_rank(load.ranks))
    counts = sorted({1, used})
    directions = measure_link(pair, counts, say)
    round_trip = min(direction.round_trip for direction in directions)
    interface = "" if config.diloco.link.interface else _other_interface(pair.addresses[0])
    size = max(load.buckets())
    rate = slower(directions, used)
    all_reduce = measure_all_reduce(
        pair,
        parameters=size,
        dtype=DTYPES[config.parallel.reduce_dtype],
        bits_per_second=rate,
        interface=interface or config.diloco.link.interface,
        say=say,
    )
    rates = (
        f"{quantity(slower(directions, count), 'bit/s')} with {counted(count, 'TCP stream')}"
        for count in counts
    )
    text = (
        f"round trip {quantity(round_trip, 's')}; {', '.join(rates)} in the "
        f"slower direction; {quantity(all_reduce, 'bit/s')} in an all-reduce"
    )
    return LinkSpeeds(
        rate,
        latency_seconds=round_trip / 2,
        description=text,
        all_reduce_bits_per_second=all_reduce,
        interface=interface,
    )


# --- the answer -----------------------------------------------------------------------------------


def _answer(
    options: argparse.Namespace,
    config: Config,
    load: "Workload",
    *,
    machines: tuple[list[str], list[StepTimes]],
    link: LinkSpeeds,
    rank: int,
) -> None:
    """Print the comparison, write the settings of its best row, and print how to start them."""
    from torchtitan_diloco.machines.comparison import best_of, compare, table, verdict

    names, times = machines
    times_of_both = times * MACHINES if len(times) == 1 else times  # another one like it
    conditions = _conditions(times_of_both, link, config)
    rows = compare(
        load,
        conditions,
        given=config.diloco,
        names=names,
        ranges=[steps.ends for steps in times_of_both],
    )
    doubts = list(doubts_about(names, times))
    best = None if doubts else best_of(rows)
    plan = load.plan
    training = config.training
    sequences = plan.tokens_per_step // training.sequence_length
    print(
        f"\n{config.run.name}: {plan.parameters:,} parameters, {plan.total_steps:,} steps of "
        f"{counted(sequences, 'sequence')} x {counted(training.sequence_length, 'token')}, half of "
        "them on each machine"
    )
    for name, steps in zip(names, times, strict=True):
        step_text = f"a step in {brief(steps.mean_seconds)} +- {brief(steps.deviation)}"
        if not steps.is_steady:
            least, most = map(brief, steps.ends)
            share = f"1/{len(steps.block_seconds)}"
            step_text += f", {least} to {most} on average over {share} of the time"
        print(f"{name}: {steps.device}; {step_text} ({counted(steps.count, 'step')})")
    print(f"link: {link.description}\n\n{table(load, rows, best)}\n")
    print("GB up: each of two machines sends so much, and receives as much from the other\n")
    if best is None:
        print("no row is recommended, and no settings are written, as these speeds may be wrong:")
        print("\n".join(f"- {doubt}" for doubt in doubts))
        return
    print(verdict(rows, best))
    former = _write(options, config, best, link)
    note = f"; what it said before is in {shlex.quote(str(former))}" if former else ""
    how = _how_to_start(options, best, link=link, rank=rank)
    written = shlex.quote(str(options.write))
    print(f"\nwrote {written}, with the settings of the row with *{note}\n{how}")


def _conditions(times: Sequence[StepTimes], link: LinkSpeeds, config: Config) -> "Conditions":
    from torchtitan_diloco.planner.prediction import Conditions

    on_gpu = _on_gpu(config)
    shares = [steps.deviation / steps.mean_seconds for steps in times]
    return Conditions(
        link.bits_per_second,
        tuple(steps.mean_seconds for steps in times),
        latency_seconds=link.latency_seconds,
        jitter=min(1.0, math.fsum(shares) / len(shares)),
        backward_waits=not on_gpu,
        # NCCL, which a GPU has for it, is not measured.
        all_reduce_bits_per_second=math.inf if on_gpu else link.all_reduce_bits_per_second,
    )


def _write(
    options: argparse.Namespace, config: Config, best: "Row", link: LinkSpeeds
) -> Path | None:
    """Write the settings of the best row. Return where their file is kept if it had others."""
    path: Path = options.write
    comment = f"{MARK.removeprefix('# ')}{best.name}; {link.description}"
    text = variant_text(path, options.config, config=config, diloco=best.diloco, comment=comment)
    former = None
    try:
        if path.exists() and (before := path.read_text(encoding="utf-8")) != text:
            former = path.with_suffix(".before.toml")
            former.write_text(before, encoding="utf-8")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}: give the path of a new file") from error
    return former


def _how_to_start(options: argparse.Namespace, best: "Row", link: LinkSpeeds, rank: int) -> str:
    """Return the command that starts the run on this machine."""
    start = f"{command_line('train')} --config {shlex.quote(str(options.write))}"
    start += f" --run.folder runs/{shlex.quote(options.write.stem)}"
    if threads := os.environ.get("OMP_NUM_THREADS"):  # with which the steps were measured
        start = f"OMP_NUM_THREADS={threads} {start}"
    if best.machine is not None:
        return f"to start the run, on the machine of that row:\n  {start}"
    nodes = f"NNODES={MACHINES} NODE_RANK={rank} RDZV_ENDPOINT={options.endpoint or 'NODE0:29500'}"
    if options.endpoint is None:
        return (
            "to start the run, on both machines, with NODE_RANK=1 on the second:\n "
            f" {nodes} {start}"
        )
    if link.interface:
        nodes += f" {GLOO_INTERFACE}={link.interface}"
    return f"to start the run, on this machine:\n  {nodes} {start}"


def _other_interface(address: str) -> str:
    """Return the network interface that has this address, if gloo would choose another one."""
    from torchtitan_diloco.distributed.world import interface_and_address

    interface = ""
    for name, interface_address in interfaces().items():
        if interface_address == address:
            interface = name
            break
    try:
        chosen = interface_and_address("")[0]
    except OSError:
        chosen = ""
    is_given = bool(os.environ.get(GLOO_INTERFACE))
    return "" if is_given or interface == chosen else interface
