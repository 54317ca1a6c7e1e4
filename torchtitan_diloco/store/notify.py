"""Sleep until something changes in a folder of this machine.

Linux reports changes with inotify, for which Python has no module. Changes by other machines in a
shared folder are not reported, so sleeps are short in any case.
"""

import ctypes
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Constants of inotify, as in <sys/inotify.h>.
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_ONLYDIR = 0x0100_0000
IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK

TOLD_SECONDS = 0.25
"""Longest sleep if changes by this machine are reported."""
UNTOLD_SECONDS = 0.05
"""Longest sleep if they are not."""


@contextmanager
def watch(folders: Sequence[Path]) -> Iterator[Callable[[float], None]]:
    """Watch folders from now on, and yield a function that sleeps until one changes, but no longer
    than the given time."""
    descriptor = _open_inotify(folders)
    if descriptor < 0:
        yield lambda seconds: time.sleep(min(seconds, UNTOLD_SECONDS))
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    def sleep(seconds: float) -> None:
        if poll.poll(1000 * min(seconds, TOLD_SECONDS)):
            os.read(descriptor, 2**16)

    try:
        yield sleep
    finally:
        os.close(descriptor)


def _open_inotify(folders: Sequence[Path]) -> int:
    """Return a file that becomes readable once a folder has changed, or -1 if the system has
    none."""
    if sys.platform != "linux":
        return -1
    library = ctypes.CDLL(None)
    descriptor = int(library.inotify_init1(IN_CLOEXEC | IN_NONBLOCK))
    if descriptor < 0:
        return -1
    for folder in folders:
        mask = IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_ONLYDIR
        library.inotify_add_watch(descriptor, os.fsencode(folder), mask)
    return descriptor
