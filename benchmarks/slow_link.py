"""Compare data parallelism, DiLoCo and streaming variants over links of several rates.

    .venv/bin/python -m benchmarks.slow_link [--rates inf,130,13] [--section.key value ...]

Every run starts `torchtitan_diloco.train`, with one process and thread a worker, in a network of
its own (benchmarks/network.py). Only the method and the links differ. --rates limits the link of
each worker in each direction, in Mbit/s; `inf` is no limit. If torchft is installed (extra
`bench`), its DiLoCo also runs in the same trainer, with the same fragments, tau and alpha.

The command above takes about 15 minutes on 2 idle cores. Finished runs are kept in --out, so that
the same command continues an interrupted table.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path

import torch

from benchmarks import core, torchft_loop
from benchmarks.network import Network, NoNetworkError
from torchtitan_diloco.distributed.collectives import STEPS_APART
from torchtitan_diloco.log import install_command

MODEL = {
    "model.activation": "gelu",
    "model.layers": "6",
    "model.width": "256",
    "model.heads": "4",
    "model.head_dim": "64",
    "model.feed_forward": "1024",
    "training.sequence_length": "128",
    "training.batch_size": "2",
    "validation.every": "0",
    "checkpoint.at_end": "false",
    "checkpoint.every_minutes": "0",
    "metrics.tensorboard": "false",
    "run.device": "cpu",
    "diloco.fragments.layers_per_fragment": "2",
    "diloco.overlap.mixing": "0.5",
    "diloco.quantization.codec": "fp32",
    "diloco.link.timeout_seconds": "3600",
    "distributed.train_timeout_seconds": "3600",
}
"""4.8M parameters in 3 fragments of 2 blocks and a small one. A step takes 0.1 s on one core."""
DATA_PARALLEL, TORCHFT, OURS = "data parallel", "torchft", "streaming + overlap + fp4"
AT_ONCE = {"diloco.overlap.delay": "0", "diloco.overlap.mixing": "0"}
METHODS: dict[str, core.Settings] = {
    DATA_PARALLEL: {"diloco.method": "none"},
    "DiLoCo": AT_ONCE | {"diloco.fragments.layers_per_fragment": "0"},
    "streaming": AT_ONCE,
    "streaming + overlap": {},
    OURS: {"diloco.quantization.codec": "fp4_e3m0"},
    TORCHFT: {},
}
RESERVED = {"run.folder", "training.steps", "metrics.log_every", "diloco.workers"} | {
    key for method in METHODS.values() for key in method
}
"""Settings that the benchmark sets itself."""
LATE = STEPS_APART + 1
"""Steps until our trainer has written the record of a step, plus one to be safe."""
SAMPLE_SECONDS = 0.05
"""Time between two samples of the counters."""
SETTLED = 4
"""Steps of data parallelism before measuring starts. The link becomes slow during the third."""
HEADER = "Mbit/s | method | tokens/s | utilisation % | not exposed % | sent kB a step | n (steps)"
LEGEND = """\
utilisation: tokens/s against the fastest method without a limit in the same repeat; not exposed:
share of a step by the clock of the training thread (data parallelism: utilisation); sent: by the
counter of a worker's interface. Median (min ... max) of n runs of so many steps."""


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The steady part of a run."""

    steps: int
    seconds_per_step: float
    tokens_per_second: float
    exposed_seconds: float | None
    """Per step, as measured by the trainer; None with data parallelism."""
    sent_per_step: float
    """Bytes sent by the interface of a worker in a step, mean over workers."""


@dataclass
class Samples:
    """Records of logged steps, and the bytes that all workers had sent when each was found."""

    records: list[core.Record] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def take(self, network: Network, folder: Path) -> None:
        sent = sum(network.counters(worker)[0] for worker in range(network.workers))
        self.records = core.steps_of(core.read_records(folder))
        self.sent += [sent] * (len(self.records) - len(self.sent))


def run_length(sync_every: int | None, delay: int, *, limited: bool) -> core.Settings:
    """Return the length of a run: a cycle without exchanges, and one with.

    With data parallelism (`sync_every` is None) all steps are alike, and take long on a slow link.
    """
    if sync_every is None:
        steps, log_every = (SETTLED + 3, 1) if limited else (51, 10)
    else:
        steps, log_every = 2 * sync_every + max(delay, LATE) + 1, sync_every // 2
    return {"training.steps": str(steps), "metrics.log_every": str(log_every)}


def watch(method: str, rate: float, settings: core.Settings, folder: Path) -> Samples:
    """Run the workers until they end. Limit the links to `rate` Mbit/s after the first record."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.mkdir(parents=True)
    ours, theirs = ["torchtitan_diloco.train"], ["benchmarks.torchft_loop"]
    program = theirs if method == TORCHFT else ours
    words = core.command_line(settings | {"run.folder": str(folder)})
    command, log = [sys.executable, "-m", *program, *words], folder / "log.txt"
    samples, limited, workers = Samples(), False, range(int(settings["diloco.workers"]))
    with Network(len(workers)) as network:
        programs = [
            network.launch(worker, command, log, WORKER_ADDRESS=network.address(worker))
            for worker in workers
        ]
        running = True
        while running:
            running = any(program.running for program in programs)
            samples.take(network, folder)
            if samples.records and not limited:
                for worker in workers:
                    network.set_rate(worker, up=rate, down=rate)
                limited = True
            if any(program.process.returncode for program in programs):
                raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
            time.sleep(SAMPLE_SECONDS)
    return samples


