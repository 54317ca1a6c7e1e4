"""A folder as a store: each object is a file, local or on a shared file system.

A writer fills a temporary file beside the object, whose name starts with a dot, flushes it, and
then links it to its name, which fails if the name exists, or renames it to replace one. A file
under its name is therefore complete, whenever a writer is killed.

The file `.store-id` identifies the folder: a file system that was mounted again may give it another
number, and an empty folder in its place has no such file.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path

from torchtitan_diloco.store.errors import (
    FullError,
    PassingError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.names import is_segment
from torchtitan_diloco.store.store import (
    MOST_RAW_BYTES,
    SEAL_BYTES,
    Backend,
    Buffer,
    Kind,
    Listed,
    Raw,
    Sealed,
    too_large,
)

TEMPORARY = ".tmp"
MARKER = ".store-id"
STALE_SECONDS = 3600.0
"""Age in seconds of a temporary file after which its writer must be dead."""
FOLDER_ATTEMPTS = 20
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
FULL = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
NOT_A_NAME = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


class Folder(Backend):
    """A folder."""

    kind = Kind.FOLDER

    def __init__(self, path: Path, *, make: bool = True) -> None:
        """Open a folder.

        `make`: create it and its marker if they do not exist. Its parent must exist, to detect
        typos.
        """
        self.path = path.absolute()
        self.location = str(self.path)
        try:
            # In this order, as another process may make the marker, and then objects, meanwhile.
            has_files = self.path.is_dir() and any(map(_is_other_file, self.path.iterdir()))
            self.is_new = not is_store(self.path)
            self.has_other_files = has_files and self.is_new
            if make:
                self.path.mkdir(exist_ok=True)
            self._identity = _identity(self.path)
        except FileExistsError:
            raise RefusedError(f"{path}: it is a file; give a folder, or a join file") from None
        except FileNotFoundError:
            missing = f"{path}: {self.path.parent}" if make else str(path)
            raise RefusedError(
                f"{missing} does not exist or cannot be written; check the path, and that its file "
                "system is mounted"
            ) from None
        except OSError as error:
            raise RefusedError(f"{path}: {error.strerror}; give another folder") from error
        self._marker = b""
        try:
            self._marker = self._find_marker(make=make)
        except PassingError as error:
            raise RefusedError(f"{path}: {error}; give another folder") from error

    def create(self, name: str, content: Sealed, *, large: bool, durable: bool) -> bool:
        with self._explain():
            path = self.path / name
            if self._create_file(path, content, durable=durable):
                return True
            stored = self.get(name, large=large)
            if stored is None:
                raise PassingError("it was deleted in the meantime")
            if durable:
                _flush_folder(path.parent)  # whoever has linked it may be dead
            return stored.sealed == content

    def replace(self, name: str, content: Sealed, *, large: bool, durable: bool) -> None:  # noqa: ARG002
        with self._explain():
            path = self.path / name
            with self._temporary(path, content, durable=durable) as temporary:
                temporary.replace(path)
            if durable:
                _flush_folder(path.parent)

    def get(
        self,
        name: str,
        *,
        large: bool,  # noqa: ARG002
        most: int = MOST_RAW_BYTES,
        into: memoryview | None = None,
    ) -> Raw | None:
        with self._explain():
            try:
                with (self.path / name).open("rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
                    if status.st_size > most:
                        raise too_large(self.location, name, status.st_size, most)
                    if into is None or status.st_size != len(into) + SEAL_BYTES:
                        return Raw(Sealed.split(file.read()), status.st_mtime)
                    sealed = Sealed(into, bytearray(SEAL_BYTES))
                    _transfer(os.readv, file, sealed)
                    return Raw(sealed, status.st_mtime)
            except FileNotFoundError:
                self._check_identity()
                return None

    def list(self, prefix: str, after: str, most: int | None) -> list[Listed]:
        with self._explain():
            self._check_identity()
            objects = (
                Listed(
                    name,
                    size=status.st_size,
                    modified=status.st_mtime,
                    tag=f"{status.st_ino}-{status.st_mtime_ns}",
                )
                for name, status in self._files(prefix)
                if name > after
            )
            return sorted(islice(objects, most))

    def delete(self, name: str) -> None:
        with self._explain(), suppress(FileNotFoundError):
            path = self.path / name
            path.unlink()
            with suppress(OSError):  # it is not empty
                for _ in range(name.count("/") - 1):  # the first one is used all the time
                    path = path.parent
                    path.rmdir()

    def tidy(self, now: float) -> None:
        """Delete temporary files that are old."""
        for folder, _, names in os.walk(self.path):  # which leaves out what it cannot list
            for name in names:
                path = Path(folder, name)
                if not (name.startswith(".") and name.endswith(TEMPORARY)):
                    continue
                with suppress(OSError):  # such as that of another user
                    if now - path.stat().st_mtime > STALE_SECONDS:
                        path.unlink()

    # --- files ------------------------------------------------------------------------------------

    def _create_file(self, path: Path, content: Sealed, *, durable: bool = True) -> bool:
        """Create a file, or return False if it exists."""
        while not path.exists():
            with self._temporary(path, content, durable=durable) as temporary:
                if not self._link(temporary, path):
                    continue  # another writer was faster
            if durable:
                _flush_folder(path.parent)
            return True
        return False

    @contextmanager
    def _temporary(self, path: Path, content: Sealed, *, durable: bool) -> Iterator[Path]:
        """Write a file beside an object, flush it if it must be durable, and delete it at the
        end."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        self._check_identity()
        try:
            with self._open(temporary) as file:
                _transfer(os.writev, file, content)
                if durable:
                    os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)  # it is gone if it was renamed

    def _open(self, path: Path) -> FileIO:
        """Open a new file. Its folder may be deleted at the same time, because it is empty."""
        for _ in range(FOLDER_ATTEMPTS):
            self._make_folders(path.parent)
            with suppress(FileNotFoundError):
                return path.open("xb", buffering=0)
        raise PassingError(f"{path.parent} is deleted repeatedly")

    def _link(self, temporary: Path, path: Path) -> bool:
        """Give a file its name, or return False if the name exists."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise RefusedError(
                f"{self.path}: its file system has no hard links ({error.strerror}), so two "
                "writers cannot exclude each other: use a local file system, NFS or a bucket"
            ) from error
        return True

    def _make_folders(self, folder: Path) -> None:
        """Create the folders of an object below the folder of the store, which is never created
        here."""
        if folder.is_dir():
            return
        self._make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        _flush_folder(folder.parent)

    def _files(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the objects whose names begin with `prefix`, in no order."""
        above, _, start = prefix.rpartition("/")
        folders = [above]
        while folders:
            folder = folders.pop()
            try:
                entries = list(os.scandir(self.path / folder))
            except FileNotFoundError:
                continue
            for entry in entries:
                if not is_segment(entry.name) or not entry.name.startswith(start):
                    continue
                name = f"{folder}/{entry.name}".lstrip("/")
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(name)
                    elif stat.S_ISREG(status.st_mode):
                        yield name, status
            start = ""  # in the folders below

    # --- what may fail ----------------------------------------------------------------------------

    def _find_marker(self, *, make: bool) -> bytes:
        """Return the content of the marker, or b"" if there is none. `make`: create it then."""
        path = self.path / MARKER
        with self._explain():
            if make:
                self._create_file(path, Sealed(secrets.token_hex(16).encode(), b""))
            with suppress(FileNotFoundError):
                return path.read_bytes()
        return b""

    def _check_identity(self) -> None:
        """Raise an error if the folder is not the same as at the start, so that nothing is stored
        in a mount point whose file system is gone."""
        identity = _identity(self.path)
        if identity == self._identity:
            return
        if not self._marker or self._find_marker(make=False) != self._marker:
            raise PassingError("it is not the same folder as before; is it mounted?")
        self._identity = identity  # it was mounted again

    @contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._explained(error) from error

    def _explained(self, error: OSError) -> Exception:
        place = error.filename or self.location
        if error.errno in FULL:
            return FullError(f"{self.location}: {error.strerror}; free some space on this disk")
        if error.errno in FORBIDDEN:
            return RefusedError(
                f"{place}: {error.strerror}; allow this user to read and write in {self.location}"
            )
        if error.errno in NOT_A_NAME:
            return StoreError(
                f"{place}: {error.strerror}: the name of an object cannot be the folder of another"
            )
        return PassingError(f"{place}: {error.strerror}")


def _is_other_file(path: Path) -> bool:
    """Return whether a file in a folder that is no store yet was put there by somebody else.

    Hidden files may be temporary ones of a store, and a new file system has `lost+found`.
    """
    return not (path.name.startswith(".") or path.name == "lost+found")


def is_store(path: Path) -> bool:
    """Return whether a folder has the marker of a store, whatever is stored there."""
    return (path / MARKER).exists()


def _transfer(
    call: Callable[[int, Sequence[Buffer]], int], file: FileIO, buffers: Sequence[Buffer]
) -> None:
    """Call `readv` or `writev` until all buffers are read or written, or the file ends."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while views and (count := call(file.fileno(), views)):
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
