"""Steps through telemetry: what is recorded, when it is read, and where it is written."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.islands.servers import wait_until
from tests.test_trainer import LOSS, records
from torchtitan_diloco.components import telemetry as module
from torchtitan_diloco.components.metrics import METRICS, time_shares
from torchtitan_diloco.components.records import to_line
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.summary import _goodput, all_reduce_bytes, log_summary
from torchtitan_diloco.components.telemetry import RunProgress, StepResult, Telemetry
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.distributed.world import World

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
    name, parameters = "blocks", 80


class Outer:
    """Sends 10 bytes in a round that it applies at every step."""

    fragments: tuple[type[Blocks], ...] = (Blocks,)
    exposed_seconds = 0.0

    def __init__(self) -> None:
        self.steps, self.applied = 0, list[Round]()

    def step(self) -> None:
        self.steps += 1
        traffic = Traffic(10, 10, header_sent=1.0, heard={1: 1.5}, received=self.steps + 0.4)
        round_ = Round(0, self.steps, self.steps, 80, 1.0, 2, self.steps, traffic=traffic)
        round_.due = round_.taken = round_.begun = round_.asked = float(self.steps)
        round_.ready = round_.fetched = round_.applied = self.steps + 0.5
        self.applied.append(round_)

    def metrics(self) -> dict[str, float]:
        names = "exposed_seconds", "exposed_waiting_seconds", "exchange_seconds"
        return {SENT: 1e9} | {f"worker/{name}": 1e-9 for name in names}

    def rounds(self) -> list[Round]:
        applied, self.applied = self.applied, []
        return applied


def telemetry(
    folder: Path | None,
    outer: Any = None,
    *,
    rank: int = 0,
    workers: int = 1,
    step: int = 0,
    **config: Any,
) -> Telemetry:
    """Without process groups: the sums over ranks are this rank's own numbers."""
    world, loop = World(rank, workers, workers, CPU), cast(OuterLoop, outer or Outer())
    shown = Metrics(**({"tensorboard": False} | config))
    chosen = {"run.seed": 1}
    return Telemetry(shown, world, folder, PLAN, loop, step, flops_per_token=1, settings=chosen)


def log(own: Telemetry, step: int, run: RunProgress | None = None) -> None:
    own.open(step, 0.1, PendingSum(own.world, [0, 0, *own.sums], "in the test"), run=run)


def train(own: Telemetry, steps: Sequence[int], result: StepResult = TRAINED) -> None:
    """Train steps of two seconds, of which half a second waits for data, and log every second."""

    def load() -> Iterator[Any]:
        for _ in steps:
            Clock.now += 0.5
            yield None

    batches = own.timed(load())

    def train_step() -> StepResult:
        next(batches)
        own._outer.step()
        Clock.now += 1.5
        return result

    for step in steps:
        own.measure(train_step)
        if step % 2 == 0:
            log(own, step)
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
    assert second["train/gradient_norm"] == 3.0
    assert (first["train/tokens"], second["train/tokens"]) == (128, 256)
    assert own.totals["worker/steps"] == 8
    assert (first[SENT], own.totals[SENT]) == (2 * 10 / 2, 40), "mean over the workers"
    assert len(records(tmp_path, "round")) == outer.steps
    skipped = "worker/skipped_steps"
    assert (third[LOSS], third[skipped], fourth[skipped]) == (1.0, 1, 2), "in no loss"
    assert (fourth[LOSS], fourth["train/gradient_norm"]) == ("nan", "inf")
    assert set(second) - {"step", "time"} <= METRICS.keys(), "all are declared"


def test_the_summary_counts_islands_that_came_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = telemetry(None)
    train(own, range(1, 9))
    caplog.set_level("INFO", "torchtitan_diloco")
    log_summary(own, tmp_path, 10, None, has_control=False)
    expected = 8 * all_reduce_bytes(PLAN.parameters, 2) / 1e6
    assert f"{expected:,.1f} MB (bf16 gradients, every step)" in caplog.text
    assert "by each worker after step 2, as counted" in caplog.text


@pytest.mark.parametrize(
    ("starts", "steps", "expected"),
    [
        ([0.0], {100.0: 100.0}, ""),
        ([0.0, 200.0], {100.0: 100.0, 400.0: 200.0}, "75.0 % of the run, 75.0 % of the last hour"),
        ([0.0], {3600.0: 3000.0, 7200.0: 1800.0}, "66.7 % of the run, 50.0 % of the last hour"),
    ],
)
def test_goodput_is_the_share_of_the_time_in_steps_that_are_kept(
    starts: list[float], steps: dict[float, float], expected: str, tmp_path: Path
) -> None:
    lines: list[dict[str, object]] = [{"kind": "start", "time": one, "step": 0} for one in starts]
    lines += [{"step": 1, "time": at, "worker/step_seconds": took} for at, took in steps.items()]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(to_line, lines)))
    assert _goodput(path).get("goodput", "").endswith(f"{expected}, first worker" * bool(expected))
    assert bool(_goodput(path)) == bool(expected)