def summarise(samples: Samples, workers: int, sync_every: int | None) -> Measured:
    """Measure the second cycle of `sync_every` steps, or, if that is None (data parallelism), all
    steps after the link has become slow."""
    steps = [int(record["step"]) for record in samples.records]
    if sync_every is None:
        first = next(number for number, step in enumerate(steps) if step >= SETTLED - 1)
        last = len(steps) - 2  # the last record is written without the usual delay
    else:
        first, last = steps.index(sync_every), steps.index(2 * sync_every)
    records = samples.records[first + 1 : last + 1]
    counts = [now - before for before, now in pairwise(steps[first : last + 1])]
    count, key = sum(counts), "worker/exposed_seconds"
    seconds = math.fsum(
        number * record["speed/seconds_per_step"]
        for number, record in zip(counts, records, strict=True)
    )
    tokens = records[0]["speed/tokens_per_second"] * records[0]["speed/seconds_per_step"]
    exposed = [record[key] for record in records if key in record]
    return Measured(
        steps=count,
        seconds_per_step=seconds / count,
        tokens_per_second=tokens * count / seconds,
        exposed_seconds=math.fsum(exposed) / count if exposed else None,
        sent_per_step=(samples.sent[last] - samples.sent[first]) / workers / count,
    )


def measure(method: str, rate: float, settings: core.Settings, folder: Path) -> Measured:
    """Measure a run, unless `folder` has its result."""

    def run() -> core.Record:
        samples = watch(method, rate, settings, folder)
        sync_every = None if method == DATA_PARALLEL else int(settings["diloco.sync_every"])
        return asdict(summarise(samples, int(settings["diloco.workers"]), sync_every))

    return Measured(**core.kept(folder, settings, run))


# --- the table ------------------------------------------------------------------------------------


