"""The folder of a checkpoint: when it is complete, what is kept, and its files."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.checkpoints import TENSORS, flip_a_bit, saved_steps, write_checkpoint
from torchtitan_diloco.components.checkpoint import write_tensors
from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    begin,
    checkpoint_path,
    complete,
    complete_checkpoints,
    fingerprint,
    prune,
    read_manifest,
    step_of,
)
from torchtitan_diloco.components.run_folder import set_aside
from torchtitan_diloco.components.saved_tensors import SavedTensors


def test_only_complete_folders_are_checkpoints_and_the_latest_and_every_nth_are_kept(
    tmp_path: Path,
) -> None:
    for step in range(2, 17, 2):
        path = write_checkpoint(tmp_path, step)
        prune(tmp_path, keep_latest=2, keep_every=10)
    assert saved_steps(tmp_path) == [10, 14, 16]
    with pytest.raises(OSError, match="step-00000016 exists already"):
        write_checkpoint(tmp_path, 16)
    for name in ("step-00000016.aside", "step-00000016.aside-2"):
        assert set_aside(path).name == name
        write_checkpoint(tmp_path, 16)
    shutil.copytree(path, tmp_path / "step-00000018.bak")
    for step in (18, 20):
        begin(checkpoint_path(tmp_path, step))
    assert saved_steps(tmp_path) == [10, 14, 16]
    others = {one.name.removeprefix("step-000000") for one in tmp_path.glob("*.*")}
    assert others == {"16.aside", "16.aside-2", "18.bak", "20.incomplete"}


@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=3),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_checksum_of_a_save_is_that_of_its_file(
    shapes: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    """It is made of what is in memory, and not of what the disk says."""
    rows = {
        name: torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        for name, (dtype, shape) in shapes.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        ((name, known),) = write_tensors(Path(folder), rows, rank=0).items()
        file = Path(folder) / name
        assert fingerprint(file) == known
        flip_a_bit(file)
        if any(value.numel() for value in rows.values()):
            assert fingerprint(file) != known


class StoppedError(BaseException):
    """The process has ended here."""


def save_and_stop(run: Path, step: int, after: int = 99) -> bool:
    """Save as a run does. Return whether it has ended before, after so many changes of the disk."""
    changes = [(Path, "mkdir"), (Path, "open"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    left = iter(range(after))
    path = checkpoint_path(run, step)

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
        complete(path, "{}")
        prune(run, keep_latest=1, keep_every=0)
        return False
    return True


def test_a_save_that_ends_anywhere_leaves_the_newest_checkpoint(tmp_path: Path) -> None:
    newest = list[int]()
    stopped = True
    while stopped:
        run = tmp_path / str(len(newest))
        save_and_stop(run, 1)
        stopped = save_and_stop(run, 2, after=len(newest))
        found = complete_checkpoints(run)
        assert all((path / MANIFEST).exists() for path in found)
        newest.append(step_of(found[-1]))
        assert not save_and_stop(run, 3), "the next one is not in its way"
        assert saved_steps(run) == [3]
    assert newest == sorted(newest)
    assert len(newest) > 8


def test_rows_of_several_ranks_are_put_together_and_no_other_files_are_read(tmp_path: Path) -> None:
    """Nothing is unpickled. The last ranks may have fewer rows than the others, or none."""
    path = write_checkpoint(tmp_path, 1, ranks=4)
    found = {"rows": torch.zeros(5, 2), "number": torch.zeros(())}
    manifest = read_manifest(path)
    SavedTensors(path, manifest).fill(found)
    assert torch.equal(found["rows"], torch.arange(10.0).view(5, 2))
    assert found["number"] == 45
    with pytest.raises(ValueError, match=r"step-00000001 has no rows of shape \(5, 2\)"):
        SavedTensors(path, replace(manifest, files={})).fill(found)
    torch.save(found, path / TENSORS)
    with pytest.raises(ValueError, match=f"{TENSORS} does not hold tensors"):
        SavedTensors(path, manifest)
