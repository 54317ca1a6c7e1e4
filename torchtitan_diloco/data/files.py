"""Atomic writes, and folders that one process at a time writes."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = ".lock"
_NOTICE_AFTER_SECONDS = 10.0


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or nothing, even if this process is killed."""
    aside = aside_path(path)
    with aside.open("wb") as file:
        file.write(content)
        force_to_disk(file.fileno())
    aside.replace(path)


def aside_path(path: Path) -> Path:
    """Return where a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


def force_to_disk(descriptor: int) -> None:
    os.fsync(descriptor)


@contextlib.contextmanager
def only_writer(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("a")
    except OSError as error:
        raise ValueError(f"cannot write into the folder {folder.absolute()}: {error}") from error
    message = f"data: waiting for another process that is writing {folder}"
    notice = threading.Timer(_NOTICE_AFTER_SECONDS, print, [message], {"flush": True})
    with file:
        notice.start()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ValueError(
                f"another process is writing {folder.absolute()}; wait until it ends, or choose "
                f"another folder"
            ) from error
        except OSError as error:
            raise ValueError(
                f"the file system of {folder.absolute()} has no file locks ({error}); choose a "
                f"folder on a local disk"
            ) from error
        finally:
            notice.cancel()
        yield
