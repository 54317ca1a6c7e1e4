"""One run of `benchmarks.slow_link`: real trainers in a network of their own, and what its interfaces counted meanwhile."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import torchft_manager
from benchmarks.network import Network
from torchtitan_diloco.trainer import STEPS_APART

DATA_PARALLEL, DILOCO, STREAMING, TORCHFT = "data parallel", "DiLoCo", "streaming", "torchft"
OVERLAP, OURS = "streaming + overlap", "streaming + overlap + fp4"
METHODS = (DATA_PARALLEL, DILOCO, STREAMING, OVERLAP, OURS, TORCHFT)

MODEL = {
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
"""4.8M parameters in 3 fragments of 2 blocks and a small one of the rest; a step of a tenth of a second on one core."""
WHOLE_MODEL = {"diloco.fragments.layers_per_fragment": "0"}
AT_ONCE = {"diloco.overlap.delay": "0", "diloco.overlap.mixing": "0"}
FP32, FP4 = {"diloco.quantization.codec": "fp32"}, {"diloco.quantization.codec": "fp4_e3m0"}

SET_BY_THE_TABLE = {
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

LATE = STEPS_APART + 1
"""Steps after which our trainer writes the record of a step, and one to spare."""
SAMPLE_SECONDS, PEAK_SECONDS = 0.05, 0.5
"""Between two looks at the counters; over which the peak is a mean."""
SETTLED = 4
"""Steps of data parallelism that are not counted: the link is made slow during the third."""


class RunFailedError(RuntimeError):
    """A worker ended with an error."""


@dataclass(frozen=True)
class Experiment:
    """What all runs of a table have in common."""

    workers: int
    sync_every: int
    cycles: int
    """Whole cycles of `sync_every` steps that are measured, after the first, in which nothing is sent."""
    delay: int
    extra: Mapping[str, str]

    def settings(self, method: str) -> dict[str, str]:
        """Of the trainer, but for the length."""
        overlap = {"diloco.overlap.delay": str(self.delay), "diloco.overlap.mixing": "0.5"}
        chosen = {
            DATA_PARALLEL: {"diloco.method": "none"},
            DILOCO: WHOLE_MODEL | AT_ONCE | FP32,
            STREAMING: AT_ONCE | FP32,
            OVERLAP: overlap | FP32,
            OURS: overlap | FP4,
            TORCHFT: overlap | FP32,
        }[method]
        common = {"diloco.workers": str(self.workers), "diloco.sync_every": str(self.sync_every)}
        return MODEL | common | chosen | dict(self.extra)

    @property
    def steps(self) -> int:
        return (1 + self.cycles) * self.sync_every + max(self.delay, LATE) + 1


@dataclass(frozen=True)
class Length:
    """Steps of a run, and steps between two records."""

    steps: int
    every: int


@dataclass
class Window:
    """Steps that are measured together."""

    steps: int
    seconds_per_step: float
    tokens_per_second: float
    exposed_seconds: float | None
    """A step, by the trainer's own clock; None with data parallelism."""


@dataclass
class Measured:
    windows: list[Window]
    alone: float | None
    """Tokens a second in the first half of the first cycle, when nothing has been sent; None where that is not known."""
    sent_per_step: float
    """Bytes of a worker, by the counter of its interface; mean over workers and the measured steps."""
    peak_mbit: float
    """Of the worker that sent most in half a second."""


def is_installed(method: str) -> bool:
    return method != TORCHFT or torchft_manager.is_installed()


def length_of_data_parallel(seconds_per_step: float) -> Length:
    """Its steps are alike, so few of them say what there is to be said; they may take minutes."""
    if seconds_per_step < 1:
        return Length(51, 10)
    return Length(SETTLED + min(10, max(2, round(30 / seconds_per_step))), 1)


