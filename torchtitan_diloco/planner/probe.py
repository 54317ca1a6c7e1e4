"""Read link and step times from a finished run, or measure them by a short run."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from torchtitan_diloco.components.records import Conditions, Summary, from_record
from torchtitan_diloco.utils import read_json_lines

SYNC_EVERY = 4
STEPS = 5 * SYNC_EVERY
"""Enough to exchange every fragment four times."""
SETTINGS = {
    "training.steps": STEPS,
    "training.tokens": 0,
    "training.tokens_per_parameter": 0,
    "training.stop_after": 0,
    "diloco.method": "streaming",
    "diloco.sync_every": SYNC_EVERY,
    "validation.every": 0,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.at_end": "false",
    "checkpoint.resume": "never",
    "metrics.log_every": 1,
    "metrics.tensorboard": "false",
    "metrics.wandb": "",
}


def conditions_of_run(run: Path) -> Conditions:
    """Read link and step times from the folder or metrics.jsonl of a finished run."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f"{run} has no metrics.jsonl: give the folder of a run")
    records, _ = read_json_lines(path)
    if not records or records[-1].get("kind") != "summary":
        raise ValueError(f"{path} has no summary at its end, so its run has not ended: wait for it")
    try:
        observed = from_record(Summary, records[-1]).observed
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{path}: its summary cannot be read ({error}): give another run"
        ) from None
    if observed is None:
        raise ValueError(
            f"the run of {path} measured no links: give a run of several workers in which every "
            "fragment was exchanged"
        )
    return observed


def probe(arguments: Sequence[str], delay: int) -> Conditions | None:
    """Measure link and step times by a short run with these command-line arguments.

    Return None on all nodes but the first, where the run writes its records.
    """
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        run = Path(folder) / "run"
        settings = SETTINGS | {
            "run.folder": run,
            "diloco.overlap.delay": min(delay, SYNC_EVERY - 1),
        }
        flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "torchtitan_diloco.launch", *arguments, *flags]
        print(f"probing links and steps in {STEPS} steps", file=sys.stderr, flush=True)
        outcome = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if outcome.returncode:
            last = "\n  ".join(outcome.stdout.strip().splitlines()[-8:])
            raise ValueError(f"the probe failed with exit code {outcome.returncode}:\n  {last}")
        return conditions_of_run(run) if (run / "metrics.jsonl").exists() else None
