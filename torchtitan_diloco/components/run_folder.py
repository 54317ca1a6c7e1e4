"""The folder of a run: creating it, and locking it for one run."""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from torchtitan_diloco.components.checkpoint_folders import complete_checkpoints, set_aside
from torchtitan_diloco.components.resume import STORED_FOLDER, Start
from torchtitan_diloco.config.schema import Checkpoint, Run
from torchtitan_diloco.diloco.object_collectives import broadcast_object, gather_objects
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import UserError, logger

LOCK = "run.lock"
VISIBLE_WITHIN_SECONDS = 10.0
"""Some network file systems show a new file with a delay."""


def folder_of_worker(run: Path, worker: int) -> Path:
    """Return where a worker has its checkpoints, records and TensorBoard."""
    return run / f"worker-{worker}"


@contextmanager
def _explaining_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the folder of the run: {error}; set run.folder to a folder that can be "
            "written"
        ) from None


@dataclass(frozen=True)
class RunFolder:
    path: Path
    workers: Sequence[int] = (0,)
    """Workers that have this folder. Others may have one on another disk."""
    lock: TextIO | None = None
    """Held by one rank on each disk until it is closed."""


def claim_run_folder(
    world: World, run: Run, checkpoint: Checkpoint, start: Start, toml: str, *, stops_early: bool
) -> RunFolder:
    """Create the folder of a run, lock it and write the configuration `toml` into it.

    Do so on every disk if the run saves, as workers in other places may have one of their own.
    `stops_early`: by `training.stop_after`, which saves.
    """
    saves = checkpoint.every or checkpoint.every_minutes or checkpoint.at_end or stops_early
    new = f"outputs/{run.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    named = broadcast_object(str(start.folder or run.folder or new), str, world.control)
    path = Path(start.folder or run.folder or named).expanduser()

    @_explaining_errors()
    def create() -> None:
        begun = any(path.glob("worker-*/metrics.jsonl")) or (path / "checkpoints").exists()
        if begun and not start.folder:
            raise UserError(
                f"run.folder = {path} already holds a run: choose another folder, leave run.folder "
                'empty for a new one, or resume it with checkpoint.resume = "auto"'
            )
        path.mkdir(parents=True, exist_ok=True)

    on_all_ranks(world.control, lambda: create() if saves or world.is_first else None)
    workers = _workers_on_disk(world, path) if saves else range(world.workers)
    claims = world.rank_in_worker == 0 and world.worker == workers[0]
    lock = on_all_ranks(world.control, lambda: _claim(path, start, toml) if claims else None)
    if world.is_first and world.store is not None:
        world.store.set(STORED_FOLDER, str(path.absolute()))
    return RunFolder(path, workers, lock)


@_explaining_errors()
def _claim(path: Path, start: Start, toml: str) -> TextIO:
    lock = lock_run_folder(path)
    try:
        found = [one for one in complete_checkpoints(path) if one not in start.damaged]
        latest = found[-1] if found else None
        if start.folder and latest != start.checkpoint:
            raise UserError(
                f"run.folder = {path}: another run has just ended there, so this one would resume "
                f"from {start.checkpoint or 'the beginning'} instead of "
                f"{latest or 'the beginning'}: start it again"
            )
        for damaged, wrong in start.damaged.items():
            aside = set_aside(damaged)
            logger.warning(f"{wrong}: resuming from {start.checkpoint}; kept as {aside}")
        step = start.state.step if start.folder else 0
        config = f"config-from-step-{step}.toml" if step else "config.toml"
        (path / config).write_text(toml, encoding="utf-8")
    except (ValueError, OSError):
        lock.close()
        raise
    return lock


def lock_run_folder(path: Path) -> TextIO:
    """Lock a folder until the returned file is closed or the process ends. Otherwise two runs could
    overwrite each other's files."""
    lock = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise UserError(
            f"run.folder = {path} is in use by another run ({holder}): wait for its end, or choose "
            "another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _workers_on_disk(world: World, path: Path) -> list[int]:
    """Return the workers that see the same folder as this rank. All ranks of a worker have to.

    The first rank of each worker creates a file with its number, unless one on the same disk has,
    and every rank looks whose file it sees.
    """
    mark = path / f".place-{broadcast_object(secrets.token_hex(8), str, world.control)}"

    def create() -> None:
        if world.rank_in_worker == 0:
            with _explaining_errors(), suppress(FileExistsError), mark.open("x") as file:
                file.write(str(world.worker))

    on_all_ranks(world.control, create)
    seen, deadline = "", time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        with suppress(OSError):  # not visible yet, or a disk of the network that has an error
            seen = mark.read_text()
        if seen or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    answers = gather_objects(seen, world.control)
    if world.rank_in_worker == 0 and seen == str(world.worker):
        mark.unlink()
    of_workers, each = answers[:: world.ranks_per_worker], world.ranks_per_worker
    blind = [n for n, one in enumerate(answers) if not one or one != of_workers[n // each]]
    if blind:
        raise UserError(
            f"run.folder = {path} of the first rank of a worker is not seen by its ranks "
            f"{', '.join(map(str, blind))}: give a folder on a disk that the nodes of the worker "
            "share, or save no checkpoints: checkpoint.every = 0, checkpoint.every_minutes = 0, "
            "checkpoint.at_end = false, training.stop_after = 0"
        )
    if len(set(of_workers)) > 1:
        logger.info(f"the places share no disk: {path} holds the checkpoints of its own workers")
    return [worker for worker, seen in enumerate(of_workers) if seen == of_workers[world.worker]]
