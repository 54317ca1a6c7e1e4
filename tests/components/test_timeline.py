"""Phases of all workers on one clock, and how they are written and drawn."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.components.timeline import LANES, PHASES, phases, write_trace
from torchtitan_diloco.components.timeline_figure import draw_timeline

NAMES = list(dict.fromkeys(name for phase in PHASES.values() for name in phase[1:3]))
MOMENTS = st.none() | st.floats(-1e3, 1e3)
ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "outer_round": st.integers(0, 99),
            "workers": st.lists(
                st.fixed_dictionaries({f"{name}_at_seconds": MOMENTS for name in NAMES}), max_size=3
            ),
        }
    ),
    max_size=4,
)


@given(ROUNDS)
def test_phases_are_of_known_moments_and_do_not_overlap_in_a_thread(rounds: Any) -> None:
    lanes = defaultdict[tuple[int, str], list[Any]](list)
    for phase in phases(rounds):
        assert PHASES[phase.name][0] == phase.lane
        lanes[phase.worker, phase.lane].append(phase)
    for lane in lanes.values():
        for before, after in pairwise(lane):
            assert before.start_seconds <= before.end_seconds <= after.start_seconds
    possible = sum(
        (worker[f"{start}_at_seconds"] or 0) <= (worker[f"{end}_at_seconds"] or 0)
        for record in rounds
        for worker in record["workers"]
        for _, start, end, _ in PHASES.values()
        if None not in (worker[f"{start}_at_seconds"], worker[f"{end}_at_seconds"])
    )
    assert sum(map(len, lanes.values())) == possible


def test_encoding_hides_what_arrives_meanwhile() -> None:
    moments = {"begun": 1.0, "heard": 1.5, "received": 3.0, "encoded": 2.0, "ready": 4.0}
    record = {"workers": [{f"{name}_at_seconds": at for name, at in moments.items()}]}
    found = [(phase.name, phase.start_seconds, phase.end_seconds) for phase in phases([record])]
    assert found == [("encoding", 1, 2), ("transfer", 2, 3), ("outer step", 3, 4)]


@pytest.mark.parametrize("workers", [[], [{}, {}], None, [3, "x"], [{"due_at_seconds": "inf"}]])
def test_damaged_rounds_have_no_phases(workers: Any) -> None:
    assert phases([{"workers": workers}, {}]) == []


def example(workers: int, count: int) -> list[dict[str, Any]]:
    def moments(start: int) -> dict[str, float]:
        order = ["due", "taken", "begun", "encoded", "heard", "received", "ready"]
        order += ["asked", "arrived", "applied"]
        found = {f"{name}_at_seconds": start + place / 10 for place, name in enumerate(order)}
        return found | {"sent_bytes": 7}

    return [{"fragment": n % 3, "workers": [moments(n)] * workers} for n in range(count)]


def test_the_trace_file_holds_every_phase(tmp_path: Path) -> None:
    path, rounds = tmp_path / "traces" / "fragments.json", example(3, 2)
    for latest in (rounds[:1], rounds):
        write_trace(path, latest)
    assert list(path.parent.iterdir()) == [path], "replaced when it is complete"
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for event, phase in zip(complete, phases(rounds), strict=True):
        assert (event["pid"], LANES[event["tid"]]) == (phase.worker, phase.lane)
        assert event["ts"] == pytest.approx(1e6 * phase.start_seconds)
        assert event["dur"] == pytest.approx(1e6 * phase.seconds)
        assert event["name"] == f"{phase.name}, fragment {phase.fragment}"
        assert event["args"]["sent_bytes"] == 7
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["worker 0", "worker 1", "worker 2"]


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (3, 12), (10, 2), (1, 0)])
def test_the_figure_shows_all_phases_of_the_first_workers(workers: int, count: int) -> None:
    figure, drawn = draw_timeline(phases(example(workers, count)), title="The last exchanges")
    (axes,) = figure.axes
    shown = min(workers, 8) if count else 0
    assert ("2 more workers are not shown" in axes.get_xlabel()) == (workers == 10)
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == [text for n in range(shown) for text in (f"worker {n}", "exchange")]
    assert len(drawn) == shown * count * len(PHASES)
    assert len(axes.patches) == len(drawn) + shown
