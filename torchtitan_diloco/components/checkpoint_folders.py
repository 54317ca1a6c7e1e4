"""The folders of checkpoints: RUN/checkpoints/step-00001000, and those that are not complete.

A folder gets its name once it is complete. The launcher imports this module, without torch.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from torchtitan_diloco.hardware import write_whole

MANIFEST = "manifest.json"
INCOMPLETE, DAMAGED = ".incomplete", ".damaged"


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((path for path in found if is_checkpoint(path)), key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Return whether this is the name of a complete checkpoint."""
    return re.fullmatch(r"step-\d+", path.name) is not None


def begin(path: Path) -> None:
    """Create an empty folder to write the checkpoint `path` into, which must not exist.

    Delete what earlier saves have not completed: it may be what fills the disk.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, "a checkpoint of this step exists", str(path))
    for left in path.parent.glob(f"step-*{INCOMPLETE}"):
        shutil.rmtree(left, ignore_errors=True)
    incomplete(path).mkdir(parents=True)


def incomplete(path: Path) -> Path:
    """Return the folder that a checkpoint is written into."""
    return path.with_name(path.name + INCOMPLETE)


def write_manifest(path: Path, files: Iterable[str], manifest: str) -> None:
    """Write the last file of an incomplete checkpoint, once all others are there."""
    written = incomplete(path)
    for name in files:
        if not (written / name).exists():
            raise OSError(
                f"{written / name} was written by another node of the worker and is not here: its "
                "nodes must share run.folder"
            )
    write_whole(written / MANIFEST, manifest.encode())
    flush_to_disk(written)


def complete(path: Path) -> None:
    """Rename the folder, which makes the checkpoint visible."""
    incomplete(path).rename(path)
    flush_to_disk(path.parent)


def prune(run: Path, newest: Path, keep_latest: int, keep_every: int) -> None:
    """Delete all checkpoints but `newest`, the latest and those at steps to keep."""
    known = [path for path in complete_checkpoints(run) if (path / MANIFEST).exists()]
    for path in known[:-keep_latest]:
        if path != newest and (not keep_every or step_of(path) % keep_every):
            path.rename(incomplete(path))  # a folder that is half deleted is no checkpoint
            shutil.rmtree(incomplete(path), ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither found nor deleted. Return its path."""
    names = (f"{path}{DAMAGED}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return path.rename(next(name for name in names if not Path(name).exists()))


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
