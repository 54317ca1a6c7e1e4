"""Files that are there whole or not at all, and folders that one process at a time writes."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = ".lock"
_POLL_SECONDS = 0.05
_SAY_AFTER_SECONDS = 10.0


def write_whole(path: Path, content: bytes) -> None:
    """Written aside, forced to disk, then renamed: a reader never sees a part of it, whenever we are killed."""
    aside = aside_path(path)
    with aside.open("wb") as file:
        file.write(content)
        force_to_disk(file.fileno())
    aside.replace(path)


def aside_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def force_to_disk(descriptor: int) -> None:
    os.fsync(descriptor)


class FolderBusyError(ValueError):
    """Another process is writing the folder."""


@contextlib.contextmanager
def only_writer(folder: Path, *, wait: bool) -> Iterator[None]:
    """Holds the folder's lock, which the system releases when the process ends, however it ends."""
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"cannot write into the folder {folder.absolute()}: {error}") from error
    try:
        _lock(descriptor, path, wait)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, wait: bool) -> None:
    said, start = False, time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if not wait:
                raise FolderBusyError(
                    f"another process is writing {path.parent.absolute()}; wait for it to end, or choose another folder"
                ) from error
        except OSError as error:
            raise ValueError(
                f"the file system of {path.absolute()} has no file locks ({error}); choose a folder on a local disk"
            ) from error
        if not said and time.monotonic() - start > _SAY_AFTER_SECONDS:
            said = True
            print(f"data: waiting for another process that is writing {path.parent}", flush=True)
        time.sleep(_POLL_SECONDS)
