"""Steps through telemetry: what is recorded, when it is read, and where it is written."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.components.test_resume import checkpoint
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, curve, records, streaming
from tests.test_trainer import train as train_config
from tests.waiting import wait_until
from torchtitan_diloco.base.hardware import queued_seconds
from torchtitan_diloco.components import records as records_module
from torchtitan_diloco.components import telemetry as module
from torchtitan_diloco.components.checkpoint import Loads, RunPart
from torchtitan_diloco.components.metrics import METRICS, baseline_bytes, time_shares
from torchtitan_diloco.components.records import (
    RecordFiles,
    RoundRecord,
    StartRecord,
    from_record,
    read_records,
    round_record,
    to_line,
)
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import (
    RunProgress,
    SavedTelemetry,
    StepResult,
    Telemetry,
)
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco.data_parallel import DataParallel, OuterLoop
from torchtitan_diloco.diloco.flags import OUTLIER
from torchtitan_diloco.diloco.fragments import Fragment, FragmentParameter
from torchtitan_diloco.diloco.metrics import OUTER_METRICS
from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.distributed.collectives import Asked, PendingSum
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.report.run_records import open_runs

SENT = "worker/sent_bytes"
PLAN = RunPlan(1000, 100, accumulation=1, tokens_per_step=64, total_steps=20)
CPU = torch.device("cpu")
TRAINED = StepResult(64.0, 1.0, skipped=False)
SKIPPED = StepResult(math.nan, math.inf, skipped=True)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


class Blocks:
    name = "blocks"
    parameters = 80


class Outer:
    """Sends 10 bytes in a round that it applies at every step."""

    fragments: tuple[type[Blocks], ...] = (Blocks,)
    exposed_seconds = 0.0

    def __init__(self) -> None:
        self.steps = 0
        self.applied = list[Round]()

    def step(self) -> None:
        self.steps += 1
        traffic = Traffic(10, 10, header_sent=1.0, heard={1: 1.5}, received=self.steps + 0.4)
        round_ = Round(0, self.steps, self.steps, 1.0, 2, self.steps, traffic=traffic)
        round_.due = float(self.steps)
        round_.taken = round_.due
        round_.begun = round_.due
        round_.asked = round_.due
        round_.ready = self.steps + 0.5
        round_.fetched = round_.ready
        round_.applied = round_.ready
        self.applied.append(round_)

    def metrics(self) -> dict[str, float]:
        names = "exposed_seconds", "exposed_waiting_seconds", "exchange_seconds"
        return {SENT: 10.0} | {f"worker/{name}": 1e-9 for name in names}

    def rounds(self) -> list[Round]:
        applied = self.applied
        self.applied = []
        return applied


def telemetry(
    folder: Path | None,
    outer: Any = None,
    *,
    rank: int = 0,
    workers: int = 1,
    step: int = 0,
    plan: RunPlan = PLAN,
    run: str = "",
    world: World | None = None,
    **config: Any,
) -> Telemetry:
    """Without the process groups of a world, the sums over ranks are this rank's own numbers."""
    world = world or World(rank, workers, workers, CPU)
    loop = cast(OuterLoop, outer or Outer())
    shown = Metrics(**({"boards": ()} | config))
    chosen = {"run.seed": 1}
    return Telemetry(
        shown, world, folder, plan, loop, step, flops_per_token=1, settings=chosen, run=run
    )


def log(session: Telemetry, step: int, run: RunProgress | None = None) -> None:
    numbers = session.numbers(agreement_seconds=0.0)
    session.open_record(
        step, 0.1, PendingSum(session.world, [*Asked(), *numbers], "in the test"), run=run
    )


def train(session: Telemetry, steps: Sequence[int], result: StepResult = TRAINED) -> None:
    """Train steps of two seconds, of which half a second waits for data, and log every second."""

    def load() -> Iterator[Any]:
        for _ in steps:
            Clock.now += 0.5
            yield None

    batches = session.timed(load())

    def train_step() -> StepResult:
        next(batches)
        session.outer.step()
        Clock.now += 1.5
        return result

    for step in steps:
        session.measure(train_step)
        if step % 2 == 0:
            log(session, step)
        session.publish()
    session.publish(all=True)


def test_a_logged_step_covers_the_steps_since_the_last(tmp_path: Path) -> None:
    outer = Outer()
    with telemetry(tmp_path, outer, workers=2) as session:
        train(session, range(1, 5), StepResult(128.0, 3.0, False))
        train(session, [5])
        train(session, [6, 7, 8], SKIPPED)
    first, second, third, fourth = records(tmp_path)
    assert first[LOSS] == second[LOSS] == 2.0, "nats of 64 tokens"
    assert second["train/gradient_norm"] == 3.0
    assert (first["train/tokens"], second["train/tokens"]) == (128, 256)
    assert session.totals["worker/steps"] == 8
    assert (first[SENT], session.totals[SENT]) == (20, 80)
    of_job = "world/sent_bytes"
    assert (first[of_job], session.totals[of_job]) == (20 / 2, 40), "mean over the workers"
    assert len(records(tmp_path, "round")) == outer.steps
    skipped = "worker/skipped_steps"
    assert (third[LOSS], third[skipped], fourth[skipped]) == (1.0, 1, 2), "in no loss"
    assert (fourth[LOSS], fourth["train/gradient_norm"]) == ("nan", "inf")
    assert set(second) - {"step", "time"} <= METRICS.keys(), "all are declared"


def test_vitals_say_how_long_training_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps of two seconds, half a second for data; and the latest at once, in their share."""
    queued = 0.0
    """Of each second."""
    monkeypatch.setattr(module, "time", Clock())
    monkeypatch.setattr(module, "queued_seconds", lambda: queued * Clock.now)
    with telemetry(None) as session:
        train(session, range(16))
        assert (session.vitals().step, session.vitals().queued) == (2.0, 0.0)
        queued = 0.25
        train(session, range(16))
        assert session.vitals().queued == pytest.approx(0.5)
        queued = 0.5
        train(session, range(4))
        assert session.vitals().queued == pytest.approx((12 * 0.5 + 4 * 1.0) / 16)


def test_the_kernel_says_how_long_a_thread_waits_for_a_core() -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("only Linux says so")
    cores = os.sched_getaffinity(0)
    program = "import os; print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            for process in (other.pid, 0):  # both on one core
                os.sched_setaffinity(process, {min(cores)})
            before = queued_seconds()
            wait_until(lambda: queued_seconds() > before + 0.05, "a core that is shared")
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()


def test_pauses_are_left_out_and_earlier_sessions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", Clock())
    earlier = telemetry(None)
    Clock.now += 1000
    earlier.totals = {SENT: 5.0, "worker/steps": 1.0}
    part = RunPart("telemetry", earlier, SavedTelemetry, Loads.WITH_WORKER)
    state = json.loads(json.dumps(part.saved()))
    with telemetry(tmp_path, step=10) as session:
        replace(part, owner=session).load(state)
        Clock.now += 7
        session.exclude_pause(7)
        train(session, [11])
        Clock.now += 6  # between steps
        train(session, [12])
    *_, record = records(tmp_path)
    assert record["speed/seconds_per_step"] == 5.0
    assert record["speed/tokens_per_second"] == 64 / 5
    shares = time_shares(record)
    assert list(shares.values()) == pytest.approx([30, 10, 0, 60], abs=1e-3)
    assert record["worker/elapsed_seconds"] == pytest.approx(1017)
    assert (record["worker/compute_seconds"], record["worker/compute_spread"]) == (3, 0)
    assert (session.totals[SENT], session.totals["worker/steps"]) == (25, 3)
    assert session.totals["worker/compute_spread"] == 0, "of steps, not their sum"
    assert "worker/elapsed_seconds" not in session.totals, "a clock has no total"
    without_outer_loop = telemetry(None, DataParallel(nn.Linear(1, 1)))
    replace(part, owner=without_outer_loop).load(state)
    assert without_outer_loop.totals == {}, "others cannot be compared"
    assert without_outer_loop.elapsed_seconds >= 1000
    starts = [record["at_seconds"]["due"] for record in records(tmp_path, "round")]
    assert starts == [1e9 + 1, 1e9 + 2], "on the wall clock"


def test_tensorboard_opens_on_what_matters(tmp_path: Path) -> None:
    for rank in range(2):
        with telemetry(tmp_path, boards=("tensorboard",), rank=rank, workers=2, step=1) as session:
            train(session, range(2, 5))
            session.write(4, {"loss/val": 1.5})
    first, second = (
        EventAccumulator(str(tmp_path / f"worker-{rank}")).Reload() for rank in range(2)
    )
    assert [event.step for event in first.Scalars(LOSS)] == [2, 4]
    assert [event.step for event in first.Scalars("speed/tokens_per_second")] == [4], "no outlier"
    tags = set(first.Tags()["scalars"])
    assert tags <= METRICS.keys(), "the names of the file"
    shown = {name.partition("/")[0] for name in METRICS}
    assert sorted(shown) == ["loss", "round", "speed", "sync", "train", "worker", "world"]
    text = first.SummaryMetadata(LOSS).summary_description
    assert text == "nats per token, of the workers' own parameters; all workers"
    own_tags = set(second.Tags()["scalars"])
    assert {"sync/mbit_per_second", SENT} < own_tags
    longest = "world/longest_data_seconds"
    assert [event.step for event in first.Scalars(longest)] == [4], "no outlier"
    assert not {longest, LOSS, "loss/val", "train/lr", "sync/hidden_percent"} & own_tags, (
        "shown once"
    )


def test_an_island_speaks_of_itself_and_of_the_tokens_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run becomes longer, and no time that is left is negative."""
    with caplog.at_level("INFO"), telemetry(tmp_path, boards=("tensorboard",)) as session:
        for step, done in enumerate((10, 11, 6), start=1):
            session.measure(lambda: TRAINED)
            log(session, step, RunProgress(steps=done, tokens=64 * done))
        session.publish(all=True)
    assert [record["train/tokens"] for record in records(tmp_path)] == [640, 704, 384]
    assert caplog.text.count("  ETA ") == 3
    assert "-1d" not in caplog.text
    board = EventAccumulator(str(tmp_path / "worker-0")).Reload()
    assert board.SummaryMetadata(LOSS).summary_description.endswith("; this worker")


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with telemetry(tmp_path) as session:
        monkeypatch.setattr(
            session.files, "_lines", type("Full", (), {"write": full, "close": full})()
        )
        train(session, range(1, 5))
    assert caplog.text.count("No space left") == 1, "said once"


