"""Timeline of rounds: what both threads of every worker did when, and its trace file.

The moments of round records are on worker 0's clock, up to the latency of a header. Where two
phases of a thread would overlap, the later one starts where the earlier one ends.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torchtitan_diloco.utils import number

Lane = Literal["training", "exchange"]
"""The training thread, and the thread that exchanges in the background."""
LANES: tuple[Lane, ...] = ("training", "exchange")

PHASES: dict[str, tuple[Lane, str, str, str]] = {
    "taking": ("training", "due", "taken", "series-5"),
    "waiting": ("training", "asked", "arrived", "series-2"),
    "merging": ("training", "arrived", "applied", "series-4"),
    "encoding": ("exchange", "begun", "encoded", "series-1"),
    "waiting for others": ("exchange", "encoded", "heard", "series-8"),
    "transfer": ("exchange", "heard", "received", "series-3"),
    "outer step": ("exchange", "received", "ready", "series-6"),
}
"""Lane, start, end and colour. Moments are keys of a worker's record without `_at_seconds`."""
PHASE_COLOURS = {"computing": "band"} | {name: phase[-1] for name, phase in PHASES.items()}


@dataclass(frozen=True)
class Phase:
    worker: int
    lane: Lane
    name: str
    """A key of PHASES."""
    start_seconds: float
    end_seconds: float
    fragment: int
    fragment_name: str
    outer_round: int
    sent_bytes: float
    """By this worker in the whole round. NaN is not known."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def phases(rounds: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Return the phases of round records, sorted by worker, lane and time.

    Phases without known moments, which damaged records have as well, are left out.
    """
    found = [phase for record in rounds for phase in _phases_of_round(record)]
    found.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = []
    for _, lane in groupby(found, key=lambda phase: (phase.worker, phase.lane)):
        latest = -math.inf
        for phase in lane:
            start = max(phase.start_seconds, latest)
            latest = max(phase.end_seconds, start)
            ordered.append(replace(phase, start_seconds=start, end_seconds=latest))
    return ordered


def _phases_of_round(record: Mapping[str, Any]) -> Iterator[Phase]:
    fragment, outer_round = (int(record.get(key) or 0) for key in ("fragment", "outer_round"))
    about = fragment, str(record.get("fragment_name") or ""), outer_round
    for worker, table in enumerate(record.get("workers") or []):
        if not isinstance(table, Mapping):
            continue
        sent_bytes = number(table.get("sent_bytes"))
        for name, (lane, *moments, _) in PHASES.items():
            start, end = (number(table.get(f"{moment}_at_seconds")) for moment in moments)
            if -math.inf < start <= end < math.inf:
                yield Phase(worker, lane, name, start, end, *about, sent_bytes)


def write_trace(path: Path, rounds: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace file for https://ui.perfetto.dev and chrome://tracing.

    It is renamed when it is complete, so that it can be opened during the run.
    """
    trace = {"traceEvents": list(_trace_events(phases(rounds))), "displayTimeUnit": "ms"}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(trace), encoding="utf-8")
    new.replace(path)


def _trace_events(found: Sequence[Phase]) -> Iterator[dict[str, Any]]:
    """Yield a process for each worker, a thread for each of its lanes, and the phases."""
    for worker in sorted({phase.worker for phase in found}):
        process = {"ph": "M", "pid": worker}
        yield {**process, "name": "process_name", "args": {"name": f"worker {worker}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": worker}}
        for tid, thread in enumerate(("training thread", "exchange in the background")):
            yield {**process, "name": "thread_name", "tid": tid, "args": {"name": thread}}
    for phase in found:
        about = {key: getattr(phase, key) for key in ("fragment", "fragment_name", "outer_round")}
        if math.isfinite(phase.sent_bytes):
            about["sent_bytes"] = phase.sent_bytes
        yield {
            "ph": "X",
            "name": f"{phase.name}, fragment {phase.fragment}",
            "cat": phase.lane,
            "pid": phase.worker,
            "tid": LANES.index(phase.lane),
            "ts": phase.start_seconds * 1e6,  # microseconds
            "dur": phase.seconds * 1e6,
            "args": about,
        }
