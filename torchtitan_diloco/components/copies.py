"""Copies of a run's checkpoints in a store: what lies there, and copying a folder there and back.

start/00000001                          token of the newest start of the run, which alone may write
worker-0/COPY/rank-0.safetensors-00000  parts of a file of a worker, from its beginning
copy/COPY/worker-0                      manifest.json of this worker, written after its parts

COPY is a name such as `step-00001000-1a2b3c4d-of-2`: the step, `Manifest.save`, and the number of
workers that have saved it. A copy is whole once the manifests of all its workers are there. A run
that writes the same step again, with other bits, makes another copy of it. The copies are those of
the run that the manifest of the newest whole one names.
"""

import re
import shutil
import zlib
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from torchtitan_diloco.base.hardware import flush_to_disk
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import checkpoint_folder
from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    Manifest,
    begin,
    complete,
    fingerprint,
    incomplete,
    parse_manifest,
    read_manifest,
)
from torchtitan_diloco.store import DamagedObjectError, LargeObjects, Store

PART_BYTES = 2**26
"""Bytes of a file that are in memory at a time."""
STREAMS = 4
"""Chunks under way at a time."""
MOST_MANIFEST_BYTES = 2**26
_COPY = re.compile(r"step-(\d+)-([0-9a-f]{8})-of-(\d+)")
_FILE = re.compile(r"rank-\d+\.safetensors")


class OtherRunError(UserError):
    """The copies of another run are there."""


class TakenOverError(UserError):
    """A later start of the same run writes its copies there."""


class Copy(NamedTuple):
    """A copy of a step of all workers. Later steps are greater."""

    step: int
    save: int
    workers: int

    @classmethod
    def of(cls, manifest: Manifest) -> "Copy":
        return cls(step=manifest.step, save=manifest.save, workers=manifest.workers)

    @classmethod
    def parse(cls, name: str) -> "Copy | None":
        match = _COPY.fullmatch(name)
        if match is None:
            return None
        step, save, workers = match.groups()
        return cls(step=int(step), save=int(save, 16), workers=int(workers))

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-{self.save:08x}-of-{self.workers}"


def is_mirror(folder: Path) -> bool:
    """Return whether a folder is a store with copies of a run, or of islands."""
    names = chain(folder.glob("copy/*"), folder.glob("mirror/*/copy/*"))
    return any(Copy.parse(path.name) for path in names)


