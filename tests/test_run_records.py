"""Records of real runs: rounds, time shares, trace, TensorBoard, summary."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.components.test_resume import checkpoint
from tests.processes import ProcessPool
from tests.test_trainer import curve, records, streaming, train
from torchtitan_diloco.report.run_records import open_runs

SHARES = [
    f"time/share_{name}_percent_mean_over_ranks"
    for name in ("compute", "data", "exposed_communication", "other")
]


def run_two_workers(text: Path, processes: ProcessPool, **changes: Any) -> Path:
    chosen = streaming(text, metrics__log_every=4, training__steps=20, **changes)
    processes.run(train, 2, chosen)
    return Path(chosen["run.folder"])


ROUND = ("fragment", "outer_round", "sent_step", "step")


def test_every_exchange_is_recorded_once_also_by_a_run_that_goes_on(
    text: Path, processes: ProcessPool
) -> None:
    changes = {"diloco__overlap__delay": 3, "checkpoint__every": 9}
    whole, resumed = text.parent / "whole", text.parent / "resumed"
    run_two_workers(text, processes, run__folder=whole, **changes)
    check_records(whole)
    shutil.copytree(whole, resumed)
    for worker in range(2):
        shutil.rmtree(checkpoint(resumed, 18, worker))
    run_two_workers(text, processes, run__folder=resumed, **changes)
    told = [[[one[key] for key in ROUND] for one in records(f, "round")] for f in (whole, resumed)]
    assert told[0] == told[1]
    first = [record["workers"][0] for record in records(resumed, "round")]
    unknown = [worker for worker in first if worker["at_seconds"]["begun"] is None]
    assert unknown, "some were in flight"
    for worker in unknown:  # processes that are gone saw what it took: not known is not nothing
        for key in ("weight", "sent_bytes", "cosine_to_mean", "encoding_seconds"):
            assert worker[key] is None, key


def check_records(folder: Path) -> None:
    rounds, steps = records(folder, "round"), records(folder)
    fragments = {record["fragment"]: record["fragment_name"] for record in rounds}
    assert fragments == {0: "blocks.0", 1: "blocks.1", 2: "embedding, head and norms"}
    for fragment in fragments:
        own = [record for record in rounds if record["fragment"] == fragment]
        assert [record["outer_round"] for record in own] == list(range(1, len(own) + 1))
        assert all(record["sent_step"] <= record["step"] <= 20 for record in own)
    assert sum(curve(steps, "diloco/fragments_applied_mean_over_ranks")) == len(rounds)
    for key in ("sent_bytes", "received_bytes"):
        told = sum(worker[key] for record in rounds for worker in record["workers"])
        assert told == sum(curve(steps, f"diloco/{key}_sum_over_ranks"))

    trained = [record for record in steps if SHARES[0] in record]
    assert len(trained) == 8, "and before each save"
    for record in trained:
        assert sum(record[share] for share in SHARES) == pytest.approx(100, abs=1e-6)
        assert min(record[share] for share in SHARES) >= 0

    (summary,) = records(folder, "summary")
    sent = sum(curve(steps, "diloco/sent_bytes_sum_over_ranks"))
    assert (summary["step"], summary["sent_bytes_mean_over_workers"]) == (20, sent / 2)
    assert 0 < summary["measured_utilisation_percent"] <= 100
    assert 0 < summary["predicted_utilisation_percent"] <= 100

    trace = json.loads((folder / "traces/fragments.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}, "both workers"
    assert {event["args"]["fragment"] for event in events} == {0, 1, 2}


def test_streaming_after_data_parallelism_counts_its_own_steps(
    text: Path, processes: ProcessPool
) -> None:
    first = {"diloco__method": "none", "training__stop_after": 8, "checkpoint__at_end": "true"}
    begun = run_two_workers(text, processes, run__folder=text.parent / "one-place", **first)
    takes_over = {"checkpoint__resume": begun, "run__folder": text.parent / "several"}
    folder = run_two_workers(text, processes, **takes_over)
    (before,), (summary,) = records(begun, "summary"), records(folder, "summary")
    assert records(begun, "round") == []
    assert not (begun / "traces").exists()
    assert before["sent_bytes_mean_over_workers"] is None, "it is not known"
    assert all(record[SHARES[2]] is None for record in records(begun) if SHARES[0] in record)
    assert not [key for record in records(begun) for key in record if key.startswith("diloco/")]
    assert (before["step"], before["counted_after_step"]) == (8, 0)
    assert (summary["step"], summary["counted_after_step"]) == (20, 8)
    a_step = before["data_parallel_bytes_per_worker"] / 8
    assert summary["data_parallel_bytes_per_worker"] == pytest.approx(12 * a_step)
    (run,) = open_runs([folder])
    assert [run.data_parallel_bytes(step) for step in (8, 20)] == pytest.approx([0, 12 * a_step])


def test_no_round_is_lost_however_seldom_one_reports(text: Path, processes: ProcessPool) -> None:
    often = {"diloco.sync_every": 1, "diloco.overlap.delay": 0, "training.steps": 90}
    small = {"training.batch_size": 1, "training.global_batch_size": 2}
    seldom = {"metrics.log_every": 1000, "validation.every": 0}
    chosen = streaming(text, **often, **small, **seldom)
    processes.run(train, 2, chosen)
    told = records(Path(chosen["run.folder"]), "round")
    fragments = {record["fragment"] for record in told}
    assert len(told) == 90 * len(fragments) > 256
