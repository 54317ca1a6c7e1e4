"""Whole runs: the curve does not depend on the number of processes, what a run writes, and how it ends."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_diloco.trainer
from tests.conftest import REPOSITORY
from tests.processes import ProcessPool
from torchtitan_diloco.components.loss import LossSums, loss_head
from torchtitan_diloco.config import Config, load_config, to_toml
from torchtitan_diloco.distributed.world import World, join_world
from torchtitan_diloco.train import main
from torchtitan_diloco.trainer import Trainer


def settings(text: Path, **changes: Any) -> dict[str, str]:
    base = {
        "data.corpus": text,
        "data.cache_folder": text.parent / "cache",
        "data.validation_fraction": 0.1,
        "run.folder": text.parent / "run",
        "model.layers": 2,
        "model.width": 32,
        "model.heads": 2,
        "model.head_dim": 16,
        "model.feed_forward": 48,
        "training.sequence_length": 32,
        "training.batch_size": 2,
        "training.global_batch_size": 12,
        "training.steps": 8,
        "lr_schedule.warmup_steps": 2,
        "validation.every": 4,
        "validation.sequences": 7,
        "metrics.log_every": 1,
        "metrics.tensorboard": "false",
        "checkpoint.at_end": "false",
        "checkpoint.every_minutes": 0,
        "diloco.workers": 1,
        "diloco.method": "none",
        "distributed.train_timeout_seconds": 30,
        "diloco.link.timeout_seconds": 30,
    }
    return {
        key: str(value)
        for key, value in (base | {k.replace("__", "."): v for k, v in changes.items()}).items()
    }


def words(chosen: dict[str, str]) -> list[str]:
    return [word for key, value in chosen.items() for word in (f"--{key}", value)]


def train(chosen: dict[str, str]) -> list[dict[str, Any]]:
    """Trains with the processes that call it; rank 0 returns the records of metrics.jsonl."""
    config = load_config("debug", chosen)
    world = join(config)
    folder = Trainer(config, world).run()
    return records(folder) if world.is_first else []


def join(config: Config) -> World:
    workers, fsdp = config.diloco.workers, config.parallel.fsdp
    return join_world(
        config.distributed, config.diloco.link, device="cpu", workers=workers, fsdp=fsdp
    )


def records(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Those of logged steps and validations, which have no kind; or `round` or `summary`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record.get("kind") == kind]


def curve(found: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in found if key in record]


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (2, 2), (4, 2), (3, 3)])
def test_any_number_of_processes_gives_the_same_curve(
    text: Path, processes: ProcessPool, size: int, workers: int
) -> None:
    """HSDP over workers x ranks with the same global batch: 12 sequences as 6, 3 or 2 micro-batches."""
    changes = {"training.batch_size": 1} if size == 4 else {}
    alone = train(settings(text, **changes))
    folder = text.parent / "many"
    together = processes.run(
        train, size, settings(text, run__folder=folder, diloco__workers=workers, **changes)
    )[0]
    for key in ("train/loss_nats_per_token_global", "train/gradient_norm_mean_over_workers"):
        assert len(curve(alone, key)) == 8
        assert curve(together, key) == pytest.approx(curve(alone, key), rel=2e-4), key
    for key in ("train/tokens_global", "validation/tokens_global", "train/lr"):
        assert curve(together, key) == curve(alone, key), key
    key = "validation/loss_nats_per_token_global"
    assert curve(together, key) == pytest.approx(curve(alone, key), rel=2e-4)
    assert curve(alone, "validation/tokens_global") == [7 * 32, 7 * 32]


def test_accumulation_is_one_large_batch(text: Path) -> None:
    large = train(settings(text, training__batch_size=12))
    small = train(settings(text, training__batch_size=3, run__folder=text.parent / "small"))
    key = "train/loss_nats_per_token_global"
    assert curve(small, key) == pytest.approx(curve(large, key), rel=1e-5)


def test_it_learns_and_the_same_seed_gives_the_same_run(text: Path) -> None:
    chosen = settings(text, training__steps=60, optimizer__lr="1e-2", validation__every=0)
    first = curve(train(chosen), "train/loss_nats_per_token_global")
    again = curve(
        train(chosen | {"run.folder": str(text.parent / "again")}),
        "train/loss_nats_per_token_global",
    )
    other = curve(
        train(chosen | {"run.folder": str(text.parent / "o"), "run.seed": "1"}),
        "train/loss_nats_per_token_global",
    )
    assert first[-1] < 0.6 * first[0]
    assert first == again
    assert first != other


def test_the_run_folder_starts_the_same_run_again(text: Path) -> None:
    first = train(settings(text))
    saved = text.parent / "run" / "config.toml"
    config = load_config(str(saved), {"run.folder": str(text.parent / "again")})
    assert load_config(str(saved)).run.folder == "", (
        "a second start must not write into the first one's folder"
    )
    world = join(config)
    again = records(Trainer(config, world).run())
    key = "train/loss_nats_per_token_global"
    assert curve(again, key) == curve(first, key)
    assert (text.parent / "again" / "config.toml").read_text() == saved.read_text()
    assert to_toml(load_config(str(saved))) == saved.read_text()


def test_a_folder_that_holds_a_run_is_refused(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(text))
    before = (text.parent / "run" / "metrics.jsonl").read_text()
    assert main(words(settings(text, checkpoint__resume="never"))) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (text.parent / "run" / "metrics.jsonl").read_text() == before


def test_a_run_that_starts_over_keeps_the_records_of_the_one_before(text: Path) -> None:
    first = train(settings(text))
    before = (text.parent / "run" / "metrics.jsonl").read_text()
    again = train(settings(text))
    assert (text.parent / "run" / "metrics-1.jsonl").read_text() == before
    assert len(again) == len(first)


def nan_loss_at(steps: set[int], trainer: Trainer) -> Any:
    def head(targets: torch.Tensor, **options: Any) -> Any:
        plain = loss_head(targets, **options)

        def spoiled(hidden: torch.Tensor, weight: torch.Tensor) -> LossSums:
            sums: LossSums = plain(hidden, weight)
            return (
                sums._replace(objective=sums.objective * math.nan)
                if trainer.step in steps
                else sums
            )

        return spoiled

    return head


def test_a_step_that_is_not_finite_is_skipped_and_counted(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("debug", settings(text, metrics__log_every=3, validation__every=0))
    trainer = Trainer(config, join(config))
    monkeypatch.setattr(torchtitan_diloco.trainer, "loss_head", nan_loss_at({2, 3}, trainer))
    batches = iter(trainer.loader)
    trainer.train_step(batches)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.train_step(batches).skipped
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert trainer.train_step(batches).skipped
    assert not trainer.train_step(batches).skipped
    assert trainer.skipped_in_a_row == 0
    found = records(trainer.run())
    assert all(math.isfinite(loss) for loss in curve(found, "train/loss_nats_per_token_global"))


def test_too_many_skipped_steps_end_the_run(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("debug", settings(text, training__max_skipped_steps=2))
    trainer = Trainer(config, join(config))
    monkeypatch.setattr(
        torchtitan_diloco.trainer, "loss_head", nan_loss_at(set(range(100)), trainer)
    )
    with pytest.raises(
        ValueError, match=r"3 steps in a row, up to step 3, .*max_skipped_steps = 2.*optimizer\.lr"
    ):
        trainer.run()


def test_tensorboard_and_profiler_write_into_the_folder(text: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = train(
        settings(
            text,
            metrics__tensorboard="true",
            profiling__enable="true",
            profiling__start=2,
            profiling__steps=2,
        )
    )
    board = EventAccumulator(str(text.parent / "run" / "tensorboard"))
    board.Reload()
    for key in ("train/loss_nats_per_token_global", "validation/loss_nats_per_token_global"):
        assert [event.value for event in board.Scalars(key)] == pytest.approx(curve(found, key))
    traces = list((text.parent / "run" / "traces").iterdir())
    assert len(traces) == 1
    assert traces[0].stat().st_size > 1000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.corpus": "nowhere/*.txt"}, "nowhere"),
        ({"model.vocab_size": 100}, "model.vocab_size = 100"),
        ({"training.sequence_length": 10**7}, "sequence"),
        ({"diloco.workers": 2}, "diloco.workers = 2"),
        ({"training.stepz": 2}, "training.steps"),
    ],
)
def test_mistakes_are_told_in_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], reason: str
) -> None:
    assert main(words(settings(text, **changes))) == 2
    message = capsys.readouterr().err
    assert "error:" in message
    assert reason in message
    assert "Traceback" not in message


def test_a_warm_up_longer_than_the_run_is_pointed_out(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(settings(text, lr_schedule__warmup_steps=9))) == 0
    assert (
        "lr_schedule.warmup_steps = 9 is longer than the run of 8 steps" in capsys.readouterr().out
    )


def test_a_start_that_is_to_stop_says_how_the_run_goes_on(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(text, training__stop_after=3, checkpoint__at_end="false")
    assert main(words(chosen)) == 0
    said = capsys.readouterr().out
    assert [path.name for path in Path(chosen["run.folder"], "checkpoints").iterdir()] == [
        "step-00000003"
    ]
    assert (
        "stopped after step 3 of 8, as asked by training.stop_after = 3; with a later one or none, the same command"
        in said
    )


def test_a_stop_at_the_end_or_behind_is_pointed_out(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(settings(text, training__stop_after=8))) == 0
    assert (
        "training.stop_after = 8 does nothing: the run ends after step 8" in capsys.readouterr().out
    )


def test_a_signal_ends_the_run_after_a_whole_step(text: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torchtitan_diloco.train",
        *words(settings(text, training__steps=1_000_000)),
    ]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step") and lines[-1].split()[1].startswith("3/"):
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    timer.cancel()
    assert process.wait(timeout=30) == 0
    assert "as asked by a signal" in rest


def streaming(text: Path, **changes: Any) -> dict[str, str]:
    return settings(
        text,
        **{
            "diloco.method": "streaming",
            "diloco.workers": 2,
            "diloco.sync_every": 4,
            "diloco.fragments.layers_per_fragment": 1,
            "training.global_batch_size": 16,
            "validation.local": "true",
            **changes,
        },
    )


def test_streaming_with_fsdp_inside_is_streaming(text: Path, processes: ProcessPool) -> None:
    """2 workers x 1 rank and 2 workers x 2 ranks read the same samples and exchange the same fragments."""
    alone = processes.run(train, 2, streaming(text))[0]
    sharded = processes.run(train, 4, streaming(text, run__folder=text.parent / "sharded"))[0]
    for key in (
        "train/loss_nats_per_token_global",
        "validation/loss_nats_per_token_global",
    ):
        assert len(curve(alone, key)) >= 2
        assert curve(sharded, key) == pytest.approx(curve(alone, key), rel=2e-4), key
    values = sum(curve(alone, "diloco/sent_bytes_sum_over_ranks"))
    assert values > 0
    assert sum(curve(sharded, "diloco/sent_bytes_sum_over_ranks")) == pytest.approx(
        values, rel=0.05
    )


def test_the_shared_parameters_are_validated(text: Path, processes: ProcessPool) -> None:
    """With mixing 0 and every fragment just applied, local and shared parameters are the same; before, they are not."""
    changes = {
        "diloco.overlap.delay": 0,
        "diloco.overlap.mixing": 0.0,
        "diloco.fragments.layers_per_fragment": 0,
    }
    found = processes.run(train, 2, streaming(text, validation__every=2, **changes))[0]
    shared = curve(found, "validation/loss_nats_per_token_global")
    local = curve(found, "validation/local_loss_nats_per_token_mean_over_workers")
    assert local[1] == pytest.approx(shared[1], rel=1e-6), "after step 4, a sync"
    assert local[0] != pytest.approx(shared[0], rel=1e-3), "after step 2"


def test_a_streaming_run_ends_with_what_it_saved(text: Path) -> None:
    command = [sys.executable, "-m", "torchtitan_diloco.launch", *words(streaming(text))]
    outcome = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    for expected in (
        "each fragment every 4 steps, applied 1 steps later",
        "blocks.0",
        "loss of the shared model",
        "sent between workers",
        "data parallelism would send",
        "communication hidden",
    ):
        assert expected in outcome.stdout, expected
    assert "Warning" not in outcome.stderr


@pytest.mark.parametrize(
    ("kind", "sync_every"), [(signal.SIGKILL, 4), (signal.SIGKILL, 1000), (signal.SIGSTOP, 1000)]
)
def test_a_lost_worker_is_named_in_a_line(
    text: Path, kind: signal.Signals, sync_every: int
) -> None:
    """Both with an exchange in flight and between two. The processes are started here, so that no launcher ends the one
    that is to say who is missing."""
    chosen = streaming(
        text,
        training__steps=100_000,
        diloco__sync_every=sync_every,
        validation__every=0,
        diloco__link__timeout_seconds=4,
    )
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "torchtitan_diloco.train", *words(chosen)]
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True
            )
        )
    survivor, victim = processes
    timer = threading.Timer(100, survivor.kill)
    timer.start()
    try:
        assert survivor.stdout is not None
        for line in survivor.stdout:
            if line.startswith("step") and line.split()[1].startswith("30/"):
                victim.send_signal(kind)
                break
        _, errors = survivor.communicate()
    finally:
        timer.cancel()
        victim.kill()
        victim.communicate()
    assert survivor.returncode == 3, errors
    lines = [line for line in errors.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert "worker 1" in lines[0]
    assert "left or did not answer in time" in lines[0]
    assert "step" in lines[0]
    assert "Traceback" not in errors