def test_pauses_are_left_out_and_earlier_sessions_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", Clock())
    (tmp_path / "worker-0").mkdir()
    before = f'{{"step": 10, "{SENT}": 5, "worker/exposed_seconds": 0, "worker/steps": 1, '
    before += '"worker/elapsed_seconds": 1000}\n{"step": 10, "loss/val": 1.0}\n{"step": 11}\n'
    (tmp_path / "worker-0/metrics.jsonl").write_text(before)
    with telemetry(tmp_path, step=10) as own:
        Clock.now += 7
        own.pause(7)
        train(own, [11])
        Clock.now += 6  # between steps
        train(own, [12])
    *_, record = records(tmp_path)
    assert [one["step"] for one in records(tmp_path)] == [10, 10, 12]
    assert record["speed/seconds_per_step"] == 5.0
    assert record["speed/tokens_per_second"] == 64 / 5
    shares = time_shares(record)
    assert list(shares.values()) == pytest.approx([30, 10, 0, 60], abs=1e-3)
    assert record["worker/elapsed_seconds"] == 1017
    assert (record["worker/compute_seconds"], record["worker/compute_spread"]) == (3, 0)
    assert (own.totals[SENT], own.totals["worker/steps"]) == (25, 3)
    starts = [found["at_seconds"]["due"] for found in records(tmp_path, "round")]
    assert starts == [1e9 + 1, 1e9 + 2], "on the wall clock"


def test_data_parallelism_does_not_know_its_communication(tmp_path: Path) -> None:
    none = {"fragments": (), "step": int, "metrics": dict, "rounds": list}
    with telemetry(tmp_path, SimpleNamespace(exposed_seconds=0.0, **none), workers=2) as own:
        train(own, [1, 2])
    (record,) = records(tmp_path)
    assert not [key for key in record if key.startswith("sync/") or "exposed" in key]
    shares = time_shares(record)
    assert math.isnan(shares.pop("exposed communication"))
    assert math.fsum(shares.values()) == pytest.approx(100, abs=1e-6)


def test_tensorboard_opens_on_what_matters(tmp_path: Path) -> None:
    for rank in range(2):
        with telemetry(tmp_path, tensorboard=True, rank=rank, workers=2, step=1) as own:
            train(own, range(2, 5))
            own.write(4, {"loss/val": 1.5})
    first, second = (
        EventAccumulator(str(tmp_path / f"worker-{rank}")).Reload() for rank in range(2)
    )
    assert [one.step for one in first.Scalars(LOSS)] == [2, 4]
    assert [one.step for one in first.Scalars("speed/tokens_per_second")] == [4], "no outlier"
    tags = set(first.Tags()["scalars"])
    assert tags <= METRICS.keys(), "the names of the file"
    shown = {name.partition("/")[0] for name in METRICS}
    assert sorted(shown) == ["loss", "speed", "sync", "train", "worker"]
    assert sum(not tag.startswith("worker/") for tag in tags) <= 12
    text = first.SummaryMetadata(LOSS).summary_description
    assert text == "nats per token, of the workers' own parameters; all workers"
    own_tags = set(second.Tags()["scalars"])
    assert {"sync/hidden_percent", SENT} < own_tags
    assert not {LOSS, "loss/val", "train/lr"} & own_tags, "shown once"


def test_an_island_speaks_of_itself_and_of_the_tokens_of_the_run(tmp_path: Path) -> None:
    with telemetry(tmp_path, tensorboard=True) as own:
        own.measure(lambda: TRAINED)
        log(own, 1, RunProgress(steps=7, tokens=448))
        own.publish(all=True)
    assert records(tmp_path)[0]["train/tokens"] == 448
    board = EventAccumulator(str(tmp_path / "worker-0")).Reload()
    assert board.SummaryMetadata(LOSS).summary_description.endswith("; this worker")


def test_a_run_that_becomes_longer_has_no_negative_time_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), telemetry(tmp_path) as own:
        for step, done in enumerate((10, 11, 6), start=1):
            own.measure(lambda: TRAINED)
            log(own, step, RunProgress(steps=done, tokens=64 * done))
        own.publish(all=True)
    assert caplog.text.count("  ETA ") == 3
    assert "-1d" not in caplog.text


def test_weights_and_biases_gets_the_same_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    names, folder = [], tmp_path / "worker-0"
    for step in (0, 4):
        with telemetry(tmp_path, wandb="slow-links", step=step) as own:
            train(own, range(step + 1, step + 5))
        names.append((folder / "wandb/run-id").read_text())
    assert names[0] == names[1], "a resumed run goes on"
    written = list(folder.glob("wandb/offline*/run-*.wandb"))
    assert len(written) == 2
    wait_until(lambda: min(path.stat().st_size for path in written) > 1000, "wandb's process")
    for path in written:
        for expected in ("slow-links", LOSS, SENT, names[0]):
            assert expected.encode() in path.read_bytes()


def test_weights_and_biases_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'"slow-links" needs the package wandb: .*pip install'):
        telemetry(tmp_path, wandb="slow-links")


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with telemetry(tmp_path) as own:
        monkeypatch.setattr(own.files, "_lines", type("Full", (), {"write": full, "close": full})())
        train(own, range(1, 5))
    assert caplog.text.count("No space left") == 1, "said once"
