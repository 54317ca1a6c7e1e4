"""Phases of all workers on one clock, and how they are written."""

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.synthetic import round_records
from torchtitan_diloco.components.records import (
    LANES,
    PHASES,
    RoundRecord,
    WorkerRound,
    from_record,
    phases,
    write_trace,
)
from torchtitan_diloco.components.summary import longest_phase

NAMES = sorted({moment for _, *moments, _ in PHASES.values() for moment in moments})
MOMENT = st.just(math.nan) | st.floats(-1e3, 1e3)
MOMENTS = st.fixed_dictionaries(dict.fromkeys(NAMES, MOMENT))


def record(workers: list[WorkerRound]) -> RoundRecord:
    return RoundRecord(3, 0, "blocks", 1, 2, 100, workers=workers)


ROUNDS = st.lists(
    st.lists(st.builds(WorkerRound, at_seconds=MOMENTS), max_size=3).map(record),
    max_size=4,
)


@given(ROUNDS)
def test_phases_are_of_known_moments_and_do_not_overlap_in_a_thread(
    rounds: list[RoundRecord],
) -> None:
    lanes = defaultdict[tuple[int, str], list[Any]](list)
    for phase in phases(rounds):
        assert PHASES[phase.name][0] == phase.lane
        lanes[phase.worker, phase.lane].append(phase)
    for lane in lanes.values():
        for before, after in pairwise(lane):
            assert before.start_seconds <= before.end_seconds <= after.start_seconds
    possible = sum(
        worker.at_seconds[start] <= worker.at_seconds[end]
        for one in rounds
        for worker in one.workers
        for _, start, end, _ in PHASES.values()
    )
    assert sum(map(len, lanes.values())) == possible


def test_encoding_hides_what_arrives_meanwhile() -> None:
    moments = {"begun": 1.0, "heard": 1.5, "received": 3.0, "encoded": 2.0, "ready": 4.5}
    rounds = [record([from_record(WorkerRound, {"at_seconds": moments})])]
    found = [(one.name, one.start_seconds, one.end_seconds) for one in phases(rounds)]
    assert found == [("encoding", 1, 2), ("transfer", 2, 3), ("outer step", 3, 4.5)]
    assert longest_phase(rounds) == "outer step"
    assert longest_phase([record([WorkerRound()])]) == ""


def test_the_trace_file_holds_every_phase(tmp_path: Path) -> None:
    path, rounds = tmp_path / "traces" / "fragments.json", round_records(100, workers=3)[:2]
    for latest in (rounds[:1], rounds):
        write_trace(path, latest)
    assert list(path.parent.iterdir()) == [path], "replaced when it is complete"
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for event, phase in zip(complete, phases(rounds), strict=True):
        assert (event["pid"], LANES[event["tid"]]) == (phase.worker, phase.lane)
        assert event["ts"] == pytest.approx(1e6 * phase.start_seconds)
        assert event["dur"] == pytest.approx(1e6 * phase.seconds)
        assert event["name"] == f"{phase.name}, fragment {phase.round.fragment}"
        assert event["args"]["sent_bytes"] == 1_500_000
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["worker 0", "worker 1", "worker 2"]