def measure(
    method: str, rate: float, experiment: Experiment, length: Length | None, folder: Path
) -> Measured:
    """`rate` in Mbit/s, of every worker's link in each direction; `length` is given with data parallelism. What was measured
    lies in the folder, and is not measured again."""
    length = length or Length(experiment.steps, experiment.sync_every // 2)
    settings = experiment.settings(method) | {
        "training.steps": str(length.steps),
        "metrics.log_every": str(length.every),
    }
    finished = folder / "finished.json"
    if finished.exists():
        kept = json.loads(finished.read_text())
        if kept["settings"] != settings:
            raise SystemExit(
                f"{folder} holds a run with other settings: choose another --out, or remove it"
            )
        return Measured(
            **kept["measured"]
            | {"windows": [Window(**window) for window in kept["measured"]["windows"]]}
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("metrics*.jsonl"):  # an earlier start was interrupted
        path.unlink()
    seen = watch(method, rate, settings | {"run.folder": str(folder)}, experiment.workers, folder)
    measured = summarise(seen, experiment.sync_every, data_parallel=method == DATA_PARALLEL)
    finished.write_text(json.dumps({"settings": settings, "measured": asdict(measured)}))
    return measured


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What was seen of a run: the counters over time, and when each record came."""

    times: list[float]
    sent: list[list[int]]
    """By sample and worker."""
    records: list[tuple[int, dict[str, float]]]
    """Number of the sample at which it was there, and the record."""


def watch(
    method: str, rate: float, settings: Mapping[str, str], workers: int, folder: Path
) -> Seen:
    """Runs the workers to their end. They start at full speed; the links are slow from the first record on."""
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    module = "benchmarks.torchft_train" if method == TORCHFT else "torchtitan_diloco.launch"
    command = [sys.executable, "-m", module, *words]
    seen, log, limited = Seen([], [], []), folder / "log.txt", False
    with Network(workers) as network, log.open("w") as output:
        programs = [
            network.start(worker, command, _environment(network, worker), output)
            for worker in range(workers)
        ]
        while any(program.poll() is None for program in programs):
            time.sleep(SAMPLE_SECONDS)
            _look(seen, network, folder)
            if seen.records and not limited:
                for worker in range(workers):
                    network.set_rate(worker, up=rate, down=rate)
                limited = True
            _raise_failure(programs, command, log)
        _raise_failure(programs, command, log)
    return seen


def _environment(network: Network, worker: int) -> dict[str, str]:
    torchft = {
        "LIGHTHOUSE": network.address(0),
        "ADDRESS": network.address(worker),
        "RUST_LOG": "warn",
    }
    return dict(os.environ) | {"OMP_NUM_THREADS": "1"} | network.launch_variables(worker) | torchft


def _look(seen: Seen, network: Network, folder: Path) -> None:
    seen.times.append(time.perf_counter())
    seen.sent.append([network.counters(worker)[0] for worker in range(network.workers)])
    path = folder / "metrics.jsonl"
    if path.exists():
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        records = [record for record in map(json.loads, whole) if "kind" not in record]
        seen.records += [(len(seen.times) - 1, record) for record in records[len(seen.records) :]]


def _raise_failure(programs: list[subprocess.Popen[bytes]], command: list[str], log: Path) -> None:
    if any(program.returncode for program in programs):
        raise RunFailedError(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")


# --- what it means ----------------------------------------------------------------------------------------------------


def summarise(seen: Seen, sync_every: int, *, data_parallel: bool) -> Measured:
    """The steady part: whole cycles after the first; with data parallelism all records after the link has become slow."""
    steps = [int(record["step"]) for _, record in seen.records]
    windows: list[Window] = []
    if data_parallel:
        first = next(number for number, step in enumerate(steps) if step >= SETTLED - 1)
        last = len(steps) - 2  # the last record comes at once, the others a step late
        windows = [_window(seen, number, number + 1) for number in range(first, last)]
    else:
        ends = [number for number, step in enumerate(steps) if step % sync_every == 0]
        first, last = ends[0], ends[-1]
        windows = [_window(seen, start, end) for start, end in itertools.pairwise(ends)]
    alone = None
    if not data_parallel:
        alone = seen.records[steps.index(sync_every // 2)][1]["speed/tokens_per_second_global"]
    start, end = seen.records[first][0], seen.records[last][0]
    sent = [after - before for before, after in zip(seen.sent[start], seen.sent[end], strict=True)]
    sent_per_step = sum(sent) / len(sent) / (steps[last] - steps[first])
    return Measured(windows, alone, sent_per_step, _peak_mbit(seen, start, end))


def _window(seen: Seen, first: int, last: int) -> Window:
    """From one record to another."""
    parts = [seen.records[number] for number in range(first, last + 1)]
    counts = [
        int(after["step"] - before["step"]) for (_, before), (_, after) in itertools.pairwise(parts)
    ]
    records = [record for _, record in parts[1:]]
    seconds = math.fsum(
        count * record["speed/seconds_per_step"]
        for count, record in zip(counts, records, strict=True)
    )
    tokens = records[0]["speed/tokens_per_second_global"] * records[0]["speed/seconds_per_step"]
    key = "diloco/exposed_seconds_mean_over_ranks"
    exposed = (
        math.fsum(record[key] for record in records) / sum(counts) if key in records[0] else None
    )
    return Window(sum(counts), seconds / sum(counts), tokens * sum(counts) / seconds, exposed)


def _peak_mbit(seen: Seen, start: int, end: int) -> float:
    peak, since = 0.0, start
    for number in range(start + 1, end + 1):
        while seen.times[number] - seen.times[since + 1] >= PEAK_SECONDS:
            since += 1
        seconds = seen.times[number] - seen.times[since]
        if seconds >= PEAK_SECONDS:
            most = max(
                after - before
                for before, after in zip(seen.sent[since], seen.sent[number], strict=True)
            )
            peak = max(peak, most * 8e-6 / seconds)
    return peak
