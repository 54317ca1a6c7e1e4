"""Runs of `benchmarks.parity`: real ones, several at once, each kept in a folder of its own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import core
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.schema import flat_settings

LOSS = "validation/loss_nats_per_token_global"
FOREVER = 1e6
"""Seconds."""


def resolved(settings: core.Settings) -> core.Settings:
    """Return all settings of a run, defaults included."""
    config = from_command_line(core.command_line(settings))
    assert config is not None
    return {key: str(value) for key, value in flat_settings(config).items()}


def run_folder(out: Path, settings: core.Settings) -> Path:
    """Return the folder of a run, which is the same for tables that share it."""
    run = resolved(settings)
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{run['training.steps']}-steps-seed{run['run.seed']}-{digest}"


class StoppedError(Exception):
    """A run was stopped before its end. It can be continued."""


@dataclass
class Runs:
    """Trains runs one after the other, or as many at once as there is room for."""

    out: Path
    jobs: int = 1
    """Training processes at once. A run has as many as workers."""
    seconds: float = FOREVER
    """Time until runs stop. Each saves a checkpoint, from which the same command continues it."""
    _started: float = field(default_factory=time.monotonic)
    _free: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = threading.Semaphore(self.jobs)

    def train(self, named: Sequence[tuple[str, core.Settings]]) -> list[float | None]:
        """Return the last validation loss of each run, None if it did not finish in time.

        Runs start in this order. One that begins from a checkpoint waits for those before it.
        """
        futures: list[Future[float | None]] = []
        with ThreadPoolExecutor(self.jobs) as pool:
            for name, settings in named:
                if "checkpoint.resume" in settings:
                    for future in futures:
                        future.exception()
                needed = min(self.jobs, int(settings.get("diloco.workers", "1")))
                for _ in range(needed):
                    self._free.acquire()
                futures.append(pool.submit(self._train, name, settings, needed))
        return [future.result() for future in futures]

    def _train(self, name: str, settings: core.Settings, room: int) -> float | None:
        folder, loss = run_folder(self.out, settings), None
        try:
            kept = core.kept(folder, resolved(settings), lambda: self._run(folder, settings))
            loss = float(kept["loss"])
        except StoppedError:
            pass
        finally:
            self._free.release(room)
        print(f"{name}: {'not finished' if loss is None else f'{loss:.4f}'}", flush=True)
        return loss

    def _run(self, folder: Path, settings: core.Settings) -> dict[str, float]:
        """Start or resume a run. Return its last validation loss."""
        left = self._started + self.seconds - time.monotonic()
        if left <= 0:
            raise StoppedError
        if "checkpoint.resume" in settings or not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that cannot be resumed
        words = core.command_line(settings | {"run.folder": str(folder)})
        command = [sys.executable, "-m", "torchtitan_diloco.launch", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        into = subprocess.PIPE
        process = subprocess.Popen(command, stdout=into, stderr=into, text=True, env=environment)
        try:
            output, errors = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            raise StoppedError from None
        if process.returncode:
            text = output[-2000:] + errors[-2000:]
            raise SystemExit(f"{' '.join(command)} failed:\n{text}")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [record[LOSS] for record in records if LOSS in record]
        if not losses:  # by a signal
            raise StoppedError
        if "checkpoint.keep_every" not in settings:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {"loss": losses[-1]}
