"""Check what `compare` predicts for two machines against what runs on them then do.

    .venv/bin/python -m benchmarks.compare [--rates 1000,100,13] [--section.key value ...]

The machines are network namespaces (benchmarks/network.py), with one process and thread each, and
links of so many Mbit/s in each direction. For each rate, `compare` runs on both, and right after it
the trainer with each method of its table, a cycle of H steps to begin with and some that are
measured. "Alone" are two runs at the same time that know nothing of each other: the machines share
cores, as they do while `compare` measures their steps.

On a machine with other work, steps change their length between the measurement and a run. So each
method is also predicted with the steps of the run itself, and the same link; data parallelism, of
whose steps communication is a part, with those of the run before, which is that of one machine.
Finished repeats are kept in --out.
"""

import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

from benchmarks import core
from benchmarks.network import PORT, Network, Program
from benchmarks.slow_link import AT_ONCE, COMMON, parse_rate
from torchtitan_diloco.launching.preflight import vocabulary_rows_of
from torchtitan_diloco.planner.plan import parse_bandwidth, parse_duration
from torchtitan_diloco.planner.prediction import Conditions, Workload

MACHINES = 2
SYNC_EVERY = 30
CYCLES = 2
SECONDS = "20s"
"""For which `compare` measures steps at least, after as long to warm up."""
PATIENCE = 1200.0
ALONE = "alone"
PLAIN = {"diloco.quantization.codec": "fp32"}
METHODS: dict[str, core.Settings] = {
    ALONE: {"diloco.method": "none", "diloco.workers": "1"},
    "data parallelism": {"diloco.method": "none"},
    "DiLoCo": AT_ONCE | PLAIN | {"diloco.fragments.layers_per_fragment": "0"},
    "streaming, H": PLAIN,
    "streaming, 4 bits": {},
}
"""How a row of the table trains, by the beginning of its name."""
OWN = {
    "diloco.workers": str(MACHINES),
    "diloco.sync_every": str(SYNC_EVERY),
    "diloco.overlap.delay": "1",
    "diloco.quantization.codec": "fp4_e3m0",
    "metrics.log_every": "1",  # as the run is timed
}
RATE = r"(\S+ \S+bit/s)"
LINK = re.compile(
    rf"^link: round trip (\S+ \S+); {RATE} with 1 TCP stream.*; {RATE} in an all-reduce", re.M
)
HEADER = (
    "Mbit/s | method | compare, tokens/s | run, tokens/s | compare / run | with its steps / run"
    " | n (steps)"
)


@dataclass(frozen=True)
class Checked:
    """A row of the table of `compare`, and a run of it."""

    predicted: float
    """Tokens per second."""
    measured: float
    """Tokens per second."""
    again: float
    """Predicted with the steps of the run."""
    steps: int


def predictions(printed: str) -> dict[str, float]:
    """Return tokens per second by the name of the row, of the table that `compare` prints.

    Of a range, this is the mean of both ends.
    """
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    speeds = {}
    for name, speed, *_ in rows[2:]:
        ends = [float(end) for end in speed.replace(",", "").split(" ... ")]
        speeds[name.strip().removeprefix("* ")] = statistics.fmean(ends)
    return speeds


def link_of(printed: str) -> Conditions:
    """Return the conditions of the link, with steps of any length."""
    link = LINK.search(printed)
    assert link is not None, printed
    return Conditions(
        parse_bandwidth(link[2]),
        (1.0,) * MACHINES,
        latency_seconds=parse_duration(link[1]) / 2,
        backward_waits=True,
        all_reduce_bits_per_second=parse_bandwidth(link[3]),
    )


def finish(programs: Sequence[Program]) -> None:
    for program in programs:
        if program.wait(PATIENCE):
            raise SystemExit(f"a program failed:\n{program.printed()[-3000:]}")


def run_compare(network: Network, folder: Path, settings: core.Settings) -> str:
    """Run `compare` on both machines, and return what the first one prints."""
    words = core.command_line(settings)
    programs = list[Program]()
    for machine in range(MACHINES):
        place = folder / f"machine-{machine}"
        place.mkdir(parents=True)
        link_words = ["--endpoint", f"{network.address(0)}:{PORT}", "--seconds", SECONDS]
        link_words += ["--write", str(place / "best.toml"), *["--listen"] * (machine == 0)]
        command = [sys.executable, "-m", "torchtitan_diloco", "compare", *words, *link_words]
        programs.append(network.launch(machine, command, place / "compare.txt"))
    finish(programs)
    return programs[0].printed()


def settings_of(name: str, common: core.Settings) -> core.Settings:
    """Return the settings of the run that a row is about."""
    if name.endswith(ALONE):
        return common | METHODS[ALONE]
    settings = common | next(METHODS[begin] for begin in METHODS if name.startswith(begin))
    tuned = re.search(r" H (\d+), tau (\d+)", name)
    if tuned is not None:
        settings |= {"diloco.sync_every": tuned[1], "diloco.overlap.delay": tuned[2]}
    return settings


def length(settings: core.Settings, rate: float) -> tuple[int, int]:
    """Return the steps to begin with, and those that are measured."""
    if settings["diloco.method"] != "none":
        every = int(settings["diloco.sync_every"])
        return every, CYCLES * every
    is_slow = settings["diloco.workers"] != "1" and rate < 500
    return (1, 4) if is_slow else (10, 60)


Steps = Sequence[core.Record]
"""Records of steps of a worker."""