# --- records --------------------------------------------------------------------------------------

BYTES = 10**6


def test_the_record_of_a_round() -> None:
    """As a rank of worker 1 of two sees it, which arrives a second after the other."""
    traffic = Traffic(BYTES, 2 * BYTES, 0.01, 0.02, 0.1, header_sent=1, encoded=1.5, received=3)
    traffic.heard = {0: 1.0}
    traffic.link_bytes = {0: BYTES}
    traffic.link_until = {0: 3.0}
    traffic.dot = 3.0
    round_ = Round(0, 7, 5, weight=8.0, participants=2, flags=OUTLIER, traffic=traffic)
    round_.applied_step = 6
    round_.due = 0.0
    round_.taken = 0.1
    round_.begun = 1.0
    round_.ready = 4.0
    round_.asked = 3.0
    round_.fetched = 4.0
    round_.applied = 4.5
    round_.numbers = {"round/delta_norm": 3.0, "round/mean_norm": 2.0}
    round_.numbers["round/drift_norm"] = torch.tensor(math.nan)  # was not measured
    round_.numbers |= round_.exchange_numbers()
    parameter = FragmentParameter("weight", nn.Parameter(torch.zeros(2 * BYTES)))
    fragment = Fragment(0, "blocks", (parameter,))
    written = round_record(round_, fragment, clock=1000.0)
    written.set_numbers({name: float(round_.numbers.get(name, math.nan)) for name in OUTER_METRICS})
    written.set_rates([[8 * traffic.rate(other) for other in range(2)]])
    line = json.loads(to_line(written))
    assert (line["kind"], line["step"], line["fragment_name"]) == ("round", 6, "blocks")
    assert (line["parameters"], line["left_out"]) == (2 * BYTES, ["outlier"])
    assert line["numbers"] == {
        "round/cosine_to_mean": pytest.approx(3 / 6),
        "round/delta_norm": 3.0,
        "round/dot_with_mean": 3.0,
        "round/mean_norm": 2.0,
        "worker/coding_seconds": pytest.approx(0.03),
        "worker/exchange_seconds": 3.0,
        "worker/received_bytes": 2 * BYTES,
        "worker/sent_bytes": BYTES,
        "worker/transfer_waiting_seconds": 0.1,
    }
    assert (line["at_seconds"]["due"], line["at_seconds"]["applied"]) == (1000.0, 1004.5)
    assert line["heard_after_seconds"] == {"0": 0.0}
    assert line["received_bits_per_second_from"] == {"0": 8 * BYTES / 2}
    record = from_record(RoundRecord, line)
    assert (record.waited_seconds, record.seconds("begun", "ready")) == (1.0, 3.0)
    assert json.loads(to_line(record)) == line, "what is written is read again"


