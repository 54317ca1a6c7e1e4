"""The folder that a run writes."""

import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import TextIO

LOCK = "run.lock"


def hold_run_folder(path: Path, token: str = "") -> TextIO:
    """Two runs in one folder would overwrite each other's records and checkpoints. Held until the file is closed, or the
    process has ended, however that was. `token` can be read there by who sees the same folder."""
    lock = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().partition("\n")[0]
        lock.close()
        raise ValueError(
            f"run.folder = {path} is in use by another run ({holder}): wait for its end, or choose another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n{token}\n")
    lock.flush()
    os.fsync(lock.fileno())
    return lock


def lock_text(path: Path) -> str:
    """What the holder of a folder has written; empty where there is none."""
    try:
        return (path / LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""


def create_run_folder(folder: str, name: str, *, goes_on: bool = False) -> Path:
    """Makes the folder of a new run: the one asked for, or one that no other run has even if it starts this second."""
    if folder:
        path = Path(folder).expanduser()
        if not goes_on and ((path / "metrics.jsonl").exists() or (path / "checkpoints").exists()):
            raise ValueError(
                f"run.folder = {folder} already holds a run: choose another folder, or leave run.folder empty "
                "to have a new one made"
            )
        path.mkdir(parents=True, exist_ok=True)
        return path
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    attempt = 1
    while True:
        path = Path("outputs") / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            attempt += 1
        else:
            return path
