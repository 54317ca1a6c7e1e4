"""The folder of a run: creating it, and locking it for one run.

RUN/config.toml    the settings
    worker-0/ ...  checkpoints, records and TensorBoard of each worker, which may be on other disks
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from torchtitan_diloco.components.checkpoint import (
    Manifest,
    RunState,
    complete_checkpoints,
    set_aside,
    step_of,
)
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import UserError, logger

LOCK = "run.lock"


def folder_of_worker(run: Path, worker: int) -> Path:
    """Return where a worker has its checkpoints, records and TensorBoard."""
    return run / f"worker-{worker}"


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from."""

    goes_on: bool = False
    """Whether the checkpoint is of this run: false for a new run."""
    manifest: Manifest | None = None
    """None for a run from the beginning. That of another worker if this one has no checkpoint."""
    checkpoint: Path | None = None
    """That of this worker, if it has one."""
    holders: list[int] = field(default_factory=list)
    """Workers that have the checkpoint."""
    own: list[Path] = field(default_factory=list)
    """All complete checkpoints of this worker in `run.folder`, in the order of their steps."""

    @property
    def state(self) -> RunState:
        return RunState() if self.manifest is None else self.manifest.state


def claim_run_folder(world: World, path: Path, start: Start, toml: str) -> TextIO | None:
    """Create the folder of a run and write the configuration `toml` into it.

    Return, on the first rank of a worker, the lock of its folder, held until it is closed.
    """
    is_first = world.rank_in_worker == 0
    lock = on_all_ranks(
        world.control, partial(_claim, path, world.worker, start) if is_first else lambda: None
    )
    # Only now, as another run may hold the folder of another worker.
    on_all_ranks(world.control, partial(_begin, path, start, toml) if is_first else lambda: None)
    return lock


@contextmanager
def _explaining_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.folder = {path} cannot be written ({error}): choose another"
        ) from None


def _claim(path: Path, worker: int, start: Start) -> TextIO:
    """Lock the folder of a worker."""
    own = folder_of_worker(path, worker)
    with _explaining_errors(path):
        own.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(own)
        if complete_checkpoints(own) != start.own:
            raise UserError(f"run.folder = {path}: another run has just ended there: start again")
    return lock


def _begin(path: Path, start: Start, toml: str) -> None:
    """Set checkpoints aside that are not resumed, and write the configuration."""
    step = start.state.step if start.goes_on else 0
    with _explaining_errors(path):
        for newer in start.own:
            if step_of(newer) > step:
                logger.warning(f"{newer} is kept as {set_aside(newer)}")
        config = f"config-from-step-{step}.toml" if step else "config.toml"
        (path / config).write_text(toml, encoding="utf-8")


def lock_folder(path: Path) -> TextIO:
    """Lock a folder until the returned file is closed or the process ends. Otherwise two runs could
    overwrite each other's files."""
    lock = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UserError(
            f"{path} is in use by another run ({lock.read().strip()}): wait for its end, or choose "
            "another run.folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock
