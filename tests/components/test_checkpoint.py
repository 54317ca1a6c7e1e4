"""Checkpoints: their folder, when they are saved, and what a failure leaves."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.components.test_resume import STEPS, chosen, last, run
from tests.test_trainer import around_steps
from torchtitan_diloco.components import checkpoint_folders, checkpoint_schema
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_folders import (
    MANIFEST,
    begin,
    checkpoint_path,
    complete,
    complete_checkpoints,
    incomplete,
    prune,
    set_aside,
    step_of,
    write_manifest,
)
from torchtitan_diloco.components.checkpoint_schema import (
    SHARED,
    Manifest,
    RunState,
    TensorFolder,
    fingerprint,
    read_manifest,
    write_tensors,
)
from torchtitan_diloco.components.run_folder import RunFolder
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco import WorkerLostError
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.outer_loop import DataParallel
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.trainer import Trainer

TENSORS = f"{SHARED}/rank-0.safetensors"
EMPTY = Manifest(RunState(), workers=1, ranks_per_worker=1, data={}, config="")


def saved_steps(folder: Path) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(folder)]


def write_checkpoint(run: Path, step: int) -> Path:
    """Write a checkpoint with one folder of tensors."""
    path = checkpoint_path(run, step)
    begin(path)
    write_tensors(incomplete(path) / SHARED, {"outer/weight": torch.arange(6.0)}, rank=0)
    sign(incomplete(path), step)
    complete(path)
    return path


def sign(path: Path, step: int) -> None:
    """Write a manifest that fits the files."""
    files = {f"{SHARED}/{file.name}": fingerprint(file) for file in (path / SHARED).iterdir()}
    manifest = replace(EMPTY, state=RunState(step=step), files=files)
    (path / MANIFEST).write_text(manifest.to_json())


def test_incomplete_damaged_and_foreign_folders_are_no_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step)
    (checkpoint_path(tmp_path, 4) / MANIFEST).unlink()
    names = ["step-00000003.damaged", "step-00000003.damaged-2", "step-00000005.bak"]
    for name in names[:2]:
        assert set_aside(checkpoint_path(tmp_path, 3)).name == name
        write_checkpoint(tmp_path, 3)
    for name in (names[2], "step-00000006.incomplete"):
        shutil.copytree(checkpoint_path(tmp_path, 3), tmp_path / "checkpoints" / name)
    begin(checkpoint_path(tmp_path, 7))
    newest = checkpoint_path(tmp_path, 1)  # by a run that was taken back
    prune(tmp_path, newest, keep_latest=1, keep_every=0)
    assert saved_steps(tmp_path) == [1, 3, 4]
    found = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {*names, "step-00000007.incomplete", *(f"step-0000000{n}" for n in (1, 3, 4))}


def test_the_latest_and_every_nth_are_kept_and_none_is_replaced(tmp_path: Path) -> None:
    for step in range(2, 17, 2):
        prune(tmp_path, write_checkpoint(tmp_path, step), keep_latest=2, keep_every=10)
    assert saved_steps(tmp_path) == [10, 14, 16]
    before = (checkpoint_path(tmp_path, 16) / MANIFEST).stat()
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path, 16)
    begin(checkpoint_path(tmp_path, 17))
    with pytest.raises(OSError, match=r"17.incomplete/absent .* must share run.folder"):
        write_manifest(checkpoint_path(tmp_path, 17), ["absent"], "{}")
    assert (checkpoint_path(tmp_path, 16) / MANIFEST).stat() == before


class StoppedError(BaseException):
    """The process has ended here."""


def save_and_stop(run: Path, step: int, after: int) -> bool:
    """Save as a run does. Return whether it has ended before, after so many changes of the disk."""
    changes = [(Path, "mkdir"), (Path, "open"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    left, path = iter(range(after)), checkpoint_path(run, step)

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_change(*given: Any, **more: Any) -> Any:
            if next(left, None) is None:
                raise StoppedError
            return change(*given, **more)

        return count_and_change

    with pytest.MonkeyPatch.context() as patch, suppress(StoppedError):
        for owner, name in changes:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        begin(path)
        write_manifest(path, [], "{}")
        complete(path)
        prune(run, path, keep_latest=1, keep_every=0)
        return False
    return True


def test_a_save_that_ends_anywhere_leaves_the_newest_checkpoint(tmp_path: Path) -> None:
    newest, after = [], 0
    while True:
        run = tmp_path / str(after)
        save_and_stop(run, 1, 99)
        stopped = save_and_stop(run, 2, after)
        found = complete_checkpoints(run)
        assert all((path / MANIFEST).exists() for path in found)
        newest.append(step_of(found[-1]))
        assert not save_and_stop(run, 3, 99), "the next one is not in its way"
        assert saved_steps(run) == [3]
        if not stopped:
            break
        after += 1
    assert newest == sorted(newest)
    assert len(newest) > 8


def test_only_tensors_in_files_with_a_checksum_are_read(tmp_path: Path) -> None:
    """Nothing is unpickled, and a file that is not in the manifest is not even opened."""
    path, weight = write_checkpoint(tmp_path, 1), torch.zeros(6)
    manifest = read_manifest(path)
    with pytest.raises(ValueError, match=r"shared has no outer/weight of shape \(6,\)"):
        TensorFolder(path, replace(manifest, files={}), SHARED).fill({"outer/weight": weight})
    torch.save({"outer/weight": weight}, path / TENSORS)
    with pytest.raises(ValueError, match=f"{TENSORS} does not hold tensors"):
        TensorFolder(path, manifest, SHARED)


def test_rows_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """The last ranks may have fewer rows than the others, or none."""
    whole, path = torch.arange(10.0).view(5, 2), tmp_path / "checkpoint"
    path.mkdir()
    for rank in range(4):
        rows = {"rows": whole[2 * rank : 2 * rank + 2]} | ({} if rank else {"step": whole.sum()})
        write_tensors(path / SHARED, rows, rank)
    sign(path, 1)
    found = {"rows": torch.zeros(5, 2), "step": torch.zeros(())}
    TensorFolder(path, read_manifest(path), SHARED).fill(found)
    assert torch.equal(found["rows"], whole)
    assert found["step"] == 45


# --- saves ----------------------------------------------------------------------------------------


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

    monkeypatch.setattr(checkpoint_folders, "complete", finish_late)
    with around_steps(before=fail), pytest.raises(ValueError, match="no further"):
        run(chosen(text, tmp_path / "run"))
    assert saved_steps(tmp_path / "run") == [4, 8]
    for path in complete_checkpoints(tmp_path / "run"):
        assert read_manifest(path).step == step_of(path)


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
    saver.save(EMPTY)
    saver.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.wait()

    found.clear()
    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(found.wait(60)))
    monkeypatch.setattr(Liveness, "check", lost)
    saver = alone(tmp_path)
    saver.save(EMPTY)
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
    saver.save(EMPTY)
    now[0] += 500
    assert not saver.due_by_time()  # training would wait for the save under way
    written.set()
    saver.wait()
    assert saver.due_by_time()
