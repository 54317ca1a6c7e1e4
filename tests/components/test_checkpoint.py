"""Saves: when they happen, what is kept, and what a failure leaves."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.components.test_resume import STEPS, TOPK, chosen, last, run
from tests.processes import ProcessPool
from tests.test_trainer import around_steps, records
from torchtitan_diloco.components import checkpoint, checkpoint_schema
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_folders import (
    complete,
    complete_checkpoints,
    step_of,
)
from torchtitan_diloco.components.checkpoint_schema import (
    Manifest,
    RunState,
    read_manifest,
)
from torchtitan_diloco.components.run_folder import RunFolder
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco import WorkerLostError, liveness
from torchtitan_diloco.diloco.heartbeat import Pace
from torchtitan_diloco.diloco.object_collectives import gather_objects
from torchtitan_diloco.diloco.outer_loop import DataParallel
from torchtitan_diloco.distributed import stop
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.trainer import Trainer


def saved_steps(folder: Path) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(folder)]


def test_a_full_disk_leaves_training_and_other_checkpoints(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = iter(range(100))

    def save(rows: Any, file: Path) -> None:
        if next(saves) in (1, 3):
            file.mkdir()  # what safetensors says of it does not name the file
        save_file(rows, file)

    monkeypatch.setattr(checkpoint_schema, "save_file", save)
    file = "run/checkpoints/step-00000016.incomplete/worker-0/rank-0.safetensors"
    reason = f"the last checkpoint could not be saved: .*{file} .*Is a directory"
    with pytest.raises(ValueError, match=reason):
        run(chosen(text, tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == [4, 12]
    run(chosen(text, tmp_path / "run"))
    assert step_of(last(tmp_path / "run")) == STEPS


def test_a_late_save_holds_its_own_step_and_is_finished_although_the_run_fails(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_late(path: Path) -> None:
        time.sleep(0.3)
        complete(path)

    def fail(trainer: Trainer) -> None:
        if trainer.step == 8:  # a save has begun after it
            raise ValueError("no further")

    monkeypatch.setattr(checkpoint, "complete", finish_late)
    with around_steps(before=fail), pytest.raises(ValueError, match="no further"):
        run(chosen(text, tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == [4, 8]
    for path in complete_checkpoints(tmp_path / "run"):
        assert read_manifest(path).state.totals["worker_0/steps"] == step_of(path)


def _hangs(wanted: dict[str, str], hanging: int) -> str:
    """Train; a rank stops for good in a step, the others get a signal, and one ends it at last."""
    pace, pids = Pace(beat=0.1, silence=1.0), list[int]()

    def hang(trainer: Trainer) -> None:
        if trainer.step == 9:
            pids.extend(gather_objects(os.getpid(), trainer.world.control))
            if trainer.world.rank == hanging:
                os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, around_steps(before=hang):
        patch.setattr(liveness, "Pace", lambda: pace)
        patch.setattr(stop, "HANGING_SECONDS", 2.0)
        with pytest.raises(WorkerLostError) as lost:
            run(wanted)
    if os.environ["RANK"] == "0":
        os.kill(pids[hanging], signal.SIGKILL)
    return str(lost.value)


def test_a_worker_is_saved_although_another_hangs_at_a_stop_request(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    wanted = chosen(text, tmp_path, **TOPK, **{"checkpoint.every": 0})
    error, _ = processes.run(_hangs, 2, wanted, 1, dying={1})
    assert "worker 1 left or did not answer" in error
    (step,) = saved_steps(tmp_path)
    manifest = read_manifest(last(tmp_path))
    assert manifest.workers == 1
    processes.run(run, 2, wanted)
    assert saved_steps(tmp_path) == [step, STEPS]
    position = read_manifest(last(tmp_path)).state.position
    assert position - manifest.state.position == (STEPS - step) * 12
    assert manifest.state.totals["worker_0/steps"] < step, "what the other had to answer is lost"
    (summary,) = records(tmp_path, "summary")
    assert summary["counted_after_step"] == 0


MANIFEST = Manifest(RunState(step=1), workers=1, ranks_per_worker=1, data={}, config="")


def alone(folder: Path, **settings: Any) -> Checkpointer:
    model = torch.nn.Linear(2, 2)
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    outer = DataParallel(model)
    run_folder = RunFolder(folder)
    return Checkpointer(Checkpoint(**settings), run_folder, world, model, optimizer, outer)


def test_losses_end_a_wait_for_a_save_and_do_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose machine is gone never answers, and a save waits long for a slow disk."""
    found = threading.Event()

    def lost(*_: Any) -> str:
        found.set()
        raise WorkerLostError([1], "connection closed by peer")

    monkeypatch.setattr(Checkpointer, "_write", lost)
    saver = alone(tmp_path)
    saver.save(MANIFEST)
    saver.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.wait()

    found.clear()
    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(found.wait(60)))
    monkeypatch.setattr(DataParallel, "check", lost)
    saver = alone(tmp_path)
    saver.save(MANIFEST)
    with pytest.raises(WorkerLostError, match="worker 1 left"):
        saver.wait()


def test_a_save_by_time_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other ranks agree some steps later."""
    now = [1000.0]
    monkeypatch.setattr("torchtitan_diloco.components.checkpoint.time.monotonic", lambda: now[0])
    saver = alone(tmp_path, every_minutes=2)
    due = []
    for _ in range(8):
        now[0] += 30
        due.append(saver.due_by_time())
    assert due == [False, False, False, True, False, False, False, True]

    written = threading.Event()
    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(written.wait(60)))
    saver.save(MANIFEST)
    now[0] += 500
    assert not saver.due_by_time()  # training would wait for the save under way
    written.set()
    saver.wait()
    assert saver.due_by_time()
