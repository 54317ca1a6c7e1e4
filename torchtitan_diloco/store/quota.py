"""Disk space of each login on a server."""

import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from torchtitan_diloco.store.errors import FullError
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.rights import may_create, prefixes_of

COUNT_SECONDS = 1.0
"""Minimum seconds between two counts of a login whose quota is used up."""


@dataclass(frozen=True)
class Quota:
    """Limits for a login that is not an owner, and space that stays free on the disk."""

    objects: int = 10_000
    bytes: int = 20 * 10**9
    spare_bytes: int = 2**28
    """Bytes of the disk that uploads leave to the writer of the run itself."""


@dataclass
class _Used:
    objects: int = 0
    bytes: int = 0
    counted: float = 0.0


class Quotas:
    """Counts the objects of each login. Any thread may call this.

    Deletions, here or in the folder itself, are noticed when a quota seems to be used up: the
    objects are then counted.
    """

    def __init__(self, folder: Folder, quota: Quota) -> None:
        self._folder = folder
        self._quota = quota
        self._lock = threading.Lock()
        self._used: dict[str, _Used] = {}

    def admit(self, login: str, name: str, size: int, *, owner: bool) -> None:
        """Count an object that a login is about to store. Raise a FullError if there is no
        space."""
        free = shutil.disk_usage(self._folder.path).free
        if free - size < self._quota.spare_bytes:
            raise FullError(
                f"the disk of the server has {free / 1000000000.0:.2f} GB left, "
                "which are reserved for the run itself; free some space on it"
            )
        if owner:
            return
        objects = 1
        with suppress(FileNotFoundError):
            size -= (self._folder.path / name).stat().st_size  # it replaces this, or changes none
            objects = 0
        with self._lock:
            used = self._used.get(login)
            if used is None or (
                not self._fits(used, objects, size)
                and time.monotonic() > used.counted + COUNT_SECONDS
            ):
                used = self._used[login] = self._count(login)
            if not self._fits(used, objects, size):
                raise FullError(
                    f"login {login} stores {used.objects} objects with {used.bytes / 1e9:.2f} GB, "
                    f"and may store {self._quota.objects} with {self._quota.bytes / 1e9:.2f}; wait "
                    "until parts are merged, or give it a larger quota"
                )
            used.objects += objects
            used.bytes += size

    def _fits(self, used: _Used, objects: int, size: int) -> bool:
        return (
            used.objects + objects <= self._quota.objects and used.bytes + size <= self._quota.bytes
        )

    def _count(self, login: str) -> _Used:
        sizes = [
            listed.size
            for prefix in prefixes_of(login)
            for listed in self._folder.list(prefix, "", COUNT_SECONDS)
            if may_create(listed.name, login, owner=False)
        ]
        return _Used(objects=len(sizes), bytes=sum(sizes), counted=time.monotonic())
