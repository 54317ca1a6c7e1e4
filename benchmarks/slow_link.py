"""Compare data parallelism, DiLoCo and streaming variants over links of several rates.

    .venv/bin/python -m benchmarks.slow_link [--rates inf,130,13] [--methods NAME,NAME ...] \
        [--section.key value ...]

Every run starts `torchtitan_diloco.train`, with one process and thread a worker, in a network of
its own (benchmarks/network.py). Only the method and the links differ. --rates limits the link of
each worker in each direction, in Mbit/s; `inf` is no limit. If torchft is installed (extra
`bench`), its DiLoCo also runs in the same trainer, with the same fragments, tau and alpha.

The command above takes about 15 minutes on 2 idle cores. Finished runs are kept in --out, so that
the same command continues an interrupted table.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks import core, torchft_loop
from benchmarks.network import Network
from torchtitan_diloco.base.user import install_command

SYNC_EVERY = 100
DELAY = 5
COMMON = {
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
    "metrics.boards": "none",
    "run.device": "cpu",
    "diloco.sync_every": str(SYNC_EVERY),
    "diloco.fragments.layers_per_fragment": "2",
    "diloco.overlap.delay": str(DELAY),
    "diloco.overlap.mixing": "0.5",
    "diloco.quantization.codec": "fp32",
    "diloco.link.timeout_seconds": "3600",
    "distributed.train_timeout_seconds": "3600",
}
"""4.8M parameters in 3 fragments of 2 blocks and a small one. A step takes 0.1 s on one core."""
DATA_PARALLEL = "data parallel"
HALF_GRADIENTS = "data parallel with bf16 gradients"
TORCHFT = "torchft"
OURS = "streaming + overlap + fp4"
AT_ONCE = {"diloco.overlap.delay": "0", "diloco.overlap.mixing": "0"}
METHODS: dict[str, core.Settings] = {
    DATA_PARALLEL: {"diloco.method": "none"},
    HALF_GRADIENTS: {"diloco.method": "none", "parallel.reduce_dtype": "bfloat16"},
    "DiLoCo": AT_ONCE | {"diloco.fragments.layers_per_fragment": "0"},
    "streaming": AT_ONCE,
    "streaming + overlap": {},
    OURS: {"diloco.quantization.codec": "fp4_e3m0"},
    TORCHFT: {},
}
RESERVED = {"run.folder", "training.steps", "metrics.log_every", "diloco.workers"} | {
    key for method in METHODS.values() for key in ("diloco.sync_every", *method)
}
"""Settings that the benchmark sets itself."""
SAMPLE_SECONDS = 0.05
"""Time between two samples of the counters."""
HEADER = "Mbit/s | method | tokens/s | utilization % | not exposed % | sent kB a step | n (steps)"
LEGEND = """\
utilization: tokens/s against the fastest method without a limit in the same repeat; not exposed:
share of a step by the clock of the training thread (data parallelism: utilization); sent: by the
counter of a worker's interface. Median (min ... max) of n runs of so many steps."""


@dataclass
class Measured:
    """The second cycle of a run."""

    steps: int
    seconds_per_step: float
    tokens_per_second: float
    exposed_seconds: float | None
    """Per step, as measured by the trainer; None with data parallelism."""
    sent_per_step: float
    """Bytes sent by the interface of a worker in a step, mean over workers."""


Runs = Mapping[tuple[float, str], list[Measured]]
"""Runs by rate in Mbit/s and method, one for each repeat."""


def cycle_of(method: str, rate: float) -> int:
    """Return the steps of a cycle. With data parallelism all are alike, and long on slow links."""
    if not method.startswith(DATA_PARALLEL):
        return SYNC_EVERY
    return 2 if rate < math.inf else 20


