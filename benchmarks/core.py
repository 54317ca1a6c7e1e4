"""Measuring core of the benchmarks: options, trainers and their records, turns, tables."""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from torchtitan_diloco.base.formatting import markdown_table
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.components.metrics import SENT, baseline_bytes, totals_of
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.config import Config, from_command_line

Settings = dict[str, str]
"""Settings of the trainer: dotted key -> value."""
Record = dict[str, Any]
CPU = torch.device("cpu")
STOP_SECONDS = 30.0
"""For which a program may save, before it is killed."""
FINISHED = "finished.json"
"""File of the result of a run, in its folder."""
Result = TypeVar("Result")
Item = TypeVar("Item")
Key = TypeVar("Key")


# --- command line ---------------------------------------------------------------------------------


def build_parser(description: str | None) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        description=description, formatter_class=form, allow_abbrev=False
    )


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1 up")
    return int(text)


def list_of(kind: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """Return an argparse type for comma-separated values."""

    def parse(text: str) -> list[Item]:
        try:
            return [kind(word) for word in text.split(",") if word]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: give numbers, such as 1,5") from None

    return parse


def one_of(known: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """Return an argparse type for names out of `known`. Their default should be all: ""."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(separator) if name.strip()]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: there are {f'{separator} '.join(known)}"
                )
        return names or list(known)

    return parse


def parse_settings(
    parser: argparse.ArgumentParser, words: Sequence[str], reserved: Collection[str] = ()
) -> Settings:
    """Parse `--section.key value` pairs for all runs. The benchmark sets `reserved` keys itself."""
    keys = [word.removeprefix("--") for word in words[::2]]
    known = all("." in key or key == "config" for key in keys)
    if len(words) % 2 or not known or not all(word.startswith("--") for word in words[::2]):
        parser.error(f"{' '.join(words)}: settings of the trainer look like --section.key value")
    for key in set(keys) & set(reserved):
        parser.error(f"--{key}: the table sets this itself; see --help")
    return dict(zip(keys, words[1::2], strict=True))


# --- the trainer ----------------------------------------------------------------------------------


def command_line(settings: Mapping[str, str]) -> list[str]:
    """Return command-line arguments for these settings on top of debug.toml."""
    pairs = {"config": "debug", **settings}
    return [word for key, value in pairs.items() for word in (f"--{key}", value)]


def load(settings: Mapping[str, str]) -> Config:
    """Return the configuration of these settings, or exit with its error message."""
    try:
        return from_command_line(command_line(settings))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


class CutError(Exception):
    """The time of a run is over. The same command continues it from its last checkpoint."""


def run_program(
    words: Sequence[str], log: Path, seconds: float = math.inf, **environment: str
) -> int:
    """Run a Python program to its end, with its output in `log`, and return its exit code.

    After so many seconds it is asked to save and stop, which raises CutError.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        return process.wait(None if seconds == math.inf else max(0.0, seconds))
    except subprocess.TimeoutExpired:
        raise CutError from None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def train(
    folder: Path, settings: Settings, *, seconds: float = math.inf, **environment: str
) -> list[Record]:
    """Run the trainer in `folder` to its end, and return its records.

    It continues from a checkpoint in `folder`, if there is one.
    """
    words = command_line(settings | {"run.folder": str(folder)})
    command = ["-m", "torchtitan_diloco", "train", *words]
    log = folder.with_suffix(".txt")
    if run_program(command, log, seconds, **environment):
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")
    return read_records(folder)


def read_records(folder: Path, worker: int = 0) -> list[Record]:
    """Return the records of a worker of a run, or as many as it has written so far."""
    path = folder / f"worker-{worker}/metrics.jsonl"
    return read_json_lines(path)[0] if path.exists() else []


def steps_of(records: Sequence[Record]) -> list[Record]:
    """Return the records of logged steps."""
    return [record for record in records if "kind" not in record]


# --- whole runs -----------------------------------------------------------------------------------


def train_kept(
    folder: Path,
    settings: Settings,
    *,
    seconds: float = math.inf,
    keep_checkpoints: bool = False,
    made_by: Record | None = None,
) -> Record:
    """Return the losses, speed and bytes of a run, which are kept in `folder`, and what its result
    says of the call that has trained it."""

    def measure() -> Record:
        started = time.monotonic()
        workers = settings.get("diloco.workers", "1")
        records = train(folder / "run", settings, seconds=seconds, NPROC=workers)
        for checkpoint in [] if keep_checkpoints else folder.glob("run/worker-*/step-*"):
            shutil.rmtree(checkpoint)
        seconds_taken = {"seconds": time.monotonic() - started}  # by the last call, if continued
        return summarize_run(records) | seconds_taken | (made_by or {})

    return kept(folder, settings, measure)


def summarize_run(records: Sequence[Record]) -> Record:
    """Return the last loss, the curve of all, the speed and the bytes of the records of a run."""
    start = next(record for record in records if record.get("kind") == "start")
    steps = [record for record in steps_of(records) if "speed/tokens_per_second" in record]
    tokens = {record["step"]: record["train/tokens"] for record in steps}
    step_tokens = steps[-1]["train/tokens"] / steps[-1]["step"]
    validations = {record["step"]: record for record in records if "loss/val" in record}
    end = validations[max(validations)]
    speeds = [record["speed/tokens_per_second"] for record in steps]
    sent = totals_of(records, streaming=True).get(SENT, 0.0)
    expected = end["step"] * baseline_bytes(start["parameters"], start["workers"])
    return {
        "loss": end["loss/val"],
        "bits_per_byte": end["loss/bits_per_byte"],
        "parameters": start["parameters"],
        "tokens": tokens.get(end["step"], round(end["step"] * step_tokens)),
        "curve": [
            [round(step * step_tokens), validation["loss/val"]]
            for step, validation in sorted(validations.items())
        ],
        # The first steps are slower.
        "tokens_per_second": statistics.median(speeds[len(speeds) // 2 :]),
        "peak_tokens_per_second": max(speeds),
        "saving": expected / sent if sent else 0.0,
    }


def run_folder(out: Path, name: object, settings: Settings) -> Path:
    """Return the folder of a run, which depends on its settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{re.sub(r'[^A-Za-z0-9.]+', '-', str(name))}-{digest}"


def train_all(
    out: Path,
    runs: Mapping[Key, Settings],
    jobs: int = 1,
    seconds: float = math.inf,
    *,
    keep_checkpoints: bool = False,
    made_by: Record | None = None,
) -> dict[Key, Record]:
    """Train runs in their order, `jobs` at a time, without those that do not end in `seconds`.

    `made_by`: what the results of the runs that this call trains say of it.
    """
    end = time.monotonic() + seconds

    def train_one(key: Key) -> Record | None:
        try:
            folder = run_folder(out, key, runs[key])
            result = train_kept(
                folder,
                runs[key],
                seconds=end - time.monotonic(),
                keep_checkpoints=keep_checkpoints,
                made_by=made_by,
            )
        except CutError:
            print(f"{key}: cut", flush=True)
            return None
        print(f"{key}: {result['loss']:.4f}", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        results = dict(zip(runs, pool.map(train_one, runs), strict=True))
    return {key: result for key, result in results.items() if result is not None}


# --- measuring ------------------------------------------------------------------------------------


def take_turns(
    tasks: Mapping[str, Callable[[], Result]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[Result]]:
    """Call the tasks in turns and return their results by name, without warm-up rounds.

    With turns, a drift in the speed of the machine affects all tasks alike.
    """
    results: dict[str, list[Result]] = {name: [] for name in tasks}
    for number in range(warm_up + rounds):
        for name, task in tasks.items():
            result = task()
            if number >= warm_up:
                results[name].append(result)
    return results


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """CPU time of all threads of this process, which does not depend on other programs."""


def timed(task: Callable[[], object], device: torch.device = CPU) -> Seconds:
    """Time a task, including its work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    cpu = time.process_time()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Seconds(time.perf_counter() - started, time.process_time() - cpu)


def kept(folder: Path, settings: Mapping[str, Any], measure: Callable[[], Record]) -> Record:
    """Return the result of `measure`, or the one that a finished run has saved in `folder`."""
    path = folder / FINISHED
    if not path.exists():
        result = measure()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings, "result": result}, indent=2))
    saved: Record = json.loads(path.read_text())
    if saved["settings"] != settings:
        raise SystemExit(f"{folder} holds a run with other settings: choose another --out")
    return dict(saved["result"])


# --- tables ---------------------------------------------------------------------------------------


def summary(
    values: Sequence[float],
    form: str = ",.3f",
    factor: float = 1.0,
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> str:
    """Return "median (min ... max)", or only the value if there is just one."""
    low, center, high = (f"{factor * of(values):{form}}" for of in (min, middle, max))
    return center if low == high else f"{center} ({low} ... {high})"


def against(losses: Mapping[int, float], control: Mapping[int, float]) -> str:
    """Compare losses with those of the control of the same seed."""
    percentages = [100 * (losses[seed] / control[seed] - 1) for seed in losses if seed in control]
    return f"{summary(percentages, '+.2f', middle=statistics.mean)} %" if percentages else ""


def print_table(title: str, header: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table. `header` has the column names, separated by " | "."""
    print(f"\n{title}\n\n{markdown_table(header.split(' | '), rows)}", flush=True)