@dataclass
class Table:
    runs: dict[tuple[float, str], list[Measured]] = field(default_factory=dict)
    """Runs by rate in Mbit/s and method, one for each repeat."""

    def references(self) -> list[float]:
        """Return the tokens/s of the fastest method without a limit in each repeat."""
        free = [runs for (rate, _), runs in self.runs.items() if rate == math.inf]
        return [max(run.tokens_per_second for run in repeat) for repeat in zip(*free, strict=True)]

    def utilisations(self, rate: float, method: str) -> list[float]:
        """Return tokens/s / reference for each repeat."""
        pairs = zip(self.runs[rate, method], self.references(), strict=True)
        return [run.tokens_per_second / reference for run, reference in pairs]

    def row(self, rate: float, method: str) -> list[str]:
        runs, utilisations = self.runs[rate, method], self.utilisations(rate, method)
        free = [1 - (run.exposed_seconds or 0.0) / run.seconds_per_step for run in runs]
        if method == DATA_PARALLEL:
            free = [min(1.0, used) for used in utilisations]
        return [
            "no limit" if rate == math.inf else f"{rate:.3g}",
            method,
            core.summary([run.tokens_per_second for run in runs], ",.0f"),
            core.summary(utilisations, ".1f", 100),
            core.summary(free, ".1f", 100),
            core.summary([run.sent_per_step for run in runs], ",.1f", 1e-3),
            f"{len(runs)} ({runs[0].steps})",
        ]


def measure_table(options: argparse.Namespace, settings: Mapping[str, core.Settings]) -> Table:
    """Measure all methods and rates in each repeat, so that a drift in the speed of the machine
    affects them alike."""
    table, rates = Table(), sorted({math.inf, *options.rates}, reverse=True)
    for repeat, rate, (method, own) in product(range(options.repeats), rates, settings.items()):
        every = None if method == DATA_PARALLEL else options.sync_every
        length = run_length(every, options.delay, limited=rate < math.inf)
        folder = core.run_folder(options.out, f"{method}-{rate:g}-{repeat}", own | length)
        run = measure(method, rate, own | length, folder)
        table.runs.setdefault((rate, method), []).append(run)
        speed = f"{run.tokens_per_second:,.0f} tokens/s"
        print(f"repeat {repeat}, {rate:g} Mbit/s, {method}: {speed}", flush=True)
    return table


def parse_rate(text: str) -> float:
    if float(text) <= 0:
        raise ValueError
    return float(text)


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--workers", type=core.positive, default=2)
    parser.add_argument("--sync-every", type=core.positive, default=100, help="H")
    parser.add_argument("--delay", type=int, default=5, help="tau of the methods with overlap")
    parser.add_argument("--rates", type=core.list_of(parse_rate), default=[math.inf, 130.0, 13.0])
    installed = [name for name in METHODS if name != TORCHFT or torchft_loop.is_installed()]
    methods_help = f"separated by ';' (default: all): {'; '.join(METHODS)}"
    parse = core.one_of(installed, ";")
    parser.add_argument("--methods", type=parse, default="", help=methods_help)
    parser.add_argument("--repeats", type=core.positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/slow-link"))
    options, words = parser.parse_known_args()
    if options.workers == 1 or options.sync_every % 2:
        parser.error("give 2 or more --workers, as one sends nothing, and an even --sync-every")
    if TORCHFT not in installed:
        print(f"torchft is not installed, so it has no rows: {install_command('bench')}")
    outer = {
        "diloco.workers": str(options.workers),
        "diloco.sync_every": str(options.sync_every),
        "diloco.overlap.delay": str(options.delay),
    }
    extra = core.parse_settings(parser, words, RESERVED)
    settings = {  # the control is always measured
        method: MODEL | outer | METHODS[method] | extra
        for method in dict.fromkeys([DATA_PARALLEL, *options.methods])
    }
    for own in settings.values():
        core.load(own)
    try:
        table = measure_table(options, settings)
    except NoNetworkError as error:
        parser.exit(1, f"slow links need network namespaces: {error}\n")
    title = (
        f"{options.workers} workers, H = {options.sync_every}, tau = {options.delay}, 1 thread a "
        f"worker, {os.cpu_count()} cores; torch {torch.__version__}; reference "
        f"{core.summary(table.references(), ',.0f')} tokens/s\n\n{LEGEND}"
    )
    core.print_table(title, HEADER, [table.row(*cell) for cell in table.runs])


if __name__ == "__main__":
    main()
