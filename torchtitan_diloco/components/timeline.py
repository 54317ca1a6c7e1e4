"""Timeline of rounds: what both threads of every worker did when, as data, trace file and figure.

Every worker's moments are on a clock of its own. The last header of a round arrives on all workers
at the same time, but for its latency, so a worker's moments are shifted until that moment coincides
with worker 0's. Durations do not change, except where two phases of a thread would overlap: then
the later phase starts where the earlier one ends.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lane = Literal["training", "exchange"]
"""The training thread, and the thread that exchanges in the background."""
LANES: tuple[Lane, ...] = ("training", "exchange")

PHASES: dict[str, tuple[Lane, str, str, str]] = {
    "taking": ("training", "due", "taken", "#936500"),
    "waiting": ("training", "asked", "arrived", "#c24a17"),
    "merging": ("training", "arrived", "applied", "#8d4fa8"),
    "encoding": ("exchange", "begun", "encoded", "#0b62b0"),
    "waiting for others": ("exchange", "encoded", "heard", "#98a2ae"),
    "transfer": ("exchange", "heard", "received", "#1b7f53"),
    "outer step": ("exchange", "received", "ready", "#0f7796"),
}
"""Lane, start, end and colour. Moments are keys of a worker's record without `_at_seconds`."""
PHASE_NAMES = tuple(PHASES)
COMPUTE_COLOUR = "#dde4ec"


@dataclass(frozen=True)
class Phase:
    worker: int
    lane: Lane
    name: str
    """One of PHASE_NAMES."""
    fragment: int
    fragment_name: str
    outer_round: int
    start_seconds: float
    """On worker 0's clock. The clock of a resumed run continues where it had stopped."""
    end_seconds: float
    sent_bytes: float | None = None
    """By this worker in the whole round."""
    received_bytes: float | None = None

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    def shifted(self, seconds: float) -> "Phase":
        start, end = self.start_seconds + seconds, self.end_seconds + seconds
        return replace(self, start_seconds=start, end_seconds=end)


