"""Rounds: how the numbers of all ranks become one record, and its phases on one clock."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import ProcessPool
from tests.report.synthetic import round_records
from torchtitan_diloco.components.records import (
    LANES,
    PHASES,
    RoundRecord,
    WorkerRound,
    from_record,
    phases,
    to_line,
    write_trace,
)
from torchtitan_diloco.components.round_records import (
    RoundTable,
    last_to_arrive,
    peak_mbit_per_second,
)
from torchtitan_diloco.components.summary import longest_phase
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.diloco.transport import OUTLIER
from torchtitan_diloco.distributed.collectives import PendingSums
from torchtitan_diloco.distributed.world import World, join_world

BYTES = 10**6
ALONE = World(0, 1, 1, torch.device("cpu"))


def measured_round(world: World, clock: float) -> Round:
    """A round as a rank of `world` sees it, on a clock that is ahead by `clock` seconds. Worker w
    arrives at w seconds, so that the last worker hears of the others at once."""
    last, rank = world.workers - 1, world.rank + 1
    others = [worker for worker in range(world.workers) if worker != world.worker]
    arrival = clock + world.worker
    traffic = Traffic(BYTES, 2 * BYTES, 0.01, 0.02, 0.1, arrival, arrival, clock + last + 2)
    traffic.heard = {other: clock + max(other, world.worker) for other in others}
    traffic.link_bytes = dict.fromkeys(others, BYTES)
    traffic.link_until = {other: heard + 2 for other, heard in traffic.heard.items()}
    traffic.dot = 3.0 * rank
    found = Round(
        0, 7, 5, 4 * BYTES, weight=float(rank), participants=world.workers, traffic=traffic
    )
    found.flags = OUTLIER if world.worker else 0
    found.applied_step, found.due, found.taken, found.begun = 6, clock, clock + 0.1, arrival
    found.ready, found.asked, found.fetched = clock + last + 3, clock + last + 2, clock + last + 3
    found.applied = clock + last + 3.5
    found.delta_square, found.mean_square, found.update_square = 9.0, 4.0, 2.0 * rank
    found.drift = torch.tensor(2.0)
    return found


def gather(world: World, rounds: list[Round], clock: float = 0.0) -> list[dict[str, Any]]:
    """Gather rounds over all ranks, as telemetry does, and return what is written of them."""
    table = RoundTable(world, ["blocks"], clock_start=clock)
    sums = PendingSums(world, list(map(table.numbers, rounds)), "").by_worker()
    found = map(table.record, rounds, zip(*sums, strict=True))
    return [msgspec.json.decode(to_line(record)) for record in found]


def gathered() -> list[dict[str, Any]]:
    """Gather a round over all ranks. Each rank's clock is another, and begins another second
    before."""
    world = join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=0)
    assert gather(world, []) == []
    clock = 100.0 * (world.rank + 1)
    return gather(world, [measured_round(world, clock)], clock - world.rank)


def test_ranks_and_workers_come_to_one_record(processes: ProcessPool) -> None:
    found, *others = processes.run(gathered, 4)
    assert others == [found] * 3
    (first,) = found
    assert (first["kind"], first["step"], first["fragment_name"]) == ("round", 6, "blocks")
    assert (first["outer_round"], first["sent_step"], first["participants"]) == (7, 5, 2)
    assert first["parameters"] == 8 * BYTES, "of both ranks of a worker"
    assert first["update_norm"] == pytest.approx(math.sqrt(2 + 4)), "of worker 0"
    assert (first["last_worker"], first["late_by_seconds"]) == (1, 1.0)
    for worker, (own, weight) in enumerate(zip(first["workers"], (1.0, 3.0), strict=True)):
        assert own["weight"] == weight, "of the first rank"
        assert own["left_out"] == (["outlier"] if worker else [])
        assert (own["sent_bytes"], own["received_bytes"]) == (2 * BYTES, 4 * BYTES)
        assert own["outer_gradient_norm"] == pytest.approx(math.sqrt(18))
        assert own["drift_norm"] == pytest.approx(math.sqrt(8))
        dot = 3.0 * (1 + 2 if worker == 0 else 3 + 4)
        assert own["cosine_to_mean"] == pytest.approx(dot / math.sqrt(18 * 8))
        moments = own["at_seconds"]
        assert (moments["due"], moments["applied"]) == (0.0, 4.5), "worker 0's clock"
        assert own["heard_after_seconds"] == ([None, 1.0] if worker == 0 else [0.0, None])
        rates = own["received_bits_per_second_from"]
        assert (rates[1 - worker], rates[worker]) == (8 * BYTES / 2, None)
    read = from_record(RoundRecord, first)
    assert msgspec.json.decode(to_line(read)) == first, "what is written is read again"
    assert [(w.transfer_seconds, w.waited_seconds) for w in read.workers] == [(2.0, 1.0)] * 2
    assert [w.seconds("begun", "ready") for w in read.workers] == [4.0, 3.0]
    assert peak_mbit_per_second([read]) == pytest.approx(8 * 4 / 2)


def test_what_was_not_measured_is_not_known() -> None:
    resumed = Round(
        0, 1, 1, 10, math.nan, 2, traffic=Traffic(math.nan, math.nan, math.nan, math.nan)
    )
    unmeasured = measured_round(ALONE, 0.0)
    unmeasured.delta_square = unmeasured.mean_square = unmeasured.update_square = math.nan
    unmeasured.traffic.dot, unmeasured.drift = math.nan, torch.tensor(math.nan)
    known, record, unknown = gather(ALONE, [measured_round(ALONE, 0.0), unmeasured, resumed])
    norms = {"outer_gradient_norm", "cosine_to_mean", "drift_norm"}
    (before,), (own,) = known["workers"], record["workers"]
    assert {key for key in own if own[key] is None and before[key] is not None} == norms
    assert record["update_norm"] is None
    (worker,) = unknown["workers"]
    assert set(worker.pop("at_seconds").values()) == {None}
    assert [key for key, value in worker.items() if value not in (None, [None], [])] == []


def test_links_are_not_known_from_small_messages() -> None:
    found = measured_round(ALONE, 0.0)
    for size, rate in ((16_383, None), (16_384, 8 * 16_384)):
        link = Traffic(header_sent=1.0, heard={0: 2.0}, link_until={0: 3.0}, link_bytes={0: size})
        (record,) = gather(ALONE, [replace(found, traffic=link)])
        assert record["workers"][0]["received_bits_per_second_from"] == [rate]
        assert record["workers"][0]["heard_after_seconds"] == [1.0]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6), st.floats(0, 1))
def test_the_last_worker_waited_the_shortest(arrivals: list[float], latency: float) -> None:
    before, last = sorted(arrivals)[-2:]
    waited = [last + latency - arrival for arrival in arrivals]
    worker, late_by = last_to_arrive(waited)
    assert worker is not None
    assert arrivals[worker] == pytest.approx(last, abs=1e-6)
    assert late_by == pytest.approx(last - before, abs=1e-6)


def test_nobody_is_last_where_nobody_waited() -> None:
    for waited in ([math.nan], [math.nan, 0.3]):
        worker, late_by = last_to_arrive(waited)
        assert (worker, math.isnan(late_by)) == (None, True)
    assert peak_mbit_per_second([]) is None


# --- phases ---------------------------------------------------------------------------------------

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
