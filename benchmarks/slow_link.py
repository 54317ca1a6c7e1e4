"""Compare data parallelism, DiLoCo and streaming variants over links of several rates.

    .venv/bin/python -m benchmarks.slow_link [--rates inf,1x,0.05x] [--section.key value ...]

Every run starts `torchtitan_diloco.train`, with one process and thread a worker, in a
network of its own (benchmarks/network.py). Only the method and the links differ. --rates limits the
link of each worker in each direction: Mbit/s, `inf` for no limit, or a multiple such as `0.1x` of
the rate at which data parallelism should keep a tenth of its compute, computed from its bytes and
the time of a step without a limit. If torchft is installed (extra `bench`), its DiLoCo
also runs in the same trainer (benchmarks/torchft_loop.py), with the same fragments, tau and alpha.

The command above takes about 15 minutes on 2 idle cores. Finished runs are kept in --out, so that
the same command continues an interrupted table.
"""

import argparse
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks import core, torchft_loop
from benchmarks.network import NoNetworkError
from benchmarks.slow_link_run import (
    DATA_PARALLEL,
    METHODS,
    RESERVED,
    TORCHFT,
    Measured,
    build_settings,
    data_parallel_length,
    measure,
    run_length,
)
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.log import install_command
from torchtitan_diloco.planner.observed import UNLIMITED
from torchtitan_diloco.planner.prediction import predict

GOODPUT = 1448 / 1514
"""Payload of a full packet / its size, as counted by the token bucket."""
HEADER = (
    "Mbit/s | method | tokens/s | utilisation % | not exposed % | predicted % | "
    "exposed ms a step | sent kB a step | peak Mbit/s | n (steps)"
)
LEGEND = """\
utilisation: tokens/s against the fastest method without a limit in the same repeat; exposed: time
of the training thread by its own clock (data parallelism: its step less the reference's); not
exposed: the rest of a step, which does not depend on changes of the machine's speed between runs;
predicted: the same by the planner, from the rate less the headers of packets, the latency and the
speed of coding without a limit, and the steps of the run itself; sent: bytes of one worker by the
counter of its interface; peak: most in half a second, of the worker that sends most. Median (min
... max) of n runs, in each of which so many steps are measured."""


@dataclass
class Table:
    runs: dict[tuple[float, str], list[Measured]] = field(default_factory=dict)
    """Runs by rate in Mbit/s and method, one for each repeat."""

    @property
    def rates(self) -> list[float]:
        return sorted({rate for rate, _ in self.runs}, reverse=True)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for _, method in self.runs))

    def references(self) -> list[float]:
        """Return the tokens/s of the fastest method without a limit in each repeat."""
        repeats = zip(*(self.runs[math.inf, method] for method in self.methods), strict=True)
        return [max(run.tokens_per_second for run in repeat) for repeat in repeats]

    def utilisations(self, rate: float, method: str) -> list[float]:
        """Return tokens/s / reference for each repeat."""
        pairs = zip(self.runs[rate, method], self.references(), strict=True)
        return [run.tokens_per_second / reference for run, reference in pairs]

    def predictions(self, rate: float, method: str, diloco: DiLoCoConfig) -> list[float]:
        """Return the utilisation predicted by the planner, or nothing without our outer loop."""
        found = []
        for free, run in zip(self.runs[math.inf, method], self.runs[rate, method], strict=True):
            if free.observed is not None and run.observed is not None:
                link = replace(
                    free.observed,
                    step_seconds=run.observed.step_seconds,
                    jitter=run.observed.jitter,
                    bits_per_second=min(UNLIMITED, rate * 1e6 * GOODPUT),
                )
                found.append(predict(run.fragments, diloco, link).utilisation)
        return found

    def free_step(self) -> tuple[float, float]:
        """Return the seconds of a step without a limit, and the bytes data parallelism sends in it.

        Both are from the first repeat, so that a continued table has the same rates.
        """
        firsts = [self.runs[math.inf, method][0] for method in self.methods]
        seconds = min(run.seconds_per_step for run in firsts)
        return seconds, self.runs[math.inf, DATA_PARALLEL][0].sent_per_step

    def rate_of(self, text: str) -> float:
        """Return a rate in Mbit/s. Multiples are rounded, as they are part of folder names.

        At 1x, data parallelism spends nine times as long sending as computing.
        """
        if not text.endswith("x"):
            return float(text)
        seconds, sent = self.free_step()
        return float(f"{float(text.removesuffix('x')) * sent * 8e-6 / (9 * seconds):.2g}")

    def expected_seconds(self, rate: float) -> float:
        """Return the expected time of a step of data parallelism."""
        if not self.runs:
            return 0.0
        seconds, sent = self.free_step()
        return seconds + sent * 8e-6 / rate


