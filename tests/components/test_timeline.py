"""Phases of all workers on one clock, and how they are written and drawn."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.components.round_records import FIELDS
from torchtitan_diloco.components.timeline import (
    LANES,
    PHASES,
    Phase,
    phases,
    timeline_figure,
    write_trace,
)

NAMES = [name[: -len("_at_seconds")] for name in FIELDS if name.endswith("_at_seconds")]
HEARD = NAMES.index("heard")
SECONDS = st.floats(0.001, 5.0)
Rounds = list[dict[str, Any]]


@st.composite
def sequential_rounds(draw: st.DrawFn) -> Rounds:
    """Rounds one after the other, whose headers all workers hear at the same instant."""
    workers, count = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    clocks = [draw(st.floats(-1e4, 1e4)) for _ in range(workers)]
    rounds: Rounds = []
    now = 0.0
    for number in range(count):
        gaps = [[draw(SECONDS) for _ in NAMES] for _ in range(workers)]
        heard = now + max(sum(gap[:HEARD]) for gap in gaps)
        moments = [
            [heard - sum(gap[place:HEARD]) + sum(gap[HEARD:place]) for place in range(len(NAMES))]
            for gap in gaps
        ]
        now = max(map(max, moments)) + 0.01
        records = [
            {f"{name}_at_seconds": at + clock for name, at in zip(NAMES, times, strict=True)}
            for times, clock in zip(moments, clocks, strict=True)
        ]
        rounds.append({"outer_round": number, "workers": records})
    return rounds


def check_no_overlap(found: Sequence[Phase]) -> None:
    lanes = defaultdict[tuple[int, str], list[Phase]](list)
    for phase in found:
        lanes[phase.worker, phase.lane].append(phase)
    for lane in lanes.values():
        for before, after in pairwise(lane):
            assert before.start_seconds <= before.end_seconds <= after.start_seconds


@given(sequential_rounds())
def test_alignment_keeps_durations_and_joins_the_last_headers(rounds: Rounds) -> None:
    found = {(phase.worker, phase.outer_round, phase.name): phase for phase in phases(rounds)}
    assert len(found) == sum(len(record["workers"]) for record in rounds) * len(PHASES)
    for (worker, number, name), phase in found.items():
        moments = rounds[number]["workers"][worker]
        lane, start, end, _ = PHASES[name]
        seconds = moments[f"{end}_at_seconds"] - moments[f"{start}_at_seconds"]
        assert phase.lane == lane
        assert phase.seconds == pytest.approx(seconds, abs=1e-7)
        heard = found[worker, number, "waiting for others"].end_seconds
        first = rounds[number]["workers"][0]["heard_at_seconds"]
        assert heard == pytest.approx(first, abs=1e-7)


@given(sequential_rounds(), st.lists(st.floats(-0.5, 0.5), min_size=20, max_size=20))
def test_phases_of_a_thread_do_not_overlap(rounds: Rounds, latencies: list[float]) -> None:
    for number, record in enumerate(rounds):
        for worker, moments in enumerate(record["workers"]):
            moments["heard_at_seconds"] += latencies[(4 * number + worker) % 20]
    check_no_overlap(phases(rounds))


@given(sequential_rounds())
def test_a_resumed_run_continues_after_the_first_session(rounds: Rounds) -> None:
    first, both = phases(rounds), phases([*rounds, *rounds])
    assert len(both) == 2 * len(first)
    assert max(phase.end_seconds for phase in both) > max(phase.end_seconds for phase in first)
    check_no_overlap(both)


@given(sequential_rounds(), st.sets(st.sampled_from(NAMES)))
def test_unknown_moments_make_no_phases(rounds: Rounds, unknown: set[str]) -> None:
    for record in rounds:
        for moments in record["workers"]:
            moments.update(dict.fromkeys((f"{name}_at_seconds" for name in unknown), None))
    assert not any(unknown & set(PHASES[phase.name][1:3]) for phase in phases(rounds))


def test_encoding_hides_what_arrives_meanwhile() -> None:
    moments = {"begun": 1.0, "heard": 1.5, "received": 3.0, "encoded": 2.0, "ready": 4.0}
    record = {"workers": [{f"{name}_at_seconds": at for name, at in moments.items()}]}
    found = [(phase.name, phase.start_seconds, phase.end_seconds) for phase in phases([record])]
    assert found == [("encoding", 1, 2), ("transfer", 2, 3), ("outer step", 3, 4)]


@pytest.mark.parametrize("workers", [[], [{}, {}], None, [3, "x"], [{"due_at_seconds": "nan"}]])
def test_damaged_rounds_have_no_phases(workers: Any) -> None:
    assert phases([{"workers": workers}, {}]) == []


def example(workers: int, count: int) -> Rounds:
    def moments(start: int) -> dict[str, float]:
        found = {f"{name}_at_seconds": start + place / 10 for place, name in enumerate(NAMES)}
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


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (3, 20), (10, 2), (1, 0)])
def test_the_figure_shows_the_last_rounds(workers: int, count: int) -> None:
    figure = timeline_figure(example(workers, count), last=12, workers=8)
    (axes,) = figure.axes
    title = axes.get_title(loc="left")
    assert f"last {min(count, 12)} exchanges" in title
    assert ("2 more workers are not shown" in title) == (workers == 10)
    shown = min(workers, 8) if count else 0
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == [f"worker {n}" for n in range(shown)] + ["exchange"] * shown
    bars = len(axes.collections) - 2 * shown
    assert bars == shown * min(count, 12) * len(PHASES)
