"""Records of real runs: rounds, bytes, time shares."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.components.test_resume import checkpoint
from tests.processes import ProcessPool
from tests.test_trainer import curve, records, streaming, train
from torchtitan_diloco.components.metrics import METRICS, all_reduce_bytes, time_shares
from torchtitan_diloco.report.run_records import open_runs


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
    for worker in range(2):
        rounds = [records(folder, "round", worker) for folder in (whole, resumed)]
        told = [[[one[key] for key in ROUND] for one in own] for own in rounds]
        assert told[0] == told[1]
        unknown = [one for one in rounds[1] if "begun" not in one["at_seconds"]]
        assert unknown, "some were in flight"
        for one in unknown:  # processes that are gone saw what it took: not known is not nothing
            for key in ("weight", "sent_bytes", "cosine_to_mean", "encoding_seconds"):
                assert key not in one


def check_records(folder: Path) -> None:
    rounds, steps = records(folder, "round"), records(folder)
    fragments = {record["fragment"]: record["fragment_name"] for record in rounds}
    assert fragments == {0: "blocks.0", 1: "blocks.1", 2: "embedding, head and norms"}
    for fragment in fragments:
        own = [record for record in rounds if record["fragment"] == fragment]
        assert [record["outer_round"] for record in own] == list(range(1, len(own) + 1))
        assert all(record["sent_step"] <= record["step"] <= 20 for record in own)
    assert sum(curve(steps, "worker/fragments_applied")) == len(rounds)
    both = [one for worker in range(2) for one in records(folder, "round", worker)]
    sent = sum(one["sent_bytes"] for one in both)
    for worker in range(2):
        own_steps = records(folder, worker=worker)
        assert sum(curve(own_steps, "worker/sent_bytes")) == sent / 2, "mean over the workers"
        for key in ("loss/train", "loss/val", "train/tokens"):
            assert curve(own_steps, key) == curve(steps, key), key
    trained = [record for record in steps if "worker/steps" in record]
    assert len(trained) == 8, "and before each save"
    for record in trained:
        assert record.keys() - {"step", "time"} <= METRICS.keys()
        assert math.fsum(time_shares(record).values()) == pytest.approx(100, abs=1e-6)
    (run,) = open_runs([folder])
    assert [worker.name for worker in run.workers] == ["worker 0", "worker 1"]
    assert all(None not in exchange for exchange in run.exchanges)
    assert (run.totals["worker/sent_bytes"], run.totals["worker/steps"]) == (sent / 2, 20)


def test_streaming_after_data_parallelism_counts_its_own_steps(
    text: Path, processes: ProcessPool
) -> None:
    first = {"diloco__method": "none", "training__stop_after": 8, "checkpoint__at_end": "true"}
    folder = run_two_workers(text, processes, run__folder=text.parent / "run", **first)
    assert records(folder, "round") == []
    (start,) = records(folder, "start")
    (run,) = open_runs([folder])
    assert run.totals["worker/steps"] == 8
    assert run.data_parallel_bytes(8) == 8 * all_reduce_bytes(start["parameters"], 2)
    run_two_workers(text, processes, run__folder=folder)
    (run,) = open_runs([folder])
    assert run.totals["worker/steps"] == 12
    assert run.totals["worker/sent_bytes"] > 0


def test_no_round_is_lost_however_seldom_one_reports(text: Path, processes: ProcessPool) -> None:
    often = {"diloco.sync_every": 1, "diloco.overlap.delay": 0, "training.steps": 90}
    small = {"training.batch_size": 1, "training.global_batch_size": 2}
    seldom = {"metrics.log_every": 1000, "validation.every": 0}
    chosen = streaming(text, **often, **small, **seldom)
    processes.run(train, 2, chosen)
    told = records(Path(chosen["run.folder"]), "round")
    fragments = {record["fragment"] for record in told}
    assert len(told) == 90 * len(fragments) > 256
