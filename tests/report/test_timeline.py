"""Exchanges on one clock: who was last, and what each thread did."""

import math
import re
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.synthetic import (
    exchanges,
    round_records,
)
from torchtitan_diloco.components.records import RoundRecord
from torchtitan_diloco.report.charts import (
    PHASES,
    Phase,
    phases,
    timeline_span,
    timeline_svg,
)
from torchtitan_diloco.report.page import (
    last_to_arrive,
)


def record(at_seconds: dict[str, float], heard_after: float | None = None) -> RoundRecord:
    found = RoundRecord(3, 0, "blocks", 1, 2, 100)
    found.at_seconds = at_seconds
    found.heard_after_seconds = {} if heard_after is None else {9: heard_after}
    return found


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6), st.floats(0, 1))
def test_the_last_worker_waited_the_shortest(arrivals: list[float], latency: float) -> None:
    before, last = sorted(arrivals)[-2:]
    found = [record({}, last + latency - arrival) for arrival in arrivals]
    worker, late_by = last_to_arrive(found)
    assert worker is not None
    assert arrivals[worker] == pytest.approx(last, abs=1e-6)
    assert late_by == pytest.approx(last - before, abs=1e-6)
    assert last_to_arrive([found[0], None])[0] is None


NAMES = sorted({moment for _, *moments, _ in PHASES.values() for moment in moments})
MOMENT = st.just(math.nan) | st.floats(-1e3, 1e3)
MOMENTS = st.fixed_dictionaries(dict.fromkeys(NAMES, MOMENT))
EXCHANGE = st.lists(st.none() | MOMENTS.map(record), min_size=1, max_size=3)


@given(st.lists(EXCHANGE, max_size=4))
def test_phases_are_of_known_moments_and_do_not_overlap_in_a_thread(
    exchanges: list[list[RoundRecord | None]],
) -> None:
    lanes = defaultdict[tuple[int, str], list[Phase]](list)
    for phase in phases(exchanges):
        assert PHASES[phase.name][0] == phase.lane
        lanes[phase.worker, phase.lane].append(phase)
    for lane in lanes.values():
        for before, after in pairwise(lane):
            assert before.start_seconds <= before.end_seconds <= after.start_seconds


def test_clocks_are_aligned_where_the_headers_have_arrived() -> None:
    moments = {"begun": 1.0, "heard": 1.5, "received": 3.0, "encoded": 2.0, "ready": 4.5}
    later = {name: moment + 0.7 for name, moment in moments.items()}
    found = phases([[record(moments), record(later)], [None, record(later | {"heard": math.nan})]])
    own = [(one.name, one.start_seconds, one.end_seconds) for one in found if one.worker == 0]
    assert own == [("encoding", 1, 2), ("transfer", 2, 3), ("outer step", 3, 4.5)]
    assert len(found) == 8
    starts = [one.start_seconds for one in found if one.worker == 1]  # also where it is not known
    assert starts == pytest.approx([1, 2, 2, 3, 4.5])


def test_the_timeline_shows_all_phases_of_the_first_eight_workers() -> None:
    found = phases(exchanges(round_records(100, workers=10))[-2:])
    names = [f"worker {number}" for number in range(10)]
    span = timeline_span(found, names)
    assert re.fullmatch(r"seconds, from 01:47:2.* 2 more workers are not shown", span)
    drawn = timeline_svg("Exchanges", found, names)
    tooltips = re.findall(r"<title>(worker \d): ([a-z ]+) \d", drawn)
    expected = [(f"worker {n}", name) for n in range(8) for name in PHASES] * 2
    assert sorted(tooltips) == sorted(expected)
    assert re.findall(r">(worker \d)</text>", drawn) == names[:8]