def phases(rounds: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Return the phases of round records, sorted by worker, lane and time.

    The records are in the order of metrics.jsonl. Phases without known moments are left out.
    """
    found: list[Phase] = []
    for session in _sessions(rounds):
        start = min((phase.start_seconds for phase in session), default=0.0)
        end = max((phase.end_seconds for phase in found), default=start)
        found += [phase.shifted(max(0.0, end - start)) for phase in session]
    found.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = found[:1]
    for phase in found[1:]:
        before = ordered[-1]
        if (before.worker, before.lane) == (phase.worker, phase.lane):
            start = max(phase.start_seconds, before.end_seconds)
            end = max(phase.end_seconds, start)
            phase = replace(phase, start_seconds=start, end_seconds=end)
        ordered.append(phase)
    return ordered


def _sessions(rounds: Sequence[Mapping[str, Any]]) -> Iterator[list[Phase]]:
    """Yield the phases between two restarts, which is where worker 0's clock goes back."""
    session: list[Phase] = []
    shifts, latest = {0: 0.0}, -math.inf
    for record in rounds:
        workers = [_numbers(worker) for worker in record.get("workers") or []]
        first = workers[0] if workers else {}
        moment = first.get("applied_at_seconds", first.get("due_at_seconds"))
        if moment is not None and moment <= latest:
            yield session
            session, shifts = [], {0: 0.0}
        latest = latest if moment is None else moment
        for worker, numbers in enumerate(workers):
            if "heard_at_seconds" in first and "heard_at_seconds" in numbers:
                shifts[worker] = first["heard_at_seconds"] - numbers["heard_at_seconds"]
            if worker in shifts:
                own = _phases_of_worker(record, worker, numbers)
                session += [phase.shifted(shifts[worker]) for phase in own]
    yield session


def _numbers(worker: object) -> dict[str, float]:
    """Return the finite numbers of a worker. The rest of a record is null, text or damaged."""
    items = worker.items() if isinstance(worker, Mapping) else ()
    return {key: n for key, n in items if isinstance(n, int | float) and math.isfinite(n)}


def _phases_of_worker(
    record: Mapping[str, Any], worker: int, numbers: Mapping[str, float]
) -> Iterator[Phase]:
    fragment, outer_round = (int(record.get(key) or 0) for key in ("fragment", "outer_round"))
    identity = fragment, str(record.get("fragment_name") or ""), outer_round
    sizes = numbers.get("sent_bytes"), numbers.get("received_bytes")
    for name, (lane, start_name, end_name, _) in PHASES.items():
        start = numbers.get(f"{start_name}_at_seconds", math.nan)
        end = numbers.get(f"{end_name}_at_seconds", math.nan)
        if start <= end:
            yield Phase(worker, lane, name, *identity, start, end, *sizes)


def chrome_trace_events(found: Sequence[Phase]) -> list[dict[str, Any]]:
    """Return the events of a trace: a process for each worker, a thread for each of its lanes."""
    events: list[dict[str, Any]] = []
    for worker in sorted({phase.worker for phase in found}):
        process = {"ph": "M", "pid": worker}
        name, order = {"name": f"worker {worker}"}, {"sort_index": worker}
        events.append({**process, "name": "process_name", "args": name})
        events.append({**process, "name": "process_sort_index", "args": order})
        for tid, thread in enumerate(("training thread", "exchange in the background")):
            events.append({**process, "name": "thread_name", "tid": tid, "args": {"name": thread}})
    keys = ("fragment", "fragment_name", "outer_round", "sent_bytes", "received_bytes")
    for phase in found:
        events.append(
            {
                "ph": "X",
                "name": f"{phase.name}, fragment {phase.fragment}",
                "cat": phase.lane,
                "pid": phase.worker,
                "tid": LANES.index(phase.lane),
                "ts": phase.start_seconds * 1e6,  # microseconds
                "dur": phase.seconds * 1e6,
                "args": {key: getattr(phase, key) for key in keys},
            }
        )
    return events


def write_trace(path: Path, rounds: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace file for https://ui.perfetto.dev and chrome://tracing.

    It is renamed when it is complete, so that it can be opened during the run.
    """
    trace = {"traceEvents": chrome_trace_events(phases(rounds)), "displayTimeUnit": "ms"}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(trace), encoding="utf-8")
    new.replace(path)


def timeline_figure(
    round_records: Sequence[Mapping[str, Any]], last: int = 12, workers: int = 8
) -> "Figure":
    """Draw the `last` rounds of the first `workers` workers: a bar for each phase, labelled with
    its fragment, in a row for the training thread and one for the exchange below it."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.patches import Patch

    found = phases(list(round_records)[-last:])
    absent = len({phase.worker for phase in found}) - workers
    found = [phase for phase in found if phase.worker < workers and phase.seconds > 0]
    tops = {worker: 2.5 * row for row, worker in enumerate(sorted({p.worker for p in found}))}
    start = min((phase.start_seconds for phase in found), default=0.0)
    length = max((phase.end_seconds - start for phase in found), default=1.0)

    figure = Figure(figsize=(12, 1.6 + 0.7 * len(tops)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for top in tops.values():
        axes.broken_barh([(0, length)], (top, 1), color=COMPUTE_COLOUR)
        axes.hlines(top + 1.6, 0, length, color=COMPUTE_COLOUR, linewidth=1, zorder=0)
    for phase in found:
        left, top = phase.start_seconds - start, tops[phase.worker] + 1.1 * LANES.index(phase.lane)
        colour = PHASES[phase.name][-1]
        axes.broken_barh([(left, phase.seconds)], (top, 1), color=colour, linewidth=0.5)
        if phase.seconds > 0.012 * length:
            centre = left + phase.seconds / 2, top + 0.54
            axes.text(*centre, str(phase.fragment), color="w", size=7, ha="center", va="center")
    rows = {top + 0.5: f"worker {worker}" for worker, top in tops.items()}
    rows |= {top + 1.6: "exchange" for top in tops.values()}
    axes.set_yticks(list(rows), list(rows.values()))
    axes.set(xlim=(0, length), ylim=(2.5 * max(1, len(tops)) - 0.2, -0.2))
    axes.set_xlabel(f"seconds, from {start:,.2f} s on worker 0's clock", size=8)
    axes.tick_params(left=False, labelsize=8)
    axes.spines[["left", "top", "right"]].set_visible(False)
    more = f"; {absent} more workers are not shown" if absent > 0 else ""
    title = f"The last {min(last, len(round_records))} exchanges{more}"
    axes.set_title(title, loc="left", pad=24, size=11)
    keys = [Patch(color=COMPUTE_COLOUR, label="computing")]
    keys += [Patch(color=colour, label=name) for name, (*_, colour) in PHASES.items()]
    legend = axes.legend(handles=keys, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    legend.set_frame_on(False)
    return figure
