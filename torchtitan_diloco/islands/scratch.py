"""Versions of fragments in the memory of the syncer, as mapped files in its scratch folder.

A file contains the objects `copy` and `outer` of a version one after the other, so both are
uploaded from it. A complete version has the name FRAGMENT-VERSION: a syncer that is restarted on
this machine continues from it exactly, even if the object `outer` is older. Files that are no
longer used are written again, because fresh pages cost more than the arithmetic on them.
"""

import fcntl
import hashlib
import itertools
import os
import shutil
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_diloco.base.hardware import write_whole
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.layout import Layout, hexadecimal
from torchtitan_diloco.islands.payload import (
    HEADER_BYTES,
    PartHeader,
    bytes_of,
    memory_of,
    read_header,
    write_header,
)
from torchtitan_diloco.islands.rules.fields import MalformedError

ALIGNMENT = 64
SPARE = "spare"
SESSION = "session"
LOCK = "lock"
ZEROS = bytes(2**20)


def _allocate(path: Path, size: int) -> None:
    """Create a file, or extend it, with room on the disk for all its bytes: a write to a mapped
    file on a full disk would end the process. Raise an OSError if the disk is full."""
    with path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for start in range(file.tell(), size, len(ZEROS)):  # macOS
            file.write(ZEROS[: size - start])
        file.flush()
        os.fsync(file.fileno())  # only now has the disk allocated it


