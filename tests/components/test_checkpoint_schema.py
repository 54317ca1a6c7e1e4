"""The folder of a checkpoint: listing, clean-up, and reading what somebody else has written."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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

TENSORS = f"{SHARED}/rank-0.safetensors"
EMPTY = Manifest(RunState(), workers=1, ranks_per_worker=1, data={}, config="")


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
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1, 3, 4]
    found = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {*names, "step-00000007.incomplete", *(f"step-0000000{n}" for n in (1, 3, 4))}


def test_the_latest_and_every_nth_are_kept_and_none_is_replaced(tmp_path: Path) -> None:
    for step in range(2, 17, 2):
        prune(tmp_path, write_checkpoint(tmp_path, step), keep_latest=2, keep_every=10)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [10, 14, 16]
    before = (checkpoint_path(tmp_path, 16) / MANIFEST).stat()
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path, 16)
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
        assert [step_of(path) for path in complete_checkpoints(run)] == [3]
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