def measure_table(options: argparse.Namespace, settings: Mapping[str, core.Settings]) -> Table:
    """Measure all methods and rates in each repeat, so that a drift in the speed of the machine
    affects them alike."""
    table = Table()
    for repeat in range(options.repeats):
        for text in dict.fromkeys(["inf", *options.rates]):
            rate = table.rate_of(text)
            for method, own in settings.items():
                length = run_length(options.sync_every, options.delay)
                if method == DATA_PARALLEL:
                    length = data_parallel_length(table.expected_seconds(rate))
                name = "".join(c if c.isalnum() else "-" for c in method)
                run = measure(method, rate, own | length, options.out / f"{name}-{rate:g}-{repeat}")
                table.runs.setdefault((rate, method), []).append(run)
                speed = f"{run.tokens_per_second:,.0f} tokens/s"
                print(f"repeat {repeat}, {rate:.3g} Mbit/s, {method}: {speed}", flush=True)
    return table


# --- printing -------------------------------------------------------------------------------------


def build_row(table: Table, rate: float, method: str, diloco: DiLoCoConfig) -> list[str]:
    runs, utilisations = table.runs[rate, method], table.utilisations(rate, method)
    pairs = list(zip(utilisations, runs, strict=True))
    exposed = [run.exposed_seconds or 0.0 for run in runs]
    if method == DATA_PARALLEL:
        exposed = [max(0.0, 1 - used) * run.seconds_per_step for used, run in pairs]
    waited = [lost / run.seconds_per_step for lost, run in zip(exposed, runs, strict=True)]
    predicted = table.predictions(rate, method, diloco)
    return [
        "no limit" if rate == math.inf else f"{rate:.3g}",
        method,
        core.summary([run.tokens_per_second for run in runs], 0),
        core.summary(utilisations, 1, 100),
        core.summary([1 - share for share in waited], 1, 100),
        core.summary(predicted, 1, 100) if predicted else "-",
        core.summary(exposed, 1, 1e3),
        core.summary([run.sent_per_step for run in runs], 1, 1e-3),
        core.summary([run.peak_mbit for run in runs], 1),
        f"{len(runs)} ({runs[0].steps})",
    ]


def plot(table: Table, title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    rates = [rate for rate in table.rates if rate < math.inf]
    for method in table.methods:
        line = "--" if method == TORCHFT else "-"
        used = [100 * statistics.median(table.utilisations(rate, method)) for rate in rates]
        axes.plot(rates, used, line, marker="o", label=method)
    axes.set(title=title, xlabel="link of each worker, Mbit/s", ylabel="compute utilisation, %")
    axes.set(xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


# --- command line ---------------------------------------------------------------------------------


def parse_rate(text: str) -> str:
    try:
        if float(text.removesuffix("x")) > 0:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text}: a rate is a number of Mbit/s above 0, inf, or a multiple such as 0.1x"
    )


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--workers", type=core.positive, default=2)
    parser.add_argument("--sync-every", type=core.positive, default=100, help="H")
    parser.add_argument("--delay", type=int, default=5, help="tau of the methods with overlap")
    parser.add_argument("--rates", type=core.list_of(parse_rate), default=["inf", "1x", "0.05x"])
    methods_help = f"separated by ';' (default: all): {'; '.join(METHODS)}"
    parser.add_argument("--methods", default="", help=methods_help)
    parser.add_argument("--repeats", type=core.positive, default=1)
    parser.add_argument("--out", type=core.folder, default=Path("outputs/slow-link"))
    parser.add_argument("--plot", type=Path, help="PNG or SVG of utilisation over rate")
    options, words = parser.parse_known_args()
    if options.workers == 1:
        parser.error("--workers 1 sends nothing: give 2 or more")
    if options.sync_every % 2:
        parser.error(f"--sync-every {options.sync_every} is odd: give an even number")
    installed = [name for name in METHODS if name != TORCHFT or torchft_loop.is_installed()]
    if TORCHFT not in installed:
        print(f"torchft is not installed, so it has no rows: {install_command('bench')}")
    asked = core.parse_names(parser, "--methods", options.methods, installed)
    extra = core.parse_settings(parser, words, RESERVED)
    cycle = options.workers, options.sync_every, options.delay
    settings, diloco = {}, {}
    for method in dict.fromkeys([DATA_PARALLEL, *asked]):  # the control is always measured
        settings[method] = build_settings(method, *cycle, extra)
        diloco[method] = core.parse_config(parser, core.command_line(settings[method])).diloco
    try:
        table = measure_table(options, settings)
    except NoNetworkError as error:
        parser.exit(1, f"slow links need network namespaces: {error}\n")

    name = f"{options.workers} workers, H = {options.sync_every}, tau = {options.delay}"
    title = (
        f"{name}, 1 thread a worker, {os.cpu_count()} cores; torch {torch.__version__}; reference "
        f"{core.summary(table.references(), 0)} tokens/s\n\n{LEGEND}"
    )
    keys = [(rate, method) for rate in table.rates for method in table.methods]
    rows = [build_row(table, *key, diloco[key[1]]) for key in keys]
    core.print_table(title, HEADER, rows)
    if options.plot:
        plot(table, name, options.plot)
        print(f"\nplot: {options.plot}")


if __name__ == "__main__":
    main()