def run_length(cycle: int) -> core.Settings:
    """Return the length of a run: a cycle to begin with, and one that is measured."""
    steps = 2 * cycle + min(cycle, DELAY) + 1
    return {"training.steps": str(steps), "metrics.log_every": str(cycle // 2)}


Samples = list[tuple[float, int]]
"""Moments in seconds since 1970, and the bytes that all workers had sent until then."""


def run_workers(method: str, rate: float, settings: core.Settings, folder: Path) -> Samples:
    """Run the workers until they end."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.mkdir(parents=True)
    program = "benchmarks.torchft_loop" if method == TORCHFT else "torchtitan_diloco.train"
    words = core.command_line(settings | {"run.folder": str(folder)})
    command = [sys.executable, "-m", program, *words]
    log = folder / "log.txt"
    samples = Samples()
    workers = range(int(settings["diloco.workers"]))
    with Network(len(workers), up=rate, down=rate) as network:
        programs = [
            network.launch(worker, command, log, WORKER_ADDRESS=network.address(worker))
            for worker in workers
        ]
        while any(program.running for program in programs):
            samples.append((time.time(), sum(network.counters(worker)[0] for worker in workers)))
            time.sleep(SAMPLE_SECONDS)
            if any(program.process.returncode for program in programs):
                raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return samples


def summarize(
    records: Sequence[core.Record], samples: Samples, workers: int, cycle: int
) -> Measured:
    """Measure the second cycle. `records`: of logged steps, two a cycle."""
    begin, middle, end = (
        next(record for record in records if record["step"] == step)
        for step in (cycle, 3 * cycle // 2, 2 * cycle)
    )

    def mean(key: str) -> float:
        return float(middle[key] + end[key]) / 2

    def sent_until(moment: float) -> int:
        return max(sent for at, sent in samples if at <= moment)

    tokens = end["speed/tokens_per_second"] * end["speed/seconds_per_step"]
    exposed = "worker/exposed_seconds"  # sums of half a cycle
    return Measured(
        steps=cycle,
        seconds_per_step=mean("speed/seconds_per_step"),
        tokens_per_second=tokens / mean("speed/seconds_per_step"),
        exposed_seconds=2 * mean(exposed) / cycle if exposed in end else None,
        sent_per_step=(sent_until(end["time"]) - sent_until(begin["time"])) / workers / cycle,
    )


def measure(method: str, rate: float, settings: core.Settings, folder: Path) -> Measured:
    """Measure a run, unless `folder` has its result."""

    def run() -> core.Record:
        samples = run_workers(method, rate, settings, folder)
        records = core.steps_of(core.read_records(folder))
        workers = int(settings["diloco.workers"])
        cycle = cycle_of(method, rate)
        return asdict(summarize(records, samples, workers, cycle))

    return Measured(**core.kept(folder, settings, run))


def references(runs: Runs) -> list[float]:
    """Return the tokens/s of the fastest method without a limit in each repeat."""
    free = [repeats for (rate, _), repeats in runs.items() if rate == math.inf]
    return [max(run.tokens_per_second for run in repeat) for repeat in zip(*free, strict=True)]


def utilizations(runs: Runs, rate: float, method: str) -> list[float]:
    """Return tokens/s / reference for each repeat."""
    pairs = zip(runs[rate, method], references(runs), strict=True)
    return [run.tokens_per_second / reference for run, reference in pairs]


def row(runs: Runs, rate: float, method: str) -> list[str]:
    repeats = runs[rate, method]
    used = utilizations(runs, rate, method)
    free = [1 - (run.exposed_seconds or 0.0) / run.seconds_per_step for run in repeats]
    if method.startswith(DATA_PARALLEL):
        free = [min(1.0, share) for share in used]
    return [
        "no limit" if rate == math.inf else f"{rate:.3g}",
        method,
        core.summary([run.tokens_per_second for run in repeats], ",.0f"),
        core.summary(used, ".1f", 100),
        core.summary(free, ".1f", 100),
        core.summary([run.sent_per_step for run in repeats], ",.1f", 1e-3),
        f"{len(repeats)} ({repeats[0].steps})",
    ]


def parse_rate(text: str) -> float:
    if float(text) <= 0:
        raise ValueError
    return float(text)


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--workers", type=core.positive, default=2)
    parser.add_argument("--rates", type=core.list_of(parse_rate), default=[math.inf, 130.0, 13.0])
    names = f"default all: {', '.join(METHODS)}"
    parser.add_argument("--methods", type=core.one_of(METHODS), default="", help=names)
    parser.add_argument("--repeats", type=core.positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/slow-link"))
    options, words = parser.parse_known_args()
    if options.workers == 1:
        parser.error("give 2 or more --workers, as one sends nothing")
    common = COMMON | {"diloco.workers": str(options.workers)}
    extra = core.parse_settings(parser, words, RESERVED)
    settings = {name: common | METHODS[name] | extra for name in options.methods}
    if TORCHFT in settings and not torchft_loop.is_installed():
        print(f"torchft is not installed, so it has no rows: {install_command('bench')}")
        del settings[TORCHFT]
    for of_run in settings.values():
        core.load(of_run)
    runs = dict[tuple[float, str], list[Measured]]()
    rates = sorted({math.inf, *options.rates})
    # All methods and rates are in each repeat: a drift of the machine affects them alike.
    for repeat, rate, name in product(range(options.repeats), reversed(rates), settings):
        of_repeat = settings[name] | run_length(cycle_of(name, rate))
        folder = core.run_folder(options.out, f"{name}-{rate:g}-{repeat}", of_repeat)
        run = measure(name, rate, of_repeat, folder)
        runs.setdefault((rate, name), []).append(run)
        speed = f"{run.tokens_per_second:,.0f} tokens/s"
        print(f"repeat {repeat}, {rate:g} Mbit/s, {name}: {speed}", flush=True)
    title = (
        f"{options.workers} workers, H = {SYNC_EVERY}, tau = {DELAY}, 1 thread a "
        f"worker, {os.cpu_count()} cores; torch {torch.__version__}; reference "
        f"{core.summary(references(runs), ',.0f')} tokens/s\n\n{LEGEND}"
    )
    core.print_table(title, HEADER, [row(runs, *cell) for cell in runs])


if __name__ == "__main__":
    main()
