"""The records of a run as the report reads them: metrics.jsonl and config.toml.

docs/report.md defines the records. A run may still be going on, so the last line may be incomplete.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli
from numpy.typing import NDArray

from torchtitan_diloco.config.loader import flatten
from torchtitan_diloco.utils import number, read_json_lines

METRICS = "metrics.jsonl"
TRAINING_LOSS = "train/loss_nats_per_token_global"
VALIDATION_LOSS = "validation/loss_nats_per_token_global"
TOKENS = "train/tokens_global"
ELAPSED_SECONDS = "time/elapsed_seconds"
SENT_BYTES = "diloco/sent_bytes_sum_over_ranks"

Record = Mapping[str, Any]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """Records of a run. Numbers that are not known are NaN."""

    name: str
    """Unique among the runs of a report."""
    folder: Path
    steps: Sequence[Record]
    """One record per step, in order: what was logged at the step and validated after it."""
    rounds: Sequence[Record]
    """In the `workers` of each, what is not a table of a worker is an empty one."""
    summary: Record
    """Empty if the run has not ended or was resumed after its end."""
    settings: Mapping[str, Any]
    """Dotted key -> value. Empty without a config.toml."""
    unreadable: int
    """Lines that are not a record; an incomplete last line is not counted."""

    def curve(self, key: str) -> tuple[Array, Array]:
        """Return the steps that have a value of this key, and the values."""
        known = [record for record in self.steps if record.get(key) is not None]
        steps, values = ([number(record[name]) for record in known] for name in ("step", key))
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def last(self, key: str) -> tuple[int, float]:
        """Return the last step that has a value of this key and the value: (0, NaN) if none has."""
        steps, values = self.curve(key)
        return (int(steps[-1]), float(values[-1])) if steps.size else (0, np.nan)

    def over(self, x: str, key: str) -> tuple[Array, Array]:
        """Return the values of a key over another one that counts from 0, such as the tokens."""
        (known, counted), (steps, values) = self.curve(x), self.curve(key)
        return np.asarray(np.interp(steps, [0.0, *known], [0.0, *counted])), values

    def total(self, key: str) -> float:
        return of_known(np.sum, self.curve(key)[1])

    def of_rounds(self, key: str) -> Array:
        """Return a value of every round."""
        return np.array([number(record.get(key)) for record in self.rounds])

    def of_workers(self, key: str) -> Array:
        """Return a value of every (round, worker)."""
        rows = [[number(table.get(key)) for table in record["workers"]] for record in self.rounds]
        width = max(map(len, rows), default=0)
        padded = [row + [np.nan] * (width - len(row)) for row in rows]
        return np.array(padded, dtype=float).reshape(len(rows), width)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def workers(self) -> int:
        """Number of workers, 0 if it is not known."""
        configured = self.settings.get("diloco.workers")
        if isinstance(configured, int):
            return configured
        return len(self.rounds[-1]["workers"]) if self.rounds else 0

    @property
    def parameters(self) -> float:
        """Parameters of the model: the sum over its fragments once all have been exchanged."""
        sizes = {record.get("fragment"): number(record.get("parameters")) for record in self.rounds}
        return sum(sizes.values()) if len(self.rounds) > len(sizes) else np.nan


def of_known(function: Callable[[Array], Any], values: Array) -> float:
    """Return a mean, median or sum of the finite values, NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(function(known)) if known.size else np.nan


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders or metrics files. Raise ValueError for what is not a run."""
    files = list(dict.fromkeys(map(_metrics_file, paths)))
    folders = [file.resolve().parent.name for file in files]
    return [
        # A path is unique where the name of the folder is not.
        _read_run(file, folder if folders.count(folder) == 1 else str(file))
        for file, folder in zip(files, folders, strict=True)
    ]


def _metrics_file(path: Path) -> Path:
    file = path if path.is_file() else path / METRICS
    if file.is_file():
        return file
    problem = f"has no {METRICS}" if path.is_dir() else "is not a folder"
    raise ValueError(f"RUN = {path} {problem}: give the folder of a run (outputs/NAME-DATE-TIME)")


def _read_run(file: Path, name: str) -> Run:
    steps: dict[int, dict[str, Any]] = {}
    rounds: list[Record] = []
    summary: Record = {}
    records, unreadable = read_json_lines(file)
    for record in records:
        match record:
            case {"kind": "summary"}:
                summary = record
            case {"kind": "round", "step": int()}:
                tables = record.get("workers") or []
                tables = [table if isinstance(table, dict) else {} for table in tables]
                rounds.append({**record, "workers": tables})
            case {"kind": _, "step": int()}:
                pass  # of a later version
            case {"step": int(step)}:
                steps.setdefault(step, {}).update(record)
            case _:
                unreadable += 1
    if unreadable and not (steps or rounds or summary):
        raise ValueError(
            f"RUN = {file} has no line that is a record of a run: give a run's {METRICS} or folder"
        )
    if steps and not number(summary.get("step")) >= max(steps):
        summary = {}
    ordered = [steps[step] for step in sorted(steps)]
    try:  # as they are written, so that settings of another version are no error
        text = (file.parent / "config.toml").read_text(encoding="utf-8")
        settings = dict(flatten(tomli.loads(text)))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError):
        settings = {}
    return Run(name, file.parent, ordered, rounds, summary, settings, unreadable)