@pytest.mark.parametrize("failing", ["", "to_line", "read_records"])
def test_readers_drop_what_a_later_start_repeats_and_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Nothing is rewritten, and a disk that fails at the start loses no start."""
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "{damaged", "[1]", '{"kind": "round", "step": 2}', '{"step": null}']
    before = "\n".join(lines).encode() + b'\n"\xff"\n{"step": 3}\n{"ste'
    path.write_bytes(before)
    with monkeypatch.context() as patch:
        if failing:
            patch.setattr(records_module, failing, full)
        start = StartRecord(2, 0.0, workers=1, parameters=1)
        files = RecordFiles(Metrics(boards=()), tmp_path, start, {}, workers=1, of_run=True)
    files.write({"step": 4})
    files.close()
    assert path.read_bytes().startswith(before + b"\n")
    records, unreadable = read_records(path)
    assert [
        (record.get("kind"), record["step"]) for record in records if record.get("kind") != "start"
    ] == [(None, 1), ("round", 2), (None, 4)]
    assert unreadable == 5
    assert files.read() == records


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=5))
def test_what_readers_keep_is_each_step_once(starts: list[tuple[int, int]]) -> None:
    """Each start goes on after a step that was reached, makes some more, and is killed."""
    reached = 0
    with tempfile.TemporaryDirectory() as name:
        for back, count in starts:
            first = max(0, reached - back)
            start = StartRecord(first, 0.0, workers=1, parameters=1)
            files = RecordFiles(Metrics(boards=()), Path(name), start, {}, workers=1, of_run=True)
            steps = [record["step"] for record in files.read() if "kind" not in record]
            assert steps == list(range(1, first + 1))
            for step in range(first + 1, first + count + 1):
                files.write({"step": step})
            files.close()
            reached = first + count
        steps = [record["step"] for record in files.read() if "kind" not in record]
    assert steps == list(range(1, reached + 1))


# --- real runs ------------------------------------------------------------------------------------


def run_two_workers(text: Path, processes: ProcessPool, **changes: Any) -> Path:
    chosen = streaming(text, metrics__log_every=4, training__steps=20, **changes)
    processes.run(train_config, 2, chosen)
    return Path(chosen["run.folder"])


ROUND = ("fragment", "outer_round", "sent_step", "step")


def test_every_exchange_is_recorded_once_also_by_a_run_that_goes_on(
    text: Path, processes: ProcessPool
) -> None:
    changes = {"diloco__overlap__delay": 3, "checkpoint__every": 9}
    whole = text.parent / "whole"
    resumed = text.parent / "resumed"
    run_two_workers(text, processes, run__folder=whole, **changes)
    check_records(whole)
    shutil.copytree(whole, resumed)
    for worker in range(2):
        shutil.rmtree(checkpoint(resumed, 18, worker))
    run_two_workers(text, processes, run__folder=resumed, **changes)
    for worker in range(2):
        rounds = [records(folder, "round", worker) for folder in (whole, resumed)]
        told = [[[record[key] for key in ROUND] for record in of_run] for of_run in rounds]
        assert told[0] == told[1]
        unknown = [record for record in rounds[1] if "begun" not in record["at_seconds"]]
        assert unknown, "some were in flight"
        for record in unknown:  # gone processes saw what it took: not known is not nothing
            assert record["numbers"] == {}


def check_records(folder: Path) -> None:
    rounds = records(folder, "round")
    steps = records(folder)
    fragments = {record["fragment"]: record["fragment_name"] for record in rounds}
    assert fragments == {0: "blocks.0", 1: "blocks.1", 2: "embedding, head and norms"}
    for fragment in fragments:
        of_fragment = [record for record in rounds if record["fragment"] == fragment]
        numbers = list(range(1, len(of_fragment) + 1))
        assert [record["outer_round"] for record in of_fragment] == numbers
        assert all(record["sent_step"] <= record["step"] <= 20 for record in of_fragment)
    assert sum(curve(steps, "worker/fragments_applied")) == len(rounds)
    of_both = [record for worker in range(2) for record in records(folder, "round", worker)]
    sent = sum(record["numbers"][SENT] for record in of_both)
    for worker in range(2):
        own_steps = records(folder, worker=worker)
        own_sent = sum(record["numbers"][SENT] for record in records(folder, "round", worker))
        assert sum(curve(own_steps, SENT)) == own_sent
        assert sum(curve(own_steps, "world/sent_bytes")) == sent / 2, "mean over the workers"
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
    assert (run.totals["world/sent_bytes"], run.totals["worker/steps"]) == (sent / 2, 20)


def test_streaming_after_data_parallelism_counts_its_own_steps(
    text: Path, processes: ProcessPool
) -> None:
    first = {"diloco__method": "none", "training__stop_after": 8, "checkpoint__at_end": "true"}
    folder = run_two_workers(text, processes, run__folder=text.parent / "run", **first)
    assert records(folder, "round") == []
    assert not [key for record in records(folder) for key in record if "exposed" in key], (
        "not known"
    )
    (start,) = records(folder, "start")
    (run,) = open_runs([folder])
    assert run.totals["worker/steps"] == 8
    assert run.baseline_bytes(8) == 8 * baseline_bytes(start["parameters"], 2)
    assert run.sent_bytes == 2 * run.baseline_bytes(8), "in fp32"
    run_two_workers(text, processes, run__folder=folder)
    (run,) = open_runs([folder])
    assert run.totals["worker/steps"] == 12
    assert run.totals["worker/sent_bytes"] > 0
