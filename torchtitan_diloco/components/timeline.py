"""Timeline of rounds: what both threads of every worker did when, and its trace file.

The moments of round records are on worker 0's clock, up to the latency of a header. Where two
phases of a thread would overlap, the later one starts where the earlier one ends.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torchtitan_diloco.components.records import RoundRecord

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
"""Lane, start, end and colour. Moments are fields of WorkerRound without `_at_seconds`."""
ROUND_KEYS = ("fragment", "fragment_name", "outer_round")
"""Attributes of a round that stand beside each of its phases in a trace file."""
PHASE_COLOURS = {"computing": "band"} | {name: phase[-1] for name, phase in PHASES.items()}


class Phase(NamedTuple):
    worker: int
    lane: Lane
    start_seconds: float
    end_seconds: float
    name: str
    """A key of PHASES."""
    round: "RoundRecord"

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def phases(rounds: Sequence["RoundRecord"]) -> list[Phase]:
    """Return the phases whose moments are known, sorted by worker, lane and time."""
    found = [phase for record in rounds for phase in _phases_of_round(record)]
    found.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = []
    for _, lane in groupby(found, key=lambda phase: (phase.worker, phase.lane)):
        latest = -math.inf
        for phase in lane:
            start = max(phase.start_seconds, latest)
            latest = max(phase.end_seconds, start)
            ordered.append(phase._replace(start_seconds=start, end_seconds=latest))
    return ordered


def _phases_of_round(record: "RoundRecord") -> Iterator[Phase]:
    for worker, table in enumerate(record.workers):
        for name, (lane, *moments, _) in PHASES.items():
            start, end = (getattr(table, f"{moment}_at_seconds") for moment in moments)
            if -math.inf < start <= end < math.inf:
                yield Phase(worker, lane, start, end, name, record)


def write_trace(path: Path, rounds: Sequence["RoundRecord"]) -> None:
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
        about = {key: getattr(phase.round, key) for key in ROUND_KEYS}
        sent = phase.round.workers[phase.worker].sent_bytes
        yield {
            "ph": "X",
            "name": f"{phase.name}, fragment {phase.round.fragment}",
            "cat": phase.lane,
            "pid": phase.worker,
            "tid": LANES.index(phase.lane),
            "ts": phase.start_seconds * 1e6,  # microseconds
            "dur": phase.seconds * 1e6,
            "args": about | ({"sent_bytes": sent} if math.isfinite(sent) else {}),
        }