class FragmentState:
    """P, Theta and the state of the outer optimizer after a version, in one mapped file."""

    def __init__(self, path: Path, values: int, slots: int) -> None:
        self.path = path
        self.values = values
        self.users = 1
        """How often it is in use: as a version, and by uploads."""
        self._copy_bytes = HEADER_BYTES + 4 * values
        self._start = -(-self._copy_bytes // ALIGNMENT) * ALIGNMENT
        outer_bytes = HEADER_BYTES + 4 * values * (1 + slots)
        self._end = self._start + outer_bytes
        size = self._end + HEADER_BYTES  # of the checksum
        _allocate(path, size)
        self._memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self.published = self._values(HEADER_BYTES, values)
        begin = self._start + HEADER_BYTES
        tensors = [self._values(begin + 4 * values * n, values) for n in range(1 + slots)]
        self.theta, *self.slots = tensors

    def _values(self, start: int, count: int) -> Tensor:
        return self._memory[start : start + 4 * count].view(torch.float32)

    @property
    def steps(self) -> int:
        """Number of steps of the outer optimizer with these slots."""
        return read_header(memory_of(self._memory)[self._start :][:HEADER_BYTES]).steps

    def complete(self, steps: int) -> None:
        """Write the headers, and the checksum by which a later process recognizes its own file."""
        write_header(self._memory, PartHeader())
        write_header(self._memory[self._start :], PartHeader(steps=steps))
        self._memory[self._end :].copy_(bytes_of(bytearray(self._checksum())))

    def _checksum(self) -> bytes:
        """Return the checksum of the outer state. That of P is in the decision."""
        whole = Layout([(1 + len(self.slots), self.values)])
        values = self._values(self._start + HEADER_BYTES, whole.values)
        text = f"{hexadecimal(whole.checksum(values))}-{self.steps}"
        return text.encode()[:HEADER_BYTES].ljust(HEADER_BYTES)

    @property
    def is_complete(self) -> bool:
        try:
            return bytes(memory_of(self._memory)[self._end :]) == self._checksum()
        except MalformedError:
            return False

    def copy_content(self) -> memoryview:
        """Return the content of the object `copy`."""
        return memory_of(self._memory)[: self._copy_bytes]

    def outer_content(self) -> memoryview:
        """Return the content of the object `outer`."""
        return memory_of(self._memory)[self._start : self._end]


class Scratch:
    """The files of a syncer. Any thread may call this."""

    def __init__(self, folder: Path, shapes: Sequence[Sequence[tuple[int, int]]], slots: int):
        """Open the folder. `folder`: of one run on this machine. `slots`: buffers of the outer
        optimizer."""
        self.layouts = [Layout(shape) for shape in shapes]
        self._slots = slots
        self._folder = folder
        self._spares = defaultdict[int, list[FragmentState]](list)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{SPARE}-*"):
            path.unlink()

    def take(self, fragment: int) -> FragmentState:
        """Return a file to write a version of a fragment to. Its content is undefined."""
        values = self.layouts[fragment].values
        with self._lock:
            if self._spares[values]:
                spare = self._spares[values].pop()
                spare.users = 1
                return spare
            path = self._folder / f"{SPARE}-{next(self._numbers)}"
        try:
            return FragmentState(path, values, self._slots)
        except OSError as error:
            raise UserError(
                f"{self._folder}: {error.strerror}, and the syncer needs "
                f"{4 * (2 + self._slots)} bytes for each parameter there: free some space, or give "
                "another folder with --scratch"
            ) from error

    def keep(self, state: FragmentState, fragment: int, version: int) -> None:
        """Give the file of a complete version its name."""
        state.path = state.path.rename(self._folder / f"{fragment}-{version}")

    def find(self, fragment: int, version: int, checksum: str) -> FragmentState | None:
        """Return a version that an earlier process has completed, if its P has this checksum."""
        path = self._folder / f"{fragment}-{version}"
        layout = self.layouts[fragment]
        if not path.exists():
            return None
        state = FragmentState(path, layout.values, self._slots)
        is_same = hexadecimal(layout.checksum(state.published)) == checksum
        if not is_same or not state.is_complete:
            return None
        return state

    def hold(self, state: FragmentState) -> None:
        """Keep a file unchanged until `release`."""
        with self._lock:
            state.users += 1

    def release(self, state: FragmentState) -> None:
        """Write the file again if nothing else uses it."""
        with self._lock:
            state.users -= 1
            if state.users:
                return
            spare = self._folder / f"{SPARE}-{next(self._numbers)}"
            state.path = state.path.rename(spare)
            self._spares[state.values].append(state)

    def drop_others(self, fragment: int, version: int) -> None:
        """Delete the files of all other versions of a fragment."""
        for path in self._folder.glob(f"{fragment}-*"):
            if path.name != f"{fragment}-{version}":
                path.unlink()


def folder_of(scratch: Path, location: str) -> Path:
    """Return the folder of a run in the folder of all files of syncers."""
    if "://" not in location:
        location = str(Path(location).expanduser().resolve())
    return scratch / hashlib.sha256(location.encode()).hexdigest()[:16]


def remove_files(folder: Path) -> None:
    """Delete the files of a run that has ended, except the lock, which this process holds."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def lock_folder(first: Path) -> Path:
    """Lock a folder for this process until it ends, and return it: `first`, or the next one with a
    number that no other syncer on this machine uses."""
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], numbered) if _lock(folder))


def lock_others(first: Path) -> Iterator[Path]:
    """Lock the other folders of a run that no other syncer on this machine uses, and yield them:
    those of syncers that have died."""
    for folder in [first, *first.parent.glob(f"{first.name}-*")]:
        if folder.is_dir() and _lock(folder):
            yield folder


def _lock(folder: Path) -> bool:
    """Lock a folder for this process, and return whether no other process has."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
    except OSError as error:  # such as a file system without locks
        raise UserError(_unusable(folder, error)) from error
    return True


def write_session(folder: Path, session: str) -> None:
    """Remember the session in which this process leads, before its first decision."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SESSION, f"{session} {socket.gethostname()}".encode())
    except OSError as error:
        raise UserError(_unusable(folder, error)) from error


def read_session(folder: Path) -> str:
    """Return the session in which a syncer led with this folder here, or an empty string.

    It has ended if this process has locked the folder, even if it was killed: nobody has to wait
    until its decisions stand still. Of another machine, nobody knows: locks of a shared file system
    may hold on one machine only.
    """
    try:
        session, _, host = (folder / SESSION).read_text(encoding="utf-8").partition(" ")
    except (OSError, ValueError):
        return ""
    return session if host == socket.gethostname() else ""


def _unusable(folder: Path, error: OSError) -> str:
    return (
        f"{folder}: {error.strerror}: make it writable, free some space, or give a folder on a "
        "disk of this machine with --scratch"
    )
