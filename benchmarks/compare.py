"""Check what `compare` predicts for two machines against what runs on them then do.

    .venv/bin/python -m benchmarks.compare [--rates 1000,100,13] [--section.key value ...]

The machines are network namespaces (benchmarks/network.py), with one process and thread each, and
links of so many Mbit/s in each direction. For each rate, `compare` runs on both, and right after it
the trainer with each method of its table, a cycle of H steps to begin with and some that are
measured. "Alone" are two runs at the same time that know nothing of each other: the machines share
cores, as they do while `compare` measures their steps. Finished repeats are kept in --out.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks import core
from benchmarks.network import PORT, Network, Program
from benchmarks.slow_link import AT_ONCE, COMMON, parse_rate

MACHINES, SYNC_EVERY, CYCLES = 2, 30, 2
SECONDS = "20s"
"""Of steps that `compare` measures."""
PATIENCE = 1200.0
ALONE, DATA_PARALLEL, TUNED = "alone", "data parallelism", "tuned"
PLAIN = {"diloco.quantization.codec": "fp32"}
METHODS: dict[str, core.Settings] = {
    ALONE: {"diloco.method": "none", "diloco.workers": "1"},
    DATA_PARALLEL: {"diloco.method": "none"},
    "DiLoCo": AT_ONCE | PLAIN | {"diloco.fragments.layers_per_fragment": "0"},
    "streaming, H": PLAIN,
    "streaming, 4 bits": {},
}
"""By the beginning of the name of a row: how it trains. The last row may be tuned further."""
OWN = {
    "diloco.workers": str(MACHINES),
    "diloco.sync_every": str(SYNC_EVERY),
    "diloco.overlap.delay": "1",
    "diloco.quantization.codec": "fp4_e3m0",
}
HEADER = "Mbit/s | method | predicted tokens/s | tokens/s | predicted / measured | n (steps)"


@dataclass(frozen=True)
class Checked:
    rate: float
    method: str
    predicted: float
    measured: float
    steps: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def predictions(printed: str) -> dict[str, float]:
    """Return tokens per second by the name of the row, of the table that `compare` prints."""
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0].removeprefix("* "): float(row[1].replace(",", "")) for row in cells[2:]}


def finish(programs: Sequence[Program]) -> None:
    for program in programs:
        if program.wait(PATIENCE):
            raise SystemExit(f"a program failed:\n{program.printed()[-3000:]}")


def run_compare(network: Network, folder: Path, settings: core.Settings) -> dict[str, float]:
    """Run `compare` on both machines, and return its predictions."""
    words = core.command_line({key: one for key, one in settings.items() if key != "run.folder"})
    endpoint = f"{network.address(0)}:{PORT}"
    programs = []
    for machine in range(MACHINES):
        more = ["--endpoint", endpoint, "--seconds", SECONDS, *["--listen"] * (machine == 0)]
        place = folder / f"machine-{machine}"
        place.mkdir(parents=True)
        more += ["--write", str(place / "best.toml")]
        command = [sys.executable, "-m", "torchtitan_diloco", "compare", *words, *more]
        programs.append(network.launch(machine, command, place / "compare.txt"))
    finish(programs)
    first, second = (predictions(program.printed()) for program in programs)
    assert first == second
    return first


def settings_of(name: str, common: core.Settings) -> core.Settings:
    """Return the settings of the run that a row is about."""
    if name.endswith(ALONE):
        return common | METHODS[ALONE]
    known = [key for key in METHODS if name.startswith(key)]
    own = common | METHODS[known[0]]
    sync_every, _, delay = name.partition(" H ")[2].partition(", tau ")
    if delay:
        own |= {"diloco.sync_every": sync_every, "diloco.overlap.delay": delay}
    return own


def length(settings: core.Settings, rate: float) -> tuple[int, int]:
    """Return the steps to begin with, and those that are measured."""
    if settings["diloco.method"] != "none":
        every = int(settings["diloco.sync_every"])
        return every, CYCLES * every
    slow = settings["diloco.workers"] != "1" and rate < 500
    return (1, 4) if slow else (10, 60)


def run_method(
    network: Network, rate: float, folder: Path, settings: core.Settings
) -> tuple[float, int]:
    """Return the tokens per second of a run, or the mean of two that are alone, and its steps."""
    first, measured = length(settings, rate)
    delay = int(settings["diloco.overlap.delay"])
    own = settings | {
        "training.steps": str(first + measured + delay + 1),
        "metrics.log_every": "1",
    }
    alone = settings["diloco.workers"] == "1"
    programs = []
    for machine in range(MACHINES):
        place = folder / (f"run-{machine}" if alone else "run")
        words = core.command_line(own | {"run.folder": str(place)})
        command = [sys.executable, "-m", "torchtitan_diloco.train", *words]
        single = {"RANK": "0", "WORLD_SIZE": "1"} if alone else {}
        log = folder / f"log-{machine}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        programs.append(network.launch(machine, command, log, **single))
    finish(programs)
    names = [f"run-{machine}" for machine in range(MACHINES)] if alone else ["run"]
    records = [core.read_records(folder / name) for name in names]
    speeds = [tokens_per_second(one, first, measured) for one in records]
    return sum(speeds) / len(speeds), measured


def tokens_per_second(records: Sequence[core.Record], first: int, measured: int) -> float:
    """Return the mean speed of the steps after the first ones. `records`: of every step."""
    window = [one for one in core.steps_of(records) if first < one["step"] <= first + measured]
    walls = [one["worker/wall_seconds"] for one in window if "worker/wall_seconds" in one]
    tokens = window[0]["speed/tokens_per_second"] * walls[0]
    return float(tokens * len(walls) / sum(walls))


def check(rate: float, folder: Path, common: core.Settings) -> core.Record:
    """Return predicted and measured tokens per second of each row."""
    found: core.Record = {}
    with Network(MACHINES, up=rate, down=rate) as network:
        predicted = run_compare(network, folder / "compare", common)
        alone = [name for name in predicted if name.endswith(ALONE)]
        mean = sum(predicted.pop(name) for name in alone) / len(alone)
        for name, speed in {ALONE: mean, **predicted}.items():
            settings = settings_of(name, common)
            place = folder / core.run_folder(Path(), name, settings)
            measured, steps = run_method(network, rate, place, settings)
            found[name] = [speed, measured, steps]
            print(f"{rate:g} Mbit/s, {name}: {speed:,.0f} predicted, {measured:,.0f}", flush=True)
    return found


def rows_of(checks: Sequence[Checked]) -> list[list[str]]:
    cells: dict[tuple[float, str], list[Checked]] = {}
    for one in checks:
        cells.setdefault((one.rate, one.method), []).append(one)
    return [
        [
            f"{rate:g}",
            method,
            core.summary([one.predicted for one in found], ",.0f"),
            core.summary([one.measured for one in found], ",.0f"),
            core.summary([one.ratio for one in found], ".2f"),
            f"{len(found)} ({found[0].steps})",
        ]
        for (rate, method), found in cells.items()
    ]


def checked(rate: float, found: Mapping[str, Sequence[float]]) -> list[Checked]:
    return [
        Checked(rate, name, predicted, measured, int(steps))
        for name, (predicted, measured, steps) in found.items()
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
    checks = list[Checked]()
    for repeat, rate in product(range(options.repeats), options.rates):
        folder = core.run_folder(options.out, f"{rate:g}-{repeat}", common)
        found = core.kept(folder, common, lambda: check(rate, folder, common))  # noqa: B023
        checks += checked(rate, found)
    title = (
        f"{MACHINES} machines, H = {SYNC_EVERY}, 1 thread each, {os.cpu_count()} cores; torch "
        f"{torch.__version__}; median (min ... max) of n times `compare` and a run of so many steps"
    )
    core.print_table(title, HEADER, rows_of(checks))


if __name__ == "__main__":
    main()
