"""Phases as the events of a trace file, which chrome://tracing and https://ui.perfetto.dev open."""

from collections.abc import Sequence
from typing import Any

from torchtitan_diloco.pictures.phases import LANES, Phase

LANE_NAMES = {"training": "training thread", "exchange": "exchange in the background"}


def chrome_trace_events(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """A process for each worker, a thread for each lane, a complete event ("X") for each phase, in microseconds. In a file:
    `{"traceEvents": [...], "displayTimeUnit": "ms"}`."""
    events: list[dict[str, Any]] = []
    for worker in sorted({phase.worker for phase in phases}):
        events.append(
            {"ph": "M", "name": "process_name", "pid": worker, "args": {"name": f"worker {worker}"}}
        )
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": worker, "args": {"sort_index": worker}}
        )
        for thread, lane in enumerate(LANES):
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": worker,
                    "tid": thread,
                    "args": {"name": LANE_NAMES[lane]},
                }
            )
    return events + [_event(phase) for phase in phases]


def _event(phase: Phase) -> dict[str, Any]:
    arguments = {
        "fragment": phase.fragment,
        "fragment_name": phase.fragment_name,
        "outer_round": phase.outer_round,
        "sent_bytes": phase.sent_bytes,
        "received_bytes": phase.received_bytes,
    }
    return {
        "ph": "X",
        "name": f"{phase.name}, fragment {phase.fragment}",
        "cat": phase.lane,
        "pid": phase.worker,
        "tid": LANES.index(phase.lane),
        "ts": phase.start_seconds * 1e6,
        "dur": phase.seconds * 1e6,
        "args": arguments,
    }
