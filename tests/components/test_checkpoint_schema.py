"""The folder of a checkpoint: listing, clean-up, and reading what somebody else has written."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

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
    METADATA,
    SHARED,
    Manifest,
    RunState,
    TensorFolder,
    fingerprint,
    read_manifest,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EMPTY = Manifest(RunState(), workers=1, ranks_per_worker=1, data={}, config="")


def write_checkpoint(run: Path, step: int, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write a checkpoint with one folder of tensors."""
    path = checkpoint_path(run, step)
    begin(path)
    writer = FileSystemWriter(incomplete(path) / SHARED)
    save(tensors or {"outer/weight": torch.arange(6.0)}, storage_writer=writer, no_dist=True)
    sign(incomplete(path), step)
    complete(path)
    return path


def sign(path: Path, step: int) -> None:
    """Write a manifest that fits the files."""
    files = {f"{SHARED}/{file.name}": fingerprint(file) for file in (path / SHARED).iterdir()}
    manifest = replace(EMPTY, state=RunState(step=step), files=files)
    (path / MANIFEST).write_text(manifest.to_json())


def test_incomplete_folders_are_deleted_and_the_newest_kept(tmp_path: Path) -> None:
    copy = "step-00000005.bak"  # somebody's copy is no checkpoint of the run, and is kept
    for name in ("step-00000001", "step-00000002", "step-00000003.incomplete", copy):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    begin(tmp_path / "checkpoints" / "step-00000004")
    newest = tmp_path / "checkpoints" / "step-00000001"  # by a run that was taken back
    prune(tmp_path, newest, keep_latest=1, keep_every=0)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-00000001", "step-00000002", "step-00000004.incomplete", copy]


def test_damaged_checkpoints_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step)
    (checkpoint_path(tmp_path, 4) / MANIFEST).unlink()
    names = ["step-00000003.damaged", "step-00000003.damaged-2"]
    for name in names:
        assert set_aside(checkpoint_path(tmp_path, 3)).name == name
        write_checkpoint(tmp_path, 3)
    prune(tmp_path, checkpoint_path(tmp_path, 3), keep_latest=2, keep_every=0)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [2, 3, 4]
    assert all((tmp_path / "checkpoints" / name / MANIFEST).exists() for name in names)


def test_the_latest_and_every_nth_are_kept(tmp_path: Path) -> None:
    for step in range(2, 17, 2):
        prune(tmp_path, write_checkpoint(tmp_path, step), keep_latest=2, keep_every=10)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [10, 14, 16]


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
        write_manifest(path, "{}")
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


def test_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path, 1) / MANIFEST
    before = manifest.stat()
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path, 1)
    assert manifest.stat() == before


# --- a checkpoint that wants to run code ----------------------------------------------------------


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.marker,)


def metadata_that_runs_code(folder: Path, marker: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Touch(marker)))


def metadata_with_code_beside_the_tensors(folder: Path, marker: Path) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    (folder / METADATA).write_bytes(pickle.dumps(replace(metadata, planner_data=Touch(marker))))


def bytes_that_run_code(folder: Path, marker: Path) -> None:
    """DCP unpickles the content of what its metadata calls bytes."""
    metadata: Metadata = FileSystemReader(folder).read_metadata()
    (index, info), *_ = metadata.storage_data.items()
    content = io.BytesIO()
    torch.save(Touch(marker), content)
    (folder / info.relative_path).write_bytes(content.getvalue())
    whole = replace(info, offset=0, length=len(content.getvalue()))
    index = replace(index, offset=None)
    forged = replace(
        metadata,
        state_dict_metadata={index.fqn: BytesStorageMetadata()},
        storage_data={index: whole},
    )
    (folder / METADATA).write_bytes(pickle.dumps(forged))


def tensor_that_runs_code(folder: Path, marker: Path) -> None:
    metadata: Metadata = FileSystemReader(folder).read_metadata()
    (info, *_) = metadata.storage_data.values()
    content = io.BytesIO()
    torch.save(Touch(marker), content)
    (folder / info.relative_path).write_bytes(content.getvalue())
    storage = {
        index: replace(info, length=len(content.getvalue())) for index in metadata.storage_data
    }
    (folder / METADATA).write_bytes(pickle.dumps(replace(metadata, storage_data=storage)))


FORGERIES = [
    (metadata_that_runs_code, r"shared/.metadata does not describe tensors \(it asks for pathlib"),
    (metadata_with_code_beside_the_tensors, "does not describe tensors"),
    (bytes_that_run_code, "asks for .*BytesStorageMetadata, which is refused"),
    (tensor_that_runs_code, "shared cannot be read: UnpicklingError"),
]


@pytest.mark.parametrize(("forge", "reason"), FORGERIES)
def test_a_checkpoint_runs_no_code(
    tmp_path: Path, forge: Callable[[Path, Path], None], reason: str
) -> None:
    path, marker = write_checkpoint(tmp_path, 1), tmp_path / "marker"
    forge(path / SHARED, marker)
    sign(path, 1)
    weight = torch.zeros(6)
    with pytest.raises(ValueError, match=reason):
        TensorFolder(path, read_manifest(path), SHARED).fill({"outer/weight": weight})
    assert not marker.exists()
    if forge is not tensor_that_runs_code:  # which DCP itself refuses
        reader = FileSystemReader(path / SHARED)
        with suppress(CheckpointException):
            load({"outer/weight": weight}, storage_reader=reader, no_dist=True)
        assert marker.exists(), "the forgery is none"


def test_only_files_with_a_checksum_are_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    manifest = read_manifest(path)
    for name in manifest.files:
        files = {other: known for other, known in manifest.files.items() if other != name}
        with pytest.raises(ValueError, match=f"has no checksum of {name}"):
            TensorFolder(path, replace(manifest, files=files), SHARED)
