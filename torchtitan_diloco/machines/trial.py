"""A trial: training with a config on this machine alone, to measure the time of its steps.

It is the same program that trains later, started by the same launcher with the same settings,
except for the text, which every machine has, and everything that is not a step: validations,
checkpoints, boards. It trains until it is stopped.

The first half of the time is for warming up, and only steps of the second half are measured. Other
programs slow down many steps in a row, so steps say less of their mean than as many independent
values would: the uncertainty is that of the means of blocks of consecutive steps.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

import msgspec

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.hardware import (
    SHORT_OF_CORES,
    available_cores,
    end_with_parent,
    threads_of_process,
)
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.metrics import Record
from torchtitan_diloco.components.records import METRICS_FILE, read_json_lines
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.checks import RUN_LENGTH
from torchtitan_diloco.config.loader import without_settings

WARM_UP_STEPS = 2
"""Number of first steps, which are slower and are not measured."""
LEAST_STEPS = 3
"""Minimum number of steps to measure after them."""
FEWEST_STEPS = 10
"""Number of measured steps that advice needs."""
BLOCKS = 8
"""Number of blocks of consecutive steps, of which the means are compared."""
STUDENT = 2.4
"""Standard errors of the mean of so many blocks that contain it with a probability of 95 %."""
STEADY = 0.02
"""Uncertainty of the mean, as a share of it, at which steps have been measured for long enough."""
NOISY = 0.05
"""Uncertainty of the mean, as a share of it, from which speeds are ranges."""
LONGEST = 4
"""Multiple of the given time after which steps are no longer measured, however much they vary. The
first half of it is to warm up."""
MOST_STEPS = 10**9
"""Number of steps of a trial, so large that it only ends when it is stopped."""
STOP_SECONDS = 15.0
"""Seconds in which a trial may complete its step before it is killed."""
OF_A_RUN = ("NNODES", "NODE_RANK", "RDZV_ENDPOINT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that would make the trial part of another run."""


class Step(NamedTuple):
    seconds: float
    """Wall time in a run, which writes records less often than a trial."""
    queued_seconds: float
    """Time for which the training thread was ready to run but had no core."""


class StepTimes(msgspec.Struct):
    device: str
    mean_seconds: float
    deviation: float
    count: int
    queued: float
    """Share of the steps for which the training thread was ready to run but had no core."""
    crowded: str
    """A warning if this machine has much more work than cores."""
    block_seconds: list[float]
    """Mean seconds of the steps of each block of consecutive steps."""

    @classmethod
    def of(cls, steps: Sequence[Step], *, device: str, crowded: str) -> "StepTimes":
        """Return the times of the steps that were measured."""
        seconds = [step.seconds for step in steps]
        return cls(
            device=device,
            mean_seconds=statistics.fmean(seconds),
            deviation=statistics.pstdev(seconds),
            count=len(seconds),
            queued=sum(step.queued_seconds for step in steps) / sum(seconds),
            crowded=crowded,
            block_seconds=_block_means(steps),
        )

    @property
    def is_steady(self) -> bool:
        """Whether a run will have the same steps if nothing else changes."""
        is_quiet = self.queued <= SHORT_OF_CORES and not self.crowded
        return is_quiet and _uncertainty_of_mean(self.block_seconds) <= NOISY

    @property
    def ends(self) -> tuple[float, float]:
        """Mean seconds of a step that a run may have: at least, and at most."""
        if self.is_steady:
            return self.mean_seconds, self.mean_seconds
        return min(self.block_seconds), max(self.block_seconds)


def _block_means(steps: Sequence[Step]) -> list[float]:
    """Return the mean seconds of the steps of each block."""
    blocks = min(BLOCKS, len(steps))
    bounds = [len(steps) * number // blocks for number in range(blocks + 1)]
    return [
        statistics.fmean(step.seconds for step in steps[first:last])
        for first, last in pairwise(bounds)
    ]


def uncertainty(steps: Sequence[Step]) -> float:
    """Return the uncertainty of the mean of the steps, as a share of it."""
    return _uncertainty_of_mean(_block_means(steps))


def _uncertainty_of_mean(block_seconds: Sequence[float]) -> float:
    if len(block_seconds) < BLOCKS:
        return math.inf
    error = statistics.stdev(block_seconds) / math.sqrt(BLOCKS)
    return STUDENT * error / statistics.fmean(block_seconds)


def warm(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps of the second half of the time, without the one in its middle."""
    seconds_to_skip = sum(step.seconds for step in steps) / 2
    for number, step in enumerate(steps):
        seconds_to_skip -= step.seconds
        if seconds_to_skip < 0:
            return steps[number + 1 :] or steps[number:]
    return steps


def has_enough_steps(steps: Sequence[Step], seconds: float) -> bool:
    """Return whether steps were measured for so long, after as long to warm up, and vary so little
    that more of them change nothing, or were measured for long enough."""
    step_seconds = sum(step.seconds for step in steps)
    if step_seconds < 2 * seconds:
        return False
    return uncertainty(warm(steps)) <= STEADY or step_seconds >= LONGEST * seconds


class Trial:
    """Context in which the trial runs."""

    def __init__(
        self,
        words: Sequence[str],
        config: Config,
        *,
        workers: int,
        processes: int,
        trials: int,
        vocabulary: int,
    ) -> None:
        """Start a trial.

        Args:
            words: the arguments of a training with `config`.
            workers: number of workers that will share a batch.
            trials: number of trials on this machine, which divide its cores as the ranks of the
                run do.
            vocabulary: rows of the embedding.
        """
        self._folder = TemporaryDirectory(prefix="torchtitan-diloco-compare-")
        self._log = Path(self._folder.name, "log.txt")
        self._records = Path(self._folder.name, "run", "worker-0", METRICS_FILE)
        self._log_every = config.metrics.log_every
        batch = config.training.global_batch_size
        settings = {
            "run.folder": str(Path(self._folder.name, "run")),
            "run.restarts": "0",
            "run.preemption": "none",
            "model.weights": "",
            "data.corpus": "stdlib",
            "data.mixture": "",
            "data.phases": "[]",
            "data.validation_corpus": "",
            "data.tokenizer": "bytes",
            "data.shard_by": "none",
            "model.vocab_size": str(vocabulary),
            "diloco.method": "none",
            "diloco.workers": "1",
            **dict.fromkeys(RUN_LENGTH, "0"),
            "training.steps": str(MOST_STEPS),
            "training.stop_after": "0",
            "training.global_batch_size": "none" if batch is None else str(batch // workers),
            "validation.every": "0",
            "checkpoint.every": "0",
            "checkpoint.every_minutes": "0",
            "checkpoint.at_end": "false",
            "checkpoint.resume": "auto",
            "checkpoint.mirror": "",
            "metrics.log_every": "1",
            "metrics.boards": "none",
            "profiling.start": "0",
        }
        given = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._command = [sys.executable, "-m", "torchtitan_diloco", "train"]
        self._command += [*without_settings(words, settings), *given]
        environment = {key: value for key, value in os.environ.items() if key not in OF_A_RUN}
        self._environment = environment | {"NPROC": str(processes)}
        if (ranks := trials * processes) > 1:
            self._environment.setdefault("OMP_NUM_THREADS", str(threads_of_process(ranks)))

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for this process, which stops the trial
                preexec_fn=end_with_parent,
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks end with it
            self._process.wait()
        self._folder.cleanup()

    @property
    def threads(self) -> int:
        """Threads of each of its processes."""
        return int(self._environment.get("OMP_NUM_THREADS", available_cores()))

    def check(self) -> None:
        """Raise an error if the trial has ended, which it should not do."""
        if (code := self._process.poll()) is None:
            return
        reason = describe_output(self._log.read_text(errors="replace"))
        raise UserError(f"a trial of this config ended with exit code {code}: {reason}")

    def steps(self, since: float = 0.0) -> list[Step]:
        """Return each step that ended after a given time, except the first ones."""
        records = read_json_lines(self._records)[0] if self._records.exists() else []
        return [
            step_of_record(record, self._log_every)
            for record in records
            if record.get("worker/steps")
            and record["step"] > WARM_UP_STEPS
            and record["time"] > since
        ]

    def wait_for_steps(
        self,
        since: float,
        is_enough: Callable[[list[Step]], bool],
        meanwhile: Callable[[list[Step]], None],
    ) -> None:
        """Wait until a minimum number of steps, and enough of them, have ended after a given time.

        `meanwhile` is called repeatedly with the steps so far.
        """
        while True:
            measured = self.steps(since)
            if len(measured) >= LEAST_STEPS and is_enough(measured):
                return
            self.check()
            meanwhile(measured)
            time.sleep(0.2)


def step_of_record(record: Record, log_every: int) -> Step:
    """Return the step of a record, as a run takes it that writes one after every `log_every` steps.

    Beside training and waiting for other ranks, a trial spends the time of a step on its record.
    """
    wall = record["worker/wall_seconds"]
    needed = record["worker/step_seconds"] + record["worker/agreement_seconds"]
    writing = max(0.0, wall - needed)
    return Step(wall - writing + writing / log_every, record["worker/queued_seconds"])


def doubts_about(names: Sequence[str], times: Sequence[StepTimes]) -> Iterator[str]:
    """Yield the reasons why the measured steps are no base for advice, each with a remedy."""
    for name, steps in zip(names, times, strict=True):
        if steps.count < FEWEST_STEPS:
            needed = math.ceil(FEWEST_STEPS * steps.mean_seconds)
            yield (
                f"{name} has measured {counted(steps.count, 'step')}, and advice needs "
                f"{FEWEST_STEPS}: give --seconds {needed + 1}s"
            )
        if steps.queued > SHORT_OF_CORES:
            yield (
                f"{name} was short of cores: its training thread waited for one in "
                f"{steps.queued:.0%} of the time; stop other programs there, or start fewer "
                "threads (OMP_NUM_THREADS)"
            )
        elif steps.crowded:
            yield f"{name} was crowded: {steps.crowded}; stop them"


def describe_output(printed: str) -> str:
    """Return the first error, with its indented lines, as one line, or else the last line."""
    _, error, text = printed.partition("error: ")
    if not error:
        return (printed.splitlines() or ["it printed nothing"])[-1]
    first, *others = text.splitlines()
    indented = takewhile(lambda line: line[:2] == "  ", others)
    return " ".join([first, *map(str.strip, indented)])