def run_method(network: Network, rate: float, folder: Path, settings: core.Settings) -> list[Steps]:
    """Return the measured steps of both workers, or of two that are alone."""
    first, measured = length(settings, rate)
    total = first + measured + int(settings["diloco.overlap.delay"]) + 1
    timed = settings | {"training.steps": str(total)}
    folder.mkdir(parents=True, exist_ok=True)
    alone = settings["diloco.workers"] == "1"
    programs = list[Program]()
    places = list[Path]()
    for machine in range(MACHINES):
        places.append(folder / (f"run-{machine}" if alone else "run"))
        words = core.command_line(timed | {"run.folder": str(places[-1])})
        command = [sys.executable, "-m", "torchtitan_diloco.train", *words]
        variables = {"RANK": "0", "WORLD_SIZE": "1"} if alone else {}
        log = folder / f"log-{machine}.txt"
        programs.append(network.launch(machine, command, log, **variables))
    finish(programs)
    records = [
        core.read_records(place, 0 if alone else worker) for worker, place in enumerate(places)
    ]
    return [
        [step for step in core.steps_of(timed) if first < step["step"] <= first + measured]
        for timed in records
    ]


def mean(steps: Steps, name: str) -> float:
    """Return the mean of a counter of each step."""
    return statistics.fmean(record[name] for record in steps if name in record)


def alone_seconds(record: core.Record) -> float:
    """Return what a step has taken without communication, as `compare` measures steps."""
    exposed: float = record.get("worker/exposed_seconds", 0.0)
    wall: float = record["worker/wall_seconds"]
    return wall - exposed


def predict_again(settings: core.Settings, link: Conditions, before: Sequence[Steps]) -> float:
    """Predict the tokens per second of a run with these steps. `before`: of each worker."""
    config = core.load(settings)
    load = Workload.of(config, vocabulary_rows_of(config))
    timed = [[alone_seconds(of_worker) for of_worker in steps] for steps in before]
    seconds = tuple(map(statistics.fmean, timed))
    deviations = list(map(statistics.pstdev, timed))
    if load.workers == 1:
        return statistics.fmean(load.plan.tokens_per_step / duration for duration in seconds)
    jitter = min(1.0, statistics.fmean(deviations) / statistics.fmean(seconds))
    conditions = replace(link, step_seconds=seconds, jitter=jitter)
    return load.plan.tokens_per_step / load.predict(config.diloco, conditions).step_seconds


def check(rate: float, folder: Path, common: core.Settings) -> core.Record:
    """Compare two machines, and run what the table has. Return `Checked` by row."""
    checked = dict[str, Checked]()
    before = list[Steps]()
    with Network(MACHINES, up=rate, down=rate) as network:
        printed = run_compare(network, folder / "compare", common)
        predicted = predictions(printed)
        link = link_of(printed)
        speeds = [predicted.pop(name) for name in [*predicted] if name.endswith(ALONE)]
        for name, speed in {ALONE: statistics.fmean(speeds), **predicted}.items():
            settings = settings_of(name, common)
            place = core.run_folder(folder, name, settings)
            steps = run_method(network, rate, place, settings)
            training = core.load(settings).training
            tokens = training.batch_size * training.sequence_length
            tokens *= 1 if name == ALONE else MACHINES
            walls = [mean(of_worker, "worker/wall_seconds") for of_worker in steps]
            measured = statistics.fmean(tokens / wall for wall in walls)
            if settings["diloco.method"] != "none" or name == ALONE:
                before = steps
            again = predict_again(settings, link, before)
            checked[name] = Checked(speed, measured, again, len(steps[0]))
            print(f"{rate:g} Mbit/s, {name}: {speed:,.0f}, then {measured:,.0f}", flush=True)
    return {name: asdict(check) for name, check in checked.items()}


def rows_of(checks: dict[tuple[float, str], list[Checked]]) -> list[list[str]]:
    return [
        [
            f"{rate:g}",
            method,
            core.summary([checked.predicted for checked in repeats], ",.0f"),
            core.summary([checked.measured for checked in repeats], ",.0f"),
            core.summary([checked.predicted / checked.measured for checked in repeats], ".2f"),
            core.summary([checked.again / checked.measured for checked in repeats], ".2f"),
            f"{len(repeats)} ({repeats[0].steps})",
        ]
        for (rate, method), repeats in checks.items()
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rates", type=core.list_of(parse_rate), default=[1000.0, 100.0, 13.0])
    parser.add_argument("--repeats", type=core.positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"))
    options, words = parser.parse_known_args()
    extra = core.parse_settings(parser, words, {"run.folder", "training.steps", *OWN})
    common = COMMON | {"diloco.method": "streaming"} | OWN | extra
    core.load(common)
    checks = dict[tuple[float, str], list[Checked]]()
    for repeat, rate in product(range(options.repeats), options.rates):
        folder = core.run_folder(options.out, f"{rate:g}-{repeat}", common)

        def measure(rate: float = rate, folder: Path = folder) -> core.Record:
            return check(rate, folder, common)

        for name, fields in core.kept(folder, common, measure).items():
            checks.setdefault((rate, name), []).append(Checked(**fields))
    title = (
        f"{MACHINES} machines, H = {SYNC_EVERY}, 1 thread each, {os.cpu_count()} cores; torch "
        f"{torch.__version__}; median (min ... max) of n times `compare` and a run of so many steps"
    )
    core.print_table(title, HEADER, rows_of(checks))


if __name__ == "__main__":
    main()
