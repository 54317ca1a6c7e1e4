"""Read the records of runs: metrics.jsonl, which docs/report.md defines, and config.toml."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli
from numpy.typing import NDArray

from torchtitan_diloco.components.records import (
    Record,
    RoundRecord,
    Summary,
    from_record,
    number,
    read_json_lines,
)
from torchtitan_diloco.components.summary import all_reduce_bytes
from torchtitan_diloco.config.schema import flatten
from torchtitan_diloco.log import UserError

METRICS = "metrics.jsonl"
TRAINING_LOSS = "train/loss_nats_per_token_global"
VALIDATION_LOSS = "validation/loss_nats_per_token_global"
TOKENS = "train/tokens_global"
ELAPSED_SECONDS = "time/elapsed_seconds"
SENT_BYTES = "diloco/sent_bytes_sum_over_ranks"
SHARES = {
    "compute": "time/share_compute_percent_mean_over_ranks",
    "data": "time/share_data_percent_mean_over_ranks",
    "exposed communication": "time/share_exposed_communication_percent_mean_over_ranks",
    "other": "time/share_other_percent_mean_over_ranks",
}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """Records of a run. Numbers that are not known are NaN."""

    name: str
    """Unique among the runs of a report."""
    folder: Path
    steps: Sequence[Record]
    """One record for each step, in order, with the validation after the step."""
    rounds: Sequence[RoundRecord]
    summary: Summary | None
    """None if the run has not ended or was resumed after its end."""
    settings: Mapping[str, Any]
    """Dotted key -> value. Empty without a config.toml."""
    unreadable: int
    """Number of lines that are not a record, without an incomplete last line."""

    def curve(self, key: str) -> tuple[Array, Array]:
        """Return the steps that have a value of this key, and the values."""
        known = [record for record in self.steps if record.get(key) is not None]
        steps, values = ([number(record[name]) for record in known] for name in ("step", key))
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def last(self, key: str) -> tuple[int, float]:
        """Return the last step that has a value of this key, and the value: else 0 and NaN."""
        steps, values = self.curve(key)
        return (int(steps[-1]), float(values[-1])) if steps.size else (0, np.nan)

    def total(self, key: str) -> float:
        return of_known(np.sum, self.curve(key)[1])

    def of_rounds(self, field: str) -> Array:
        values = (getattr(record, field) for record in self.rounds)
        return np.array([np.nan if value is None else value for value in values], dtype=float)

    def of_workers(self, field: str) -> Array:
        """Return a field as [rounds, workers]."""
        rows = [[getattr(worker, field) for worker in record.workers] for record in self.rounds]
        columns = list(zip_longest(*rows, fillvalue=np.nan))  # a resumed run may have fewer workers
        return np.array(columns, dtype=float).reshape(len(columns), len(rows)).T

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def is_island(self) -> bool:
        """Whether the records are those of one island of the run."""
        return bool(self.settings.get("islands.name"))

    @property
    def workers(self) -> int:
        """Number of workers of the run, 0 if not known. Of islands, the most that shared a round,
        or so many as begin together."""
        workers = self.settings.get("islands.begin") or self.settings.get("diloco.workers")
        if not isinstance(workers, int):
            return len(self.rounds[-1].workers) if self.rounds else 0
        if not self.is_island:
            return workers
        return max([workers, *(record.participants for record in self.rounds)])

    @property
    def recorded_workers(self) -> int:
        """Number of workers that the records cover, 0 if not known."""
        return 1 if self.is_island else self.workers

    @property
    def parameters(self) -> float:
        """Parameters of the model, NaN until all fragments have been exchanged."""
        sizes = {record.fragment: record.parameters for record in self.rounds}
        # A second round of one fragment comes after the first of all.
        return sum(sizes.values()) if len(self.rounds) > len(sizes) else np.nan

    def data_parallel_bytes(self, step: float) -> float:
        """Return the bytes that a worker would have sent with data parallelism up to `step`."""
        if self.summary is not None and self.summary.step > self.summary.counted_after_step:
            start, end = self.summary.counted_after_step, self.summary.step
            total = self.summary.data_parallel_bytes_per_worker
            return total * max(0.0, step - start) / (end - start)
        if self.workers <= 1:
            return np.nan
        return all_reduce_bytes(self.parameters, self.workers) * step

    def mean_share(self, key: str) -> float:
        """Return the mean of a share over the intervals, weighted by their lengths."""
        keys = (key, "time/wall_seconds_mean_over_ranks")
        rows = [[number(record.get(name)) for name in keys] for record in self.steps]
        known = [row for row in rows if np.isfinite(row).all() and row[1] > 0]
        if not known:
            return np.nan
        shares, seconds = np.transpose(known)
        return float(np.average(shares, weights=seconds))


def of_known(function: Callable[[Array], Any], values: Array) -> float:
    """Return a mean, median or sum of the finite values, or NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(function(known)) if known.size else np.nan


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders or metrics files."""
    files = list(dict.fromkeys(map(_metrics_file, paths)))
    folders = [file.resolve().parent.name for file in files]
    return [  # with the path as the name, if several folders have the same name
        _read_run(file, folder if folders.count(folder) == 1 else str(file))
        for file, folder in zip(files, folders, strict=True)
    ]


def _metrics_file(path: Path) -> Path:
    file = path if path.is_file() else path / METRICS
    if file.is_file():
        return file
    problem = f"has no {METRICS}" if path.is_dir() else "is not a folder"
    raise UserError(f"RUN = {path} {problem}: give the folder of a run (outputs/NAME-DATE-TIME)")


def _read_run(file: Path, name: str) -> Run:
    steps: dict[int, dict[str, Any]] = {}
    rounds: list[RoundRecord] = []
    summary: Summary | None = None
    records, unreadable = read_json_lines(file)
    for record in records:
        try:
            match record:
                case {"kind": "summary"}:
                    summary = from_record(Summary, record)
                case {"kind": "round"}:
                    rounds.append(from_record(RoundRecord, record))
                case {"kind": _}:
                    pass  # of another version
                case {"step": int(step)}:
                    steps.setdefault(step, {}).update(record)
                case _:
                    unreadable += 1
        except msgspec.ValidationError:
            unreadable += 1
    if unreadable and not (steps or rounds or summary):
        raise UserError(
            f"RUN = {file} has no line that is a record of a run: give a run's {METRICS} or folder"
        )
    if summary and steps and summary.step < max(steps):
        summary = None
    ordered = [steps[step] for step in sorted(steps)]
    try:  # without checks, so that settings of another version are no error
        text = (file.parent / "config.toml").read_text(encoding="utf-8")
        settings = flatten(tomli.loads(text))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError):
        settings = {}
    return Run(name, file.parent, ordered, rounds, summary, settings, unreadable)
