"""Phases of all workers on one clock, whatever their own clocks say."""

import json
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.pictures.phases import EXCHANGE_PHASES, LANES, TRAINING_PHASES, Phase, phases
from torchtitan_diloco.pictures.trace_events import chrome_trace_events

NAMES = (
    "due",
    "taken",
    "begun",
    "encoded",
    "heard",
    "received",
    "ready",
    "asked",
    "arrived",
    "applied",
)
BEFORE_HEARD, AFTER_HEARD = NAMES.index("heard"), NAMES.index("heard") + 1
SECONDS = st.floats(0.001, 5.0)


@st.composite
def sequential_rounds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One round after the other, each moment of a worker after the one before it, heard by all at one instant."""
    workers, count = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    clocks = [draw(st.floats(-1e4, 1e4)) for _ in range(workers)]
    rounds = []
    now = 0.0
    for number in range(count):
        before = [[draw(SECONDS) for _ in range(BEFORE_HEARD)] for _ in range(workers)]
        after = [[draw(SECONDS) for _ in range(len(NAMES) - AFTER_HEARD)] for _ in range(workers)]
        heard = now + max(map(sum, before))
        moments = [
            [heard - sum(early[place:]) for place in range(BEFORE_HEARD)]
            + [heard]
            + [heard + sum(late[: place + 1]) for place in range(len(late))]
            for early, late in zip(before, after, strict=True)
        ]
        now = max(max(times) for times in moments) + 0.01
        rounds.append(
            {
                "kind": "round",
                "fragment": number % 3,
                "fragment_name": f"layer {number % 3}",
                "outer_round": number,
                "workers": [
                    {
                        f"{name}_at_seconds": moment + clock
                        for name, moment in zip(NAMES, times, strict=True)
                    }
                    | {"sent_bytes": 7}
                    for times, clock in zip(moments, clocks, strict=True)
                ],
            }
        )
    return rounds


def lanes(found: Sequence[Phase]) -> dict[tuple[int, str], list[Phase]]:
    by_lane = defaultdict[tuple[int, str], list[Phase]](list)
    for phase in found:
        by_lane[phase.worker, phase.lane].append(phase)
    return by_lane


@given(sequential_rounds())
def test_alignment_keeps_durations_and_joins_the_heard_moments(
    rounds: list[dict[str, Any]],
) -> None:
    found = {(phase.worker, phase.outer_round, phase.name): phase for phase in phases(rounds)}
    for record in rounds:
        heard = []
        for worker, moments in enumerate(record["workers"]):
            own = {
                name: found[worker, record["outer_round"], name]
                for name, *_ in (*TRAINING_PHASES, *EXCHANGE_PHASES)
            }
            for name, start, end in TRAINING_PHASES:
                assert own[name].seconds == pytest.approx(moments[end] - moments[start], abs=1e-7)
            begin = moments["begun_at_seconds"]
            for name, end in EXCHANGE_PHASES:
                assert own[name].seconds == pytest.approx(moments[end] - begin, abs=1e-7)
                begin = moments[end]
            heard.append(own["waiting for others"].end_seconds)
        assert heard == pytest.approx(
            [record["workers"][0]["heard_at_seconds"]] * len(heard), abs=1e-7
        )


@given(sequential_rounds(), st.lists(st.floats(-0.5, 0.5), min_size=20, max_size=20))
def test_phases_of_a_thread_never_overlap(
    rounds: list[dict[str, Any]], latencies: list[float]
) -> None:
    """Also where headers took their time."""
    for number, record in enumerate(rounds):
        for worker, moments in enumerate(record["workers"]):
            moments["heard_at_seconds"] += latencies[(4 * number + worker) % 20]
    for found in lanes(phases(rounds)).values():
        for before, after in pairwise(found):
            assert before.start_seconds <= before.end_seconds <= after.start_seconds


@given(sequential_rounds(), st.floats(-1e4, 1e4))
def test_the_clock_of_another_worker_does_not_matter(
    rounds: list[dict[str, Any]], by: float
) -> None:
    moved = deepcopy(rounds)
    for record in moved:
        for moments in record["workers"][1:]:
            moments.update(
                {key: value + by for key, value in moments.items() if key.endswith("_at_seconds")}
            )
    for one, other in zip(phases(rounds), phases(moved), strict=True):
        assert (one.worker, one.lane, one.name, one.outer_round) == (
            other.worker,
            other.lane,
            other.name,
            other.outer_round,
        )
        assert one.start_seconds == pytest.approx(other.start_seconds, abs=1e-6)


@given(sequential_rounds())
def test_a_run_taken_up_again_goes_on_after_what_was_there(rounds: list[dict[str, Any]]) -> None:
    first = phases(rounds)
    both = phases([*rounds, *rounds])
    assert len(both) == 2 * len(first)
    assert max(phase.end_seconds for phase in both) > max(phase.end_seconds for phase in first)
    for found in lanes(both).values():
        for before, after in pairwise(found):
            assert before.end_seconds <= after.start_seconds


@given(sequential_rounds(), st.sets(st.sampled_from(NAMES)))
def test_moments_that_are_not_known_are_no_phases(
    rounds: list[dict[str, Any]], unknown: set[str]
) -> None:
    for record in rounds:
        for moments in record["workers"]:
            moments.update({f"{name}_at_seconds": None for name in unknown})
    for phase in phases(rounds):
        ends = {name: (start, end) for name, start, end in TRAINING_PHASES}
        reached = "begun_at_seconds"
        for name, end in EXCHANGE_PHASES:
            ends[name], reached = (reached, end), end
        assert not {f"{name}_at_seconds" for name in unknown} & set(ends[phase.name])


@pytest.mark.parametrize("record", [{}, {"workers": []}, {"workers": [{}, {}]}, {"workers": None}])
def test_a_round_without_moments_has_no_phases(record: dict[str, Any]) -> None:
    assert phases([record, record]) == []


@given(sequential_rounds())
def test_a_trace_file_holds_every_phase(rounds: list[dict[str, Any]]) -> None:
    found = phases(rounds)
    events = json.loads(json.dumps(chrome_trace_events(found)))
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(found)
    for event, phase in zip(complete, found, strict=True):
        assert (event["pid"], LANES[event["tid"]]) == (phase.worker, phase.lane)
        assert event["ts"] / 1e6 == pytest.approx(phase.start_seconds, abs=1e-6)
        assert event["dur"] == pytest.approx(1e6 * phase.seconds)
        assert phase.name in event["name"]
        assert (event["args"]["fragment"], event["args"]["sent_bytes"]) == (phase.fragment, 7)
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {f"worker {phase.worker}" for phase in found}
