"""Steps through telemetry: what is recorded, when it is read, and where it is written."""

import io
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.test_trainer import records
from torchtitan_diloco.components import records as records_module
from torchtitan_diloco.components import telemetry as module
from torchtitan_diloco.components.checkpoint import RunState
from torchtitan_diloco.components.records import drop_records_after
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.summary import all_reduce_bytes, summarise
from torchtitan_diloco.components.telemetry import (
    OF_WORKER,
    RunProgress,
    StepResult,
    Telemetry,
    time_shares,
    worker_key,
)
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.distributed.world import World

LOSS, SENT = "train/loss_nats_per_token_global", "diloco/sent_bytes_sum_over_ranks"
SHARES = ("compute", "data", "exposed_communication", "other")
PLAN = RunPlan(1000, 100, accumulation=1, tokens_per_step=64, total_steps=20)
CPU = torch.device("cpu")
TRAINED = StepResult(64.0, 1.0, skipped=False)
SKIPPED = StepResult(math.nan, math.inf, skipped=True)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Outer:
    """Sends 10 bytes in a round that it applies at every step."""

    fragment_names = ("blocks",)
    exposed_seconds = 0.0

    def __init__(self) -> None:
        self.steps, self.sums, self.applied = 0, dict[str, float](), list[Round]()

    def step(self) -> None:
        self.steps += 1
        traffic = Traffic(10, 10, header_sent=1.0, heard={1: 1.5}, received=self.steps + 0.4)
        round_ = Round(0, self.steps, self.steps, 80, 1.0, 2, self.steps, traffic=traffic)
        round_.due = round_.taken = round_.begun = round_.asked = float(self.steps)
        round_.ready = round_.fetched = round_.applied = self.steps + 0.5
        self.applied.append(round_)

    def metrics(self) -> dict[str, float]:
        return {"diloco/sent_bytes": 10.0 * self.steps, "diloco/exposed_seconds": 1e-9}

    def rounds(self) -> list[Round]:
        applied, self.applied = self.applied, []
        return applied


class DataParallel(Outer):
    def metrics(self) -> dict[str, float]:
        return {}

    def rounds(self) -> list[Round]:
        return []


def telemetry(
    folder: Path | None,
    outer: Any = None,
    *,
    rank: int = 0,
    workers: int = 1,
    state: RunState | None = None,
    **config: Any,
) -> Telemetry:
    """Without process groups: the sums over ranks are this rank's own numbers."""
    world, loop = World(rank, workers, workers, CPU), cast(OuterLoop, outer or Outer())
    shown = Metrics(**({"tensorboard": False} | config))
    return Telemetry(shown, world, folder, PLAN, loop, state or RunState(), flops_per_token=1)


def train(
    own: Telemetry,
    steps: Sequence[int],
    result: StepResult = TRAINED,
    clock: Clock | None = None,
) -> None:
    """Train steps of two seconds, of which half a second waits for data, and log every second."""
    clock = clock or Clock()

    def load() -> Iterator[Any]:
        for _ in steps:
            clock.now += 0.5
            yield None

    batches = own.timed(load())

    def train_step() -> StepResult:
        next(batches)
        own._outer.step()
        clock.now += 1.5
        return result

    for step in steps:
        own.measure(train_step)
        if step % 2 == 0:
            own.open(step, lr=0.1)
        own.publish()
    own.publish(all=True)


def test_a_logged_step_covers_the_steps_since_the_last(tmp_path: Path) -> None:
    outer = Outer()
    with telemetry(tmp_path, outer, workers=2) as own:
        train(own, range(1, 5), StepResult(128.0, 3.0, False))
        train(own, [5])
        train(own, [6, 7, 8], SKIPPED)
    first, second, third, fourth = records(tmp_path)
    assert first[LOSS] == second[LOSS] == 2.0, "nats of 64 tokens"
    assert second["train/gradient_norm_mean_over_workers"] == 3.0 / 2, "worker 1 has none here"
    assert (first["train/tokens_global"], second["train/tokens_global"]) == (128, 256)
    assert own.totals[worker_key(0, "steps")] == 8
    assert own.totals["diloco/sent_bytes"] == sum(one[SENT] for one in records(tmp_path))
    assert (first[SENT], second[SENT]) == (20, 40)
    assert not [key for key in second if key.startswith("worker_")]
    assert len(records(tmp_path, "round")) == len(own.round_records) == outer.steps
    skipped = "train/skipped_steps_mean_over_workers"
    assert (third[LOSS], third[skipped], fourth[skipped]) == (1.0, 0.5, 1), "in no loss"
    assert (fourth[LOSS], fourth["train/gradient_norm_mean_over_workers"]) == ("nan", "inf")


def test_the_summary_counts_islands_that_came_later() -> None:
    class Uncounted(Outer):
        def metrics(self) -> dict[str, float]:
            return {}

    own = telemetry(None, Uncounted())
    train(own, range(1, 9))
    assert {record.participants for record in own.round_records} == {2}
    found = summarise(own, DiLoCoConfig(workers=1), step=8, validated=None)
    assert found.data_parallel_bytes_per_worker == 8 * all_reduce_bytes(PLAN.parameters, 2)


def test_the_tokens_of_islands_are_those_of_the_run(tmp_path: Path) -> None:
    with telemetry(tmp_path) as own:
        own.measure(lambda: TRAINED)
        own.open(1, lr=0.1, run=RunProgress(steps=7, tokens=448))
        own.publish(all=True)
    assert records(tmp_path)[0]["train/tokens_global"] == 448


