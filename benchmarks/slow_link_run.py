"""A run of `benchmarks.slow_link`: trainers in a network whose interfaces count bytes."""

import math
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import core
from benchmarks.network import Network
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.distributed.stop import STEPS_APART
from torchtitan_diloco.planner.observed import observed_conditions
from torchtitan_diloco.planner.prediction import Conditions
from torchtitan_diloco.report.run_records import open_runs

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
LATE = STEPS_APART + 1
"""Steps until our trainer has written the record of a step, plus one to be safe."""
SAMPLE_SECONDS, PEAK_SAMPLES = 0.05, 10
"""Time between two samples of the counters, and number of samples averaged for the peak."""
SETTLED = 4
"""Steps of data parallelism before measuring starts. The link becomes slow during the third."""

RESERVED = {
    "run.folder",
    "training.steps",
    "metrics.log_every",
    "diloco.method",
    "diloco.workers",
    "diloco.sync_every",
    "diloco.overlap.delay",
    "diloco.overlap.mixing",
    "diloco.quantization.codec",
}
"""Settings that the benchmark sets itself."""


def build_settings(
    method: str, workers: int, sync_every: int, delay: int, extra: Mapping[str, str]
) -> core.Settings:
    """Return the settings of the trainer, except for the length of the run."""
    outer = {
        "diloco.workers": str(workers),
        "diloco.sync_every": str(sync_every),
        "diloco.overlap.delay": str(delay),
        "diloco.overlap.mixing": "0.5",
        "diloco.quantization.codec": "fp32",
    }
    return MODEL | outer | METHODS[method] | dict(extra)


def run_length(sync_every: int, delay: int) -> core.Settings:
    """Return the length of a run with an outer loop: a cycle without exchanges, and one with."""
    return _length(2 * sync_every + max(delay, LATE) + 1, sync_every // 2)


def data_parallel_length(seconds_per_step: float) -> core.Settings:
    """Return the length of a run with data parallelism. All its steps are alike, so few will do."""
    if seconds_per_step < 1:
        return _length(51, 10)
    return _length(SETTLED + min(10, max(2, round(30 / seconds_per_step))), 1)


def _length(steps: int, log_every: int) -> core.Settings:
    return {"training.steps": str(steps), "metrics.log_every": str(log_every)}


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
    peak_mbit: float
    """Highest rate of a worker over half a second."""
    observed: Conditions | None = None
    """Link and steps as measured by the trainer; None without our outer loop."""
    fragments: list[int] = field(default_factory=list)
    """Parameters of each fragment."""


def measure(method: str, rate: float, settings: core.Settings, folder: Path) -> Measured:
    """Measure a run, unless `folder` has its result. `rate`: Mbit/s of the link of each worker."""

    def run() -> dict[str, object]:
        samples = watch(method, rate, settings, folder)
        sync_every = None if method == DATA_PARALLEL else int(settings["diloco.sync_every"])
        measured = summarise(samples, sync_every)
        (own,) = open_runs([folder])
        sizes = {one.fragment: one.parameters for one in own.workers[0].rounds}
        measured.fragments = [sizes[fragment] for fragment in sorted(sizes)]
        measured.observed = observed_conditions(own)
        return asdict(measured)

    return msgspec.convert(core.kept(folder, settings, run), Measured, strict=False)


# --- running --------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Counters of a run over time, and its records."""

    times: list[float] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    """By sample and worker."""
    records: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Records of logged steps, each with the number of the first sample that found it."""

    def take(self, network: Network, path: Path) -> None:
        self.times.append(time.perf_counter())
        self.sent.append([network.counters(worker)[0] for worker in range(network.workers)])
        found = read_json_lines(path)[0] if path.exists() else []
        records = [record for record in found if "kind" not in record]
        number = len(self.times) - 1
        self.records += [(number, record) for record in records[len(self.records) :]]


def watch(method: str, rate: float, settings: core.Settings, folder: Path) -> Samples:
    """Run the workers until they end. Limit the links after the first record."""
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.mkdir(parents=True)
    module = "benchmarks.torchft_loop" if method == TORCHFT else "torchtitan_diloco.train"
    words = core.command_line(settings | {"run.folder": str(folder)})
    command, log = [sys.executable, "-m", module, *words], folder / "log.txt"
    samples, limited, workers = Samples(), False, range(int(settings["diloco.workers"]))
    with Network(len(workers)) as network:
        programs = [
            network.launch(worker, command, log, WORKER_ADDRESS=network.address(worker))
            for worker in workers
        ]
        running = True
        while running:
            running = any(program.running for program in programs)
            samples.take(network, folder / "worker-0/metrics.jsonl")
            if samples.records and not limited:
                for worker in workers:
                    network.set_rate(worker, up=rate, down=rate)
                limited = True
            if any(program.process.returncode for program in programs):
                raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
            time.sleep(SAMPLE_SECONDS)
    return samples


# --- results --------------------------------------------------------------------------------------


def summarise(samples: Samples, sync_every: int | None) -> Measured:
    """Measure the second cycle of `sync_every` steps, or, if that is None (data parallelism), all
    steps after the link has become slow."""
    steps = [int(record["step"]) for _, record in samples.records]
    if sync_every is None:
        first = next(number for number, step in enumerate(steps) if step >= SETTLED - 1)
        last = len(steps) - 2  # the last record is written without the usual delay
    else:
        first, last = steps.index(sync_every), steps.index(2 * sync_every)
    records = [record for _, record in samples.records[first + 1 : last + 1]]
    counts = [now - before for before, now in pairwise(steps[first : last + 1])]
    count, key = sum(counts), "worker/exposed_seconds"
    seconds = math.fsum(
        number * record["speed/seconds_per_step"]
        for number, record in zip(counts, records, strict=True)
    )
    tokens = records[0]["speed/tokens_per_second"] * records[0]["speed/seconds_per_step"]
    exposed = [record[key] for record in records if key in record]
    start, end = samples.records[first][0], samples.records[last][0]
    sent = sum(samples.sent[end]) - sum(samples.sent[start])
    peak = 0.0
    for number in range(start, end + 1 - PEAK_SAMPLES):
        later = number + PEAK_SAMPLES
        pairs = zip(samples.sent[number], samples.sent[later], strict=True)
        duration = samples.times[later] - samples.times[number]
        peak = max(peak, max(now - before for before, now in pairs) * 8e-6 / duration)
    return Measured(
        steps=count,
        seconds_per_step=seconds / count,
        tokens_per_second=tokens * count / seconds,
        exposed_seconds=math.fsum(exposed) / count if exposed else None,
        sent_per_step=sent / len(samples.sent[0]) / count,
        peak_mbit=peak,
    )