class Copies:
    """The copies of one run in a store. One process of each worker uses it."""

    def __init__(self, store: Store, prefix: str = "", part_bytes: int = PART_BYTES) -> None:
        """Open the copies of a store. `prefix`: of all names. Empty: that of the login."""
        self.location = store.location
        self.is_new_store = store.backend.is_new
        self.has_other_files = store.backend.has_other_files
        self._store = store
        self._part_bytes = part_bytes
        self._prefix = prefix or store.backend.own_prefix
        self._large = LargeObjects(store, STREAMS)

    def close(self) -> None:
        self._store.close()
        self._large.close()

    # --- who writes here --------------------------------------------------------------------------

    def take_over(self, token: str) -> None:
        """Let the start with this token, which all its processes have, be the newest one."""
        folder = f"{self._prefix}start/"
        while not self.is_newest(token):
            before = [entry.name for entry in self._store.list(folder)]
            number = int(before[-1].removeprefix(folder)) + 1 if before else 1
            if self._store.create(f"{folder}{number:08d}", token.encode()):
                for name in before:
                    self._store.delete(name)

    def is_newest(self, token: str) -> bool:
        starts = self._store.list(f"{self._prefix}start/")
        newest = self._store.get(starts[-1].name) if starts else None
        return newest is not None and newest.content == token.encode()

    # --- what there is ----------------------------------------------------------------------------

    def whole(self) -> list[Copy]:
        """Return the copies that all their workers have completed, oldest first."""
        listed = self._listed().items()
        return sorted(copy for copy, workers in listed if len(workers) == copy.workers)

    def _listed(self) -> dict[Copy, set[str]]:
        """Return the names of the workers that have completed their part of each copy."""
        workers: dict[Copy, set[str]] = {}
        for entry in self._store.list(f"{self._prefix}copy/"):
            name, _, worker = entry.name.removeprefix(f"{self._prefix}copy/").partition("/")
            copy = Copy.parse(name)
            if copy is not None and re.fullmatch(r"worker-\d+", worker):
                workers.setdefault(copy, set()).add(worker)
        return workers

    def newest_manifest(self) -> Manifest | None:
        """Return the manifest of the newest whole copy, or of the newest whose manifest can be
        read. None: there is no whole copy."""
        copies = self.whole()
        for copy in reversed(copies):
            try:
                return self._read_manifest(copy, worker=0)[1]
            except (DamagedObjectError, checkpoint_folder.DamagedError):
                continue
        if copies:
            raise DamagedObjectError(f"{self.location}: no copy has a manifest that can be read")
        return None

    def prune(
        self, worker: int, step: int, keep_latest: int, keep_every: int, *, workers: int = 0
    ) -> None:
        """Delete a worker's copies of steps before this one, but the latest whole ones and those at
        steps to keep. Copies that were broken off have no end, and are deleted, too.

        `workers`: of the run now. Its first one also deletes those of workers that it had before.
        """
        older = [copy for copy in self.whole() if copy.step <= step]
        copies_to_keep = {*older[-keep_latest:]}
        copies_to_keep |= {copy for copy in older if keep_every and copy.step % keep_every == 0}
        self._prune(worker, older, copies_to_keep)
        if worker == 0 and workers > 0:
            most = max((copy.workers for copy in self._listed()), default=workers)
            for former in range(workers, most):
                self._prune(former, older, copies_to_keep)

    def _prune(self, worker: int, older: Sequence[Copy], copies_to_keep: Set[Copy]) -> None:
        folder = f"{self._prefix}worker-{worker}/"
        doomed: dict[Copy, list[str]] = {}
        for entry in self._store.list(folder):
            copy = Copy.parse(entry.name.removeprefix(folder).partition("/")[0])
            if copy is not None and older and copy < older[-1] and copy not in copies_to_keep:
                doomed.setdefault(copy, []).append(entry.name)
        for copy, names in doomed.items():
            self._large.delete(self._manifest(copy, worker))  # first: without it, it is no copy
            with ThreadPoolExecutor(STREAMS) as pool:
                list(pool.map(self._store.delete, names))

    # --- there and back ---------------------------------------------------------------------------

    def save(self, path: Path, worker: int, token: str) -> int:
        """Copy a worker's checkpoint. Return the bytes of the files that were copied."""
        manifest = read_manifest(path)
        text = (path / MANIFEST).read_bytes()
        copy = Copy.of(manifest)
        name = self._manifest(copy, worker)
        if bytes(self._large.get(name, MOST_MANIFEST_BYTES) or b"") == text:
            return 0
        begun = bool(self._store.list(self._folder(copy, worker)))
        for file, expected in manifest.files.items():
            copied = self._save_file(path / file, self._folder(copy, worker) + file, begun=begun)
            if copied != expected:
                raise UserError(f"{path / file} has changed since it was saved")
        if not self._store.list(f"{self._prefix}start/"):  # the bucket deletes old objects
            self.take_over(token)
        if not self.is_newest(token):
            raise TakenOverError(f"{self.location}: a later start of this run has taken it over")
        self._store_anew(name, text, resume=False)
        return sum(size for size, _ in manifest.files.values())

    def fetch(self, copy: Copy, worker: int, path: Path, only: Set[Path] | None = None) -> None:
        """Copy a worker's part of a copy into the checkpoint `path`, which must not exist. `only`:
        as in `begin`."""
        text, manifest = self._read_manifest(copy, worker)
        begin(path, only)
        try:
            for file, known in manifest.files.items():
                target = incomplete(path) / file
                self._fetch_file(self._folder(copy, worker) + file, target, size=known[0])
                if fingerprint(target) != known:
                    raise DamagedObjectError(
                        f"{self.location}: {file} of {copy.name} is another file"
                    )
            complete(path, text)
        except BaseException:
            shutil.rmtree(incomplete(path), ignore_errors=True)
            raise

    def _read_manifest(self, copy: Copy, worker: int) -> tuple[str, Manifest]:
        """Return the manifest of a worker's part of a copy, as its text and as its values."""
        name = self._manifest(copy, worker)
        content = self._large.get(name, MOST_MANIFEST_BYTES)
        if content is None:
            raise DamagedObjectError(
                f"{self.location}: {copy.name} of worker {worker} has been deleted"
            )
        manifest = parse_manifest(bytes(content), f"{self.location}: {name}")
        if Copy.of(manifest) != copy or not all(map(_FILE.fullmatch, manifest.files)):
            raise DamagedObjectError(
                f"{self.location}: {copy.name} has the manifest of another one"
            )
        return bytes(content).decode(), manifest

    def _save_file(self, file: Path, name: str, begun: bool) -> tuple[int, int]:
        """Store the parts of a file. Return its size and CRC-32, as they were copied."""
        size = 0
        crc = 0
        number = 0
        with file.open("rb") as source:
            while piece := source.read(self._part_bytes):
                self._store_anew(f"{name}-{number:05d}", piece, resume=begun)
                size += len(piece)
                crc = zlib.crc32(piece, crc)
                number += 1
        return size, crc

    def _store_anew(self, name: str, content: bytes, *, resume: bool) -> None:
        """Store an object. What a start that was broken off has left under its name is deleted."""
        if not self._large.create(name, content, resume=resume):
            self._large.delete(name)
            if not self._large.create(name, content):
                raise DamagedObjectError(
                    f"{self.location}: {name} is written by another process, too"
                )

    def _fetch_file(self, name: str, file: Path, size: int) -> None:
        """Join the parts of a file of `size` bytes."""
        bytes_left = size
        number = 0
        with file.open("wb") as sink:
            while bytes_left > 0:
                part = self._large.get(f"{name}-{number:05d}", min(bytes_left, self._part_bytes))
                if not part:
                    raise DamagedObjectError(f"{self.location}: part {number} of {name} is missing")
                sink.write(part)
                bytes_left -= len(part)
                number += 1
        flush_to_disk(file)

    def _manifest(self, copy: Copy, worker: int) -> str:
        return f"{self._prefix}copy/{copy.name}/worker-{worker}"

    def _folder(self, copy: Copy, worker: int) -> str:
        return f"{self._prefix}worker-{worker}/{copy.name}/"
