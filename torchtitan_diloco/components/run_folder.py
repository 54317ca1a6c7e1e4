"""The folder of a run: created, locked for one run, and visible to all nodes that write to it."""

import fcntl
import os
import secrets
import socket
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TextIO

from torchtitan_diloco.components.checkpoint_folders import set_aside
from torchtitan_diloco.components.resume import Start, find_candidates
from torchtitan_diloco.diloco.object_collectives import gather_objects
from torchtitan_diloco.distributed.collectives import on_first_rank
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import FOLDER_NOTE, logger

LOCK = "run.lock"
VISIBLE_WITHIN_SECONDS = 10.0
"""Some network file systems show a new file with a delay."""


def claim_run_folder(
    world: World, folder: str, name: str, resume: str, start: Start, toml: str, *, shared: bool
) -> tuple[Path, AbstractContextManager[object]]:
    """Create the folder of a run, lock it and write the configuration into it.

    `folder`, `name` and `resume` are the settings, `toml` is the configuration. With `shared`, all
    ranks must see the folder. Returns its path and the lock, which other ranks do not have.
    """
    locks: list[TextIO] = []

    def claim() -> tuple[str, str]:
        try:
            path, token = _create(start.folder, folder, name), secrets.token_hex(8)
            locks.append(lock_run_folder(path, token))
            if start.folder:
                _check_still_latest(resume, folder, start)
            for damaged, wrong in start.damaged.items():
                aside = set_aside(Path(damaged))
                logger.warning(f"{wrong}: resuming from {start.checkpoint}; kept as {aside}")
            step = start.state.step if start.folder else 0
            config = f"config-from-step-{step}.toml" if step else "config.toml"
            (path / config).write_text(toml, encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"cannot write the folder of the run: {error}; set run.folder to a folder that can "
                "be written"
            ) from None
        return str(path), token

    try:
        path, token = on_first_rank(world, tuple[str, str], claim)
    except ValueError:
        for lock in locks:
            lock.close()
        raise
    if shared:
        _check_visible(world, Path(path), token)
    if note := os.environ.get(FOLDER_NOTE):  # the launcher resumes a run that crashes
        Path(note).write_text(str(Path(path).absolute()), encoding="utf-8")
    return Path(path), locks[0] if locks else nullcontext()


def _create(resumed: str, folder: str, name: str) -> Path:
    """Create the folder asked for, or a new one that no other run has."""
    if resumed or folder:
        path = Path(resumed or folder).expanduser()
        if not resumed and ((path / "metrics.jsonl").exists() or (path / "checkpoints").exists()):
            raise ValueError(
                f"run.folder = {folder} already holds a run: choose another folder, leave "
                'run.folder empty for a new one, or resume it with checkpoint.resume = "auto"'
            )
        path.mkdir(parents=True, exist_ok=True)
        return path
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in count(1):
        path = Path("outputs") / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def lock_run_folder(path: Path, token: str = "") -> TextIO:
    """Lock a folder until the returned file is closed or the process ends.

    Two runs in one folder would overwrite each other's files. `token` is written into the lock.
    """
    lock = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().partition("\n")[0]
        lock.close()
        raise ValueError(
            f"run.folder = {path} is in use by another run ({holder}): wait for its end, or choose "
            "another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n{token}\n")
    lock.flush()
    os.fsync(lock.fileno())
    return lock


def _check_still_latest(resume: str, folder: str, start: Start) -> None:
    """Raise if the run that held the lock before has saved since this one looked."""
    _, candidates = find_candidates(resume, folder)
    found = [one for one in candidates if one not in start.damaged]
    if found[:1] != [start.checkpoint] * bool(start.checkpoint):
        raise ValueError(
            f"run.folder = {start.folder}: another run has just ended there, so this one would "
            f"resume from {start.checkpoint or 'the beginning'} instead of "
            f"{found[0] if found else 'the beginning'}: start it again"
        )


def _check_visible(world: World, path: Path, token: str) -> None:
    """Raise if a node does not see the lock of rank 0: its part of a save would be lost."""

    def visible() -> bool:
        with suppress(OSError):
            return token in (path / LOCK).read_text(encoding="utf-8")
        return False

    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not (seen := visible()) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers = gather_objects(seen, world.control)
    blind = ", ".join(str(rank) for rank, answer in enumerate(answers) if not answer)
    if blind:
        raise ValueError(
            f"run.folder = {path} of rank 0 is not seen by the nodes of ranks {blind}: give a "
            "folder on a disk that all nodes share, or save no checkpoints: checkpoint.every = 0, "
            "checkpoint.every_minutes = 0, checkpoint.at_end = false, training.stop_after = 0"
        )
