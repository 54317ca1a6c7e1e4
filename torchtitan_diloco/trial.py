"""A trial: training with a config on this machine alone, to measure the time of its steps.

It is the same program that trains later, started by the same launcher with the same settings,
except for the text, which every machine has, and everything that is not a step: validations,
checkpoints, boards. It trains until it is stopped.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from torchtitan_diloco.components.records import METRICS_FILE, read_json_lines
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.loader import RUN_LENGTH
from torchtitan_diloco.hardware import end_with_parent
from torchtitan_diloco.user import UserError

WARM_UP_STEPS = 2
"""Number of first steps, which are slower and are not measured."""
LEAST_STEPS = 3
"""Minimum number of steps to measure after them."""
MOST_STEPS = 10**9
"""Number of steps of a trial, so large that it only ends when it is stopped."""
STOP_SECONDS = 15.0
"""Seconds in which a trial may complete its step before it is killed."""
OF_A_RUN = ("NNODES", "NODE_RANK", "RDZV_ENDPOINT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that would make the trial part of another run."""


class Trial:
    """Context in which the trial runs."""

    def __init__(
        self, words: Sequence[str], config: Config, *, workers: int, processes: int, vocabulary: int
    ) -> None:
        """`words`: the arguments of a training with `config`. `workers`: number of workers that
        will share a batch. `vocabulary`: rows of the embedding."""
        self._folder = TemporaryDirectory(prefix="torchtitan-diloco-compare-")
        self._log = Path(self._folder.name, "log.txt")
        self._records = Path(self._folder.name, "run", "worker-0", METRICS_FILE)
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
            "metrics.tensorboard": "false",
            "metrics.wandb": "",
            "metrics.mlflow": "",
            "profiling.start": "0",
        }
        given = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._command = [sys.executable, "-m", "torchtitan_diloco.launch", *words, *given]
        kept = {key: value for key, value in os.environ.items() if key not in OF_A_RUN}
        self._environment = kept | {"NPROC": str(processes)}

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

    def check(self) -> None:
        """Raise an error if the trial has ended, which it should not do."""
        if (code := self._process.poll()) is None:
            return
        reason = what_it_said(self._log.read_text(errors="replace"))
        raise UserError(f"a trial of this config ended with exit code {code}: {reason}")

    def seconds_of_steps(self, since: float = 0.0) -> list[float]:
        """Return the wall time of each step that ended after a given time, except the first
        ones."""
        records = read_json_lines(self._records)[0] if self._records.exists() else []
        return [
            record["worker/wall_seconds"]
            for record in records
            if record.get("worker/steps")
            and record["step"] > WARM_UP_STEPS
            and record["time"] > since
        ]

    def wait_for_steps(
        self, seconds: float, since: float, meanwhile: Callable[[list[float]], None]
    ) -> None:
        """Wait until steps of this many seconds, and a minimum number, have ended after a given
        time.

        `meanwhile` is called repeatedly with the steps so far.
        """
        while True:
            measured = self.seconds_of_steps(since)
            if len(measured) >= LEAST_STEPS and sum(measured) >= seconds:
                return
            self.check()
            meanwhile(measured)
            time.sleep(0.2)


def what_it_said(printed: str) -> str:
    """Return the first error, with its indented lines, as one line, or else the last line."""
    _, error, text = printed.partition("error: ")
    if not error:
        return (printed.splitlines() or ["it printed nothing"])[-1]
    first, *others = text.splitlines()
    indented = takewhile(lambda line: line[:2] == "  ", others)
    return " ".join([first, *map(str.strip, indented)])