def test_pauses_are_left_out_and_earlier_sessions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    state = RunState(10, totals={"diloco/sent_bytes": 5.0}, elapsed_seconds=1000.0)
    with telemetry(tmp_path, state=state) as own:
        clock.now += 7
        own.pause(7)
        train(own, [11], clock=clock)
        clock.now += 6  # between steps, of which the final drain is training
        own.count("time/step_seconds", 4)
        train(own, [12], clock=clock)
    (record,) = records(tmp_path)
    assert record["speed/seconds_per_step"] == 5.0
    assert record["speed/tokens_per_second_global"] == 64 / 5
    shares = [record[f"time/share_{name}_percent_mean_over_ranks"] for name in SHARES]
    assert shares == pytest.approx([70, 10, 0, 20], abs=1e-3)
    assert record["time/elapsed_seconds"] == 1017
    totals = [own.totals[worker_key(0, name)] for name in OF_WORKER]
    assert totals == [2, 3, 4.5], "computed 1.5 seconds in each step"
    assert own.totals["diloco/sent_bytes"] == 5 + record[SENT]
    starts = [found["workers"][0]["at_seconds"]["due"] for found in records(tmp_path, "round")]
    assert starts == [1001, 1002], "on the clock of the whole run"


def test_data_parallelism_does_not_know_its_communication(tmp_path: Path) -> None:
    with telemetry(tmp_path, DataParallel(), workers=2) as own:
        train(own, [1, 2])
        own.publish(all=True)
        own.write_trace()
    (record,) = records(tmp_path)
    assert record["time/share_exposed_communication_percent_mean_over_ranks"] is None
    assert not [key for key in record if key.startswith("diloco/")]
    assert not (tmp_path / "traces").exists(), "no round, no timeline"


@given(*[st.floats(0, 100)] * 5)
def test_shares_add_up(
    compute: float, data: float, exposed: float, agreement: float, other: float
) -> None:
    steps = compute + data + exposed
    sums = {"time/wall_seconds": steps + agreement + other + 1e-3, "time/step_seconds": steps}
    sums |= {"time/data_seconds": data, "time/agreement_seconds": agreement}
    for known in ({}, {"diloco/exposed_seconds": exposed}):
        shares = time_shares(sums | known)
        assert tuple(shares) == SHARES
        assert math.fsum(share or 0.0 for share in shares.values()) == pytest.approx(100, abs=1e-6)
        assert (shares["exposed_communication"] is None) == (not known)


def test_tensorboard_and_trace(tmp_path: Path) -> None:
    with telemetry(tmp_path, tensorboard=True, workers=2, state=RunState(1)) as own:
        train(own, range(2, 5))
        own.write(4, {"validation/loss_nats_per_token_global": 1.5, "unknown": None})
        own.write_trace()
    assert (tmp_path / "traces/fragments.json").exists()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [one.step for one in board.Scalars("loss/train")] == [2, 4]
    assert [one.step for one in board.Scalars("speed/tokens_per_s")] == [4], "no outlier at first"
    tags = set(board.Tags()["scalars"])
    assert {"loss/train", "loss/val", f"z_{SENT}"} < tags
    assert not {"z_unknown", "z_step", "speed/mfu_pct"} & tags
    first = [tag for tag in sorted(tags) if not tag.startswith("z_")]
    assert sorted(tags)[: len(first)] == first
    assert len(first) <= 12
    for tag in first:
        assert "," in board.SummaryMetadata(tag).summary_description, "unit and scope"
    assert board.PluginTagToContent("hparams").keys() >= {"_hparams_/session_start_info"}


def test_weights_and_biases_gets_the_same_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = []
    for state in (RunState(0), RunState(4)):
        with telemetry(tmp_path, wandb="slow-links", state=state) as own:
            train(own, range(state.step + 1, state.step + 5))
        names.append((tmp_path / "wandb/run-id").read_text())
    assert names[0] == names[1], "a resumed run goes on"
    written = [path.read_bytes() for path in tmp_path.glob("wandb/offline*/run-*.wandb")]
    assert written
    for content in written:
        for expected in ("slow-links", "loss/train", f"z_{SENT}", names[0]):
            assert expected.encode() in content


def test_weights_and_biases_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'"slow-links" needs the package wandb: .*pip install'):
        telemetry(tmp_path, wandb="slow-links")


def test_only_the_first_rank_writes_and_only_a_terminal_shows_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda known=is_terminal: known)
        monkeypatch.setattr(sys, "stderr", stream)
        with telemetry(None) as own:
            train(own, range(1, 5))
            own.write_trace()
        assert ("4/20 [" in stream.getvalue()) == is_terminal
    with telemetry(tmp_path, rank=1, workers=2) as own:
        train(own, range(1, 4))
    assert own.round_records, "known on every rank"
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records_module, "write_trace", full)
    with telemetry(tmp_path) as own:
        train(own, range(1, 4))
        own.write_trace()
        own.write_trace()
    assert caplog.text.count("No space left") == 1, "said once"


def test_a_resume_drops_what_it_repeats_and_what_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "{damaged", "[1]", '{"kind": "round", "step": 2}', '{"step": null}']
    path.write_bytes("\n".join(lines).encode() + b'\n"\xff"\n{"step": 3}\n{"ste')
    drop_records_after(path, 2)
    assert path.read_text() == '{"step":1}\n{"kind":"round","step":2}\n'
    assert "4 lines" in caplog.text
