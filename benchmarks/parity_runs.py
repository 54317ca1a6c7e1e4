"""Runs of `benchmarks.parity`: several at once, each in a folder of its own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from benchmarks import core
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.schema import flat_settings

LOSS = "loss/val"


def resolved(settings: core.Settings) -> core.Settings:
    """Return all settings of a run, including defaults."""
    config = from_command_line(core.command_line(settings))
    assert config is not None
    return {key: str(value) for key, value in flat_settings(config).items()}


def run_folder(out: Path, settings: core.Settings) -> Path:
    """Return the folder of a run, which depends only on its settings, so that tables share it."""
    run = resolved(settings)
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{run['training.steps']}-steps-seed{run['run.seed']}-{digest}"


def train_all(out: Path, named: Sequence[tuple[str, core.Settings]], jobs: int = 1) -> list[float]:
    """Train runs, `jobs` processes at a time, and return their last validation losses.

    They start in this order. A run that begins from a checkpoint waits for all runs before it.
    """
    free = threading.Semaphore(jobs)
    futures: list[Future[float]] = []

    def train(name: str, settings: core.Settings, room: int) -> float:
        try:
            folder = run_folder(out, settings)
            kept = core.kept(folder, resolved(settings), lambda: run(folder, settings))
        finally:
            free.release(room)
        print(f"{name}: {kept['loss']:.4f}", flush=True)
        return float(kept["loss"])

    with ThreadPoolExecutor(jobs) as pool:
        for name, settings in named:
            if "checkpoint.resume" in settings:
                for future in futures:
                    future.result()
            room = min(jobs, int(settings.get("diloco.workers", "1")))
            for _ in range(room):
                free.acquire()
            futures.append(pool.submit(train, name, settings, room))
    return [future.result() for future in futures]


def run(folder: Path, settings: core.Settings) -> dict[str, float]:
    """Start a run, or resume it after an interruption, and return its last validation loss."""
    if "checkpoint.resume" in settings or not (folder / "checkpoints").exists():
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that cannot be resumed
    words = core.command_line(settings | {"run.folder": str(folder)})
    command = [sys.executable, "-m", "torchtitan_diloco.launch", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        text = done.stdout[-2000:] + done.stderr[-2000:]
        raise SystemExit(f"{' '.join(command)} failed:\n{text}")
    records, _ = read_json_lines(folder / "worker-0/metrics.jsonl")
    losses = [record[LOSS] for record in records if LOSS in record]
    if not losses:
        raise SystemExit(f"{folder} was interrupted: the same command continues it")
    if "checkpoint.keep_every" not in settings:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {"loss": losses[-1]}
