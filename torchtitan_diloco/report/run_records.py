"""What a run has written, as a report reads it: metrics.jsonl and config.toml. docs/report.md defines the records.

A run may be going on, so the last line may be cut; it may be old and lack keys; it may have been taken up again.
"""

import difflib
import math
import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan_diloco.config.schema import format_value
from torchtitan_diloco.utils import read_json_lines

METRICS = "metrics.jsonl"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    name: str
    """To tell it from the other runs of the page."""
    folder: Path
    steps: Sequence[Record]
    """One for each step that has records, in their order: what was logged and what was validated after it."""
    rounds: Sequence[Record]
    summary: Record
    """Empty where the run has not ended, or has been taken up again since."""
    settings: Mapping[str, str]
    """Key -> value as TOML writes it. Empty where there is no config.toml."""
    unreadable: int
    """Lines that are no record; that of a run which is writing its last line is not counted."""

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever the value is known; it may be no finite number."""
        pairs = ((int(record["step"]), number(record.get(key))) for record in self.steps)
        return [(step, value) for step, value in pairs if value is not None]

    def total(self, key: str) -> float | None:
        values = [value for _, value in self.curve(key) if math.isfinite(value)]
        return math.fsum(values) if values else None

    def last(self, key: str) -> tuple[int, float] | None:
        curve = self.curve(key)
        return curve[-1] if curve else None

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def workers(self) -> int | None:
        told = self.settings.get("diloco.workers")
        if told is not None and told.isdigit():
            return int(told)
        return len(self.rounds[-1].get("workers") or []) or None if self.rounds else None

    @property
    def parameters(self) -> float | None:
        """Of the model: the sum over its fragments, once all have been exchanged."""
        by_fragment = {
            record.get("fragment"): number(record.get("parameters")) for record in self.rounds
        }
        cycle_is_whole = len(self.rounds) > len(by_fragment)
        sizes = [size for size in by_fragment.values() if size is not None]
        return sum(sizes) if cycle_is_whole and len(sizes) == len(by_fragment) else None

    def tokens_at(self, step: float) -> float:
        return _between(self._tokens, step)

    def seconds_at(self, step: float) -> float:
        return _between(self._seconds, step)

    @cached_property
    def _tokens(self) -> list[tuple[int, float]]:
        return [(0, 0.0), *self.curve("train/tokens_global")]

    @cached_property
    def _seconds(self) -> list[tuple[int, float]]:
        return [(0, 0.0), *self.curve("time/elapsed_seconds")]


def number(value: object) -> float | None:
    """JSON has no number for NaN and the infinities: they are written as text. null, or anything else, is not known."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") and isinstance(value, str) else None


def open_runs(paths: Sequence[Path]) -> list[Run]:
    files = [_metrics_file(path) for path in paths]
    return [_read_run(file, name) for file, name in zip(files, _names(files), strict=True)]


def _metrics_file(path: Path) -> Path:
    file = path if path.is_file() else path / METRICS
    if file.is_file():
        return file
    what = f"has no {METRICS}" if path.is_dir() else "is no folder"
    folders = sorted(
        {
            found.parent
            for place in (Path("outputs"), path.parent)
            for found in place.glob(f"*/{METRICS}")
        }
    )
    by_name = {folder.name: folder for folder in reversed(folders)}
    nearest = difflib.get_close_matches(path.name, by_name, n=3, cutoff=0.2)
    hint = f"; nearest: {', '.join(str(by_name[name]) for name in nearest)}" if nearest else ""
    raise ValueError(
        f"RUN = {path} {what}: give the folder that a run writes, which is outputs/NAME-DATE-TIME{hint}"
    )


def _names(files: Sequence[Path]) -> list[str]:
    """The folder's name, with as much of what is around it as tells one run from the others."""
    names = []
    for file in files:
        folder = file.resolve().parent
        name = folder.name if file.name == METRICS else f"{folder.name}/{file.stem}"
        others = [other.resolve().parent for other in files if other != file]
        if any(other != folder and other.name == folder.name for other in others):
            name = f"{folder.parent.name}/{name}"
        names.append(name)
    return [
        name if names.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(names, start=1)
    ]


def _read_run(file: Path, name: str) -> Run:
    steps: dict[int, dict[str, Any]] = {}
    rounds: list[Record] = []
    summary: Record = {}
    records, unreadable = read_json_lines(file)
    for record in records:
        if record.get("kind") == "summary":
            summary = record
        elif not isinstance(record.get("step"), int):
            unreadable += 1
        elif record.get("kind") == "round":
            rounds.append(record)
        elif "kind" not in record:
            steps.setdefault(record["step"], {}).update(record)
    if unreadable and not (steps or rounds or summary):
        raise ValueError(
            f"RUN = {file} has no line that is a record of a run: give the {METRICS} of a run, or its folder"
        )
    ordered = [steps[step] for step in sorted(steps)]
    if steps and (number(summary.get("step")) or 0) < max(steps):
        summary = {}
    return Run(
        name,
        file.parent,
        ordered,
        rounds,
        summary,
        _settings(file.parent / "config.toml"),
        unreadable,
    )


def _settings(path: Path) -> dict[str, str]:
    """As they are written: a setting that this version does not have is no obstacle to reading about it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}
    return dict(_flat(table, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, _written(value)))
    return found


def _written(value: object) -> str:
    return format_value(tuple(map(_as_tuple, value)) if isinstance(value, list) else value)


def _as_tuple(value: object) -> object:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _between(known: Sequence[tuple[int, float]], step: float) -> float:
    """On the straight line between the steps around it; behind the last, its value."""
    place = bisect_left(known, (step, -math.inf))
    if place == len(known):
        return known[-1][1]
    if known[place][0] == step or place == 0:
        return known[place][1]
    (before, low), (after, high) = known[place - 1], known[place]
    return low + (step - before) / (after - before) * (high - low)
