"""Atomic writes, and folders that one process at a time writes."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from torchtitan_diloco.utils import logger


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or nothing, even if this process is killed."""
    aside = aside_path(path)
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def aside_path(path: Path) -> Path:
    """Return where a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def only_writer(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when the process ends, however it ends."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise ValueError(f"another process is writing {folder.absolute()}") from None
                logger.info(f"waiting for another process that is writing {folder}")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"cannot write into {folder.absolute()}: {error}; choose a folder that you may "
                f"write to, on a disk with file locks"
            ) from error
        yield
