"""The folder of a run: its lock, and what a start changes in it.

RUN/config.toml                   the settings of the latest start
    config-from-step-8.toml ...   those of each start, by its step
    worker-0/ ...                 checkpoints, records and TensorBoard of each worker, which may be
                                  on other disks
"""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Self, TextIO

from torchtitan_diloco.base.hardware import write_whole
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint_folder import (
    complete_checkpoints,
    folder_of_worker,
    step_of,
)
from torchtitan_diloco.components.resume import Start
from torchtitan_diloco.config.loader import parse_config
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import World

LOCK = "run.lock"
SHARED_SECONDS = 90.0
"""Time after which a node that sees no file of another one does not share its disk. Network file
systems look again after a minute at the latest."""


@dataclass(frozen=True)
class FolderLock:
    """The lock of the folder of a worker, held until it is closed or the process ends."""

    file: TextIO
    problem: str = ""
    """Why another run may be in the folder nevertheless, if so."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.file.close()


def lock_folder(path: Path) -> FolderLock:
    """Lock a folder. Otherwise two runs could overwrite each other's files."""
    file = (path / LOCK).open("a+", encoding="utf-8")
    problem = ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"{path} is in use by another run ({file.read().strip()}): wait for its end, or choose "
            "another run.folder"
        ) from None
    except OSError as error:
        problem = f"its file system has no locks ({error})"
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return FolderLock(file, problem)


def claim_run_folder(world: World, path: Path, start: Start, toml: str) -> FolderLock | None:
    """Create the folder of a run and write the configuration `toml` into it.

    Return, on the first rank of a worker, the lock of its folder.
    """
    is_first = world.rank_in_worker == 0
    lock = on_all_ranks(
        world.saving, lambda: _claim(path, world.worker, start) if is_first else None
    )
    if world.ranks_per_worker > 1:
        _check_shared(world, path)
    # Only now, as another run may hold the folder of another worker.
    on_all_ranks(
        world.saving, lambda: _begin(path, world.worker, start, toml) if is_first else None
    )
    return lock


def _check_shared(world: World, path: Path) -> None:
    """Raise unless all ranks of a worker see a file that its first rank writes. Collective.

    The file is closed before the others look, as some file systems show it only then. Its name is
    new, so that none of them remembers that there is no such file.
    """
    group = world.saving
    is_first = world.rank_in_worker == 0
    name_and_writer = [
        f".shared-{secrets.token_hex(8)}",
        f"process {os.getpid()} on {socket.gethostname()}",
    ]
    name, writer = gather_objects(name_and_writer, group)[world.rank - world.rank_in_worker]
    file = folder_of_worker(path, world.worker) / name

    def write() -> None:
        if is_first:
            with _explaining_errors(path):
                write_whole(file, writer.encode())

    try:
        on_all_ranks(group, write)
        on_all_ranks(group, lambda: _wait_for(file, writer))
    finally:
        if is_first:
            with suppress(OSError):  # one that stays does no harm
                file.unlink(missing_ok=True)


def _wait_for(file: Path, writer: str) -> None:
    """Wait until this node sees what a writer has written. Raise if it does not."""
    end = time.monotonic() + SHARED_SECONDS
    while not _has_content(file, writer):
        if time.monotonic() >= end:
            raise UserError(
                f"{file.parent} of {socket.gethostname()} lacks a file that its worker's first "
                f"rank ({writer}) has written there: the nodes of a worker must share run.folder"
            )
        time.sleep(0.5)


def _has_content(file: Path, content: str) -> bool:
    with suppress(OSError):
        return file.read_bytes() == content.encode()
    return False


@contextmanager
def _explaining_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.folder = {path} cannot be written ({error}): choose another"
        ) from None


def _claim(path: Path, worker: int, start: Start) -> FolderLock:
    """Create and lock the folder of a worker. Raise if it has other checkpoints than before."""
    folder = folder_of_worker(path, worker)
    with _explaining_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
        if complete_checkpoints(folder) != start.of_this_worker:
            raise UserError(f"run.folder = {path}: another run has just ended there: start again")
    if lock.problem:
        logger.warning(
            f"a second run in run.folder would not be refused, as {folder} cannot be locked: "
            f"{lock.problem}. Make sure that there is none; what other starts have saved is not "
            "deleted"
        )
    return lock


def _begin(path: Path, worker: int, start: Start, toml: str) -> None:
    """Set checkpoints aside that are not resumed, and write the configuration."""
    step = start.step if start.goes_on else 0
    with _explaining_errors(path):
        for checkpoint in start.of_this_worker:
            if step_of(checkpoint) > step:
                logger.warning(f"{checkpoint} is kept as {set_aside(checkpoint)}")
        for name in ("config.toml", f"config-from-step-{step}.toml"):
            aside = path / f".{name}-{worker}"  # workers that share the folder write the same
            write_whole(aside, toml.encode())
            aside.replace(path / name)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, so that it is neither found nor deleted. Return its path."""
    names = chain([f"{path}.aside"], (f"{path}.aside-{number}" for number in count(2)))
    return path.rename(next(name for name in names if not Path(name).exists()))


def find_compared_run(folder: Path, config: Config) -> Path | None:
    """Return the newest run beside the folder of a control with which to compare it: one with an
    outer loop, and the same model, data and training. Return None if there is none."""
    wanted = _compared_settings(config)
    others = [path for path in folder.parent.glob("*/config.toml") if path.parent != folder]
    for path in sorted(others, key=_modified, reverse=True):
        with suppress(OSError, ValueError):  # it may be of another version, or be deleted
            other = parse_config(path.read_text(encoding="utf-8"), str(path))
            if other.diloco.method != "none" and _compared_settings(other) == wanted:
                return path.parent
    return None


def _compared_settings(config: Config) -> list[object]:
    """Return the settings that a run and its control have in common."""
    sections = [config.model, config.data, config.training, config.optimizer, config.lr_schedule]
    return [*sections, config.islands, config.run.seed, config.diloco.workers]


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
