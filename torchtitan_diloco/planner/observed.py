"""Links, steps and coding as a run has met them: its summary record, or a short run that is made for the purpose."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_diloco.planner.conditions import Conditions, Links
from torchtitan_diloco.utils import read_json_lines

PROBE_SYNC_EVERY = 4
PROBE_STEPS = 5 * PROBE_SYNC_EVERY
"""Of a probe: every fragment is exchanged four times."""

PROBE_SETTINGS = {
    "training.steps": PROBE_STEPS,
    "training.tokens": 0,
    "training.tokens_per_parameter": 0,
    "training.stop_after": 0,
    "diloco.method": "streaming",
    "diloco.sync_every": PROBE_SYNC_EVERY,
    "validation.every": 0,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.at_end": "false",
    "checkpoint.resume": "never",
    "metrics.log_every": 1,
    "metrics.tensorboard": "false",
}


def conditions_of_run(run: Path) -> Conditions:
    """Of a finished run's folder, or its metrics.jsonl."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"{run} is no folder of a run, as it has no metrics.jsonl: give one, such as outputs/NAME-DATE-TIME"
        )
    records, _ = read_json_lines(path)
    if (
        not records or records[-1].get("kind") != "summary"
    ):  # one before the last is that of a run that was taken up again
        raise ValueError(
            f"{path} does not end with a summary, so its run has not ended: wait for it, or give another run"
        )
    observed = records[-1].get("observed")
    if observed is None:
        raise ValueError(
            f"the run of {path} has met no links: a run of several workers in which every fragment had its turn tells of them "
            "(over NCCL: a run of two workers)"
        )
    try:
        return conditions_from(observed)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: what its summary says of links and steps cannot be read ({error!r}): give another run"
        ) from None


def conditions_from(observed: dict[str, Any]) -> Conditions:
    """JSON has no infinity: it is text there."""
    links, codec = observed["links"], str(observed.get("codec", ""))
    return Conditions(
        Links(
            tuple(map(float, links["up"])),
            tuple(map(float, links["down"])),
            float(links["latency_seconds"]),
        ),
        tuple(map(float, observed["step_seconds"])),
        jitter=float(observed["jitter"]),
        coding_bytes_per_second=float(observed["coding_bytes_per_second"])
        if codec
        else math.inf,  # an older run: of what?
        outer_bytes_per_second=float(observed["outer_bytes_per_second"]),
        codec=codec,
    )


def probe(words: Sequence[str], delay: int) -> Conditions | None:
    """A short run with these words of a command line, started as any run is: on several nodes the same command on each. None on
    nodes other than the first, which gets the answer."""
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        chosen = PROBE_SETTINGS | {
            "run.folder": f"{folder}/run",
            "diloco.overlap.delay": min(delay, PROBE_SYNC_EVERY - 1),
        }
        settings = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "torchtitan_diloco.launch", *words, *settings]
        print(
            f"probing links and steps: {PROBE_STEPS} steps, every fragment exchanged four times",
            file=sys.stderr,
            flush=True,
        )
        outcome = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if outcome.returncode:
            last = "\n  ".join(outcome.stdout.strip().splitlines()[-8:])
            raise ValueError(
                f"the probe's run ended with {outcome.returncode}; mend what it says, and probe again:\n  {last}"
            )
        run = Path(folder) / "run"
        return conditions_of_run(run) if (run / "metrics.jsonl").exists() else None


def run_summary(
    plan: Any,
    config: Any,
    *,
    ranks: int,
    step: int,
    validated: tuple[int, float] | None,
    totals: dict[str, float],
    totals_after: int,
    rounds: Any,
) -> dict[str, Any]:
    from torchtitan_diloco.planner.summary import summary_record
    from torchtitan_diloco.planner.utilisation import Observed

    observed = Observed(config.workers, ranks // config.workers)
    for record in rounds:
        observed.add(record)
    return summary_record(plan, config, ranks, step, validated, totals, totals_after, observed)


def log_summary(record: dict[str, Any]) -> None:
    from torchtitan_diloco.planner import summary

    summary.log_summary(record)
