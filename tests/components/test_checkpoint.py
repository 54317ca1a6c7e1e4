"""Saves: when they are due, and what a failure leaves."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from tests.components.checkpoints import ALONE, EMPTY, alone, saved_steps, toy_state
from tests.components.test_resume import STEPS, chosen, last, run
from tests.processes import DIED, ProcessPool
from tests.test_trainer import around_steps
from torchtitan_diloco.components import checkpoint
from torchtitan_diloco.components.checkpoint import LEAVE_SECONDS, Checkpointer
from torchtitan_diloco.components.checkpoint_folder import (
    complete,
    complete_checkpoints,
    read_manifest,
    step_of,
)
from torchtitan_diloco.config.schema import Checkpoint, Distributed
from torchtitan_diloco.diloco import WorkerLostError
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.distributed.collectives import RanksLostError
from torchtitan_diloco.distributed.world import join_world
from torchtitan_diloco.trainer import Trainer


def test_a_full_disk_leaves_training_and_other_checkpoints(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = iter(range(100))

    def save(rows: Any, file: Path) -> None:
        if next(saves) in (1, 3):
            file.mkdir()  # what safetensors says of it does not name the file
        save_file(rows, file)

    monkeypatch.setattr(checkpoint, "save_file", save)
    file = "a run/worker-0/step-00000016.incomplete/rank-0.safetensors"
    reason = f"the last checkpoint could not be saved: .*{file} .*a directory.*folder '.*/a run',"
    with pytest.raises(ValueError, match=reason):
        run(chosen(text, tmp_path / "a run"))
    assert saved_steps(tmp_path / "a run/worker-0") == [4, 12]
    run(chosen(text, tmp_path / "a run"))
    assert step_of(last(tmp_path / "a run")) == STEPS


def test_a_save_takes_from_the_time_for_the_mirror(tmp_path: Path) -> None:
    """On a machine that is taken away."""
    copier = Mock(held=set())
    waits = list[float]()
    settings = Checkpoint()
    state = toy_state()
    checkpointer = Checkpointer(settings, tmp_path, ALONE, state, about=EMPTY, mirror=copier)
    checkpointer.save(4, tokens=0, position=None)
    copier.finish.side_effect = lambda most_seconds: waits.append(most_seconds())
    checkpointer.finish(lambda: 20.0 if saved_steps(tmp_path) else 99.0)
    assert waits == [20.0 - LEAVE_SECONDS]


def test_a_late_save_holds_its_own_step_and_is_finished_although_the_run_fails(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_late(path: Path, manifest: str) -> None:
        time.sleep(0.3)
        complete(path, manifest)

    def fail(trainer: Trainer) -> None:
        if trainer.step == 8:  # a save has begun after it
            raise ValueError("no further")

    monkeypatch.setattr(checkpoint, "complete", finish_late)
    with around_steps(before=fail), pytest.raises(ValueError, match="no further"):
        run(chosen(text, tmp_path / "run"))
    assert saved_steps(tmp_path / "run/worker-0") == [4, 8]
    for path in complete_checkpoints(tmp_path / "run/worker-0"):
        assert read_manifest(path).step == step_of(path)


def test_a_loss_ends_a_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose machine is gone never answers, and a save waits long for a slow disk."""
    found = threading.Event()

    def lost(*_: Any) -> None:
        found.set()
        raise WorkerLostError([1], "connection closed by peer")

    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(found.wait(60)))
    monkeypatch.setattr(Liveness, "check", lost)
    saver = alone(tmp_path)
    saver.save(step=1, tokens=2, position=None)
    with pytest.raises(WorkerLostError, match="worker 1 left"):
        saver.wait()
    saver.close()


def _run_out_of_memory_in_a_save(folder: Path) -> str:
    """Return what the other rank says when rank 1 runs out of memory in a save."""
    world = join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=0)
    saver = Checkpointer(Checkpoint(), folder, world, toy_state(), about=EMPTY)
    if world.rank == 0:
        saver.save(step=1, tokens=2, position=None)
        with pytest.raises(RanksLostError) as lost:
            saver.wait()
        return str(lost.value)
    with pytest.MonkeyPatch.context() as patch:
        full = torch.OutOfMemoryError("full")
        patch.setattr(checkpoint, "write_tensors", Mock(side_effect=full))
        saver.save(step=1, tokens=2, position=None)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            saver.wait()
        assert raised.value is full
        os._exit(1)


def test_a_full_memory_in_a_save_is_no_lost_rank_where_it_is_full(
    processes: ProcessPool, tmp_path: Path
) -> None:
    lost, died = processes.run(_run_out_of_memory_in_a_save, 2, tmp_path, dying={1})
    assert died == DIED
    assert re.search(r"^(rank|worker) 1 .* left or did not answer in time .*in a save", lost), lost


def _cannot_complete(folder: Path) -> tuple[str, list[int], str]:
    """Return why two saves failed of which worker 1 cannot complete the second, and what each
    worker has."""
    world = join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=0)
    folder /= f"worker-{world.worker}"
    saver = Checkpointer(Checkpoint(), folder, world, toy_state(), about=EMPTY)
    saver._writes = True  # as with an outer loop
    saver._is_first = True
    saver.save(step=1, tokens=2, position=None)
    saver.wait()
    before = saver.failure
    with pytest.MonkeyPatch.context() as patch:
        if world.worker == 1:
            patch.setattr(checkpoint, "complete", Mock(side_effect=OSError("no room")))
        saver.save(step=2, tokens=4, position=None)
        saver.wait()
    saver.close()
    return before, saved_steps(folder), saver.failure


def test_a_save_that_one_worker_cannot_complete_leaves_nothing_on_others(
    processes: ProcessPool, tmp_path: Path
) -> None:
    for before, steps, failure in processes.run(_cannot_complete, 2, tmp_path):
        assert before == ""
        assert steps == [1]
        assert "no room" in failure
    assert not list(tmp_path.rglob("*.incomplete"))


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
    saver.save(step=1, tokens=2, position=None)
    now[0] += 500
    assert not saver.due_by_time()  # training would wait for the save under way
    written.set()
    saver.wait()
    assert saver.due_by_time()
