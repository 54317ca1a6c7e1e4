"""Location of a store: a folder, a join file, `s3://`, `gs://` or `az://`."""

import os
from pathlib import Path

from torchtitan_diloco.base.user import NO_HOME, UserError, has_home, install_command
from torchtitan_diloco.store.errors import RefusedError
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.join_file import (
    JoinFile,
    check_bucket_url,
    endpoint_of_environment,
    kind_of,
    read_join_file,
)
from torchtitan_diloco.store.store import PATIENCE_SECONDS, Backend, Kind, Store

BUCKETS = ("s3", "gs", "az")
JOIN_FILE = ".toml"
"""Suffix of the name of a join file."""
OWN_BUCKET = ("join-owner.toml", "identities.json")
"""Files in the folder of a bucket of one's own, whose objects only its server may write. The first
one is the join file of its owner."""
KINDS = "a folder, a join file, s3://, gs:// or az://"


def open_store(
    location: str | Path,
    *,
    patience: float = PATIENCE_SECONDS,
    writes: str | None = "",
    quiet: bool = False,
) -> Store:
    """Open a store and test it.

    `patience`: seconds for which a call is retried. `writes`: prefix below which this process will
    write, where the store is tested; by default the one in the join file, or everywhere. None: read
    only. `quiet`: log no attempts. Raises a UserError that describes the problem.
    """
    backend = _backend(str(location), make=writes is not None)
    store = Store(backend, patience, quiet=quiet)
    try:
        if writes is None:
            store.get("test")
        else:
            store.self_test(writes or backend.own_prefix)
    except BaseException:
        store.close()
        raise
    return store


def check_location(location: str) -> None:
    """Raise a UserError if a location, or the join file that it names, cannot be right.

    Nothing is opened or created.
    """
    _parse(location)


def check_present(location: str) -> None:
    """Raise a UserError if a location is a join file that is not there.

    Its name would otherwise be taken for that of a new folder.
    """
    path = _path_of(location)
    is_there = os.path.exists(path)  # noqa: PTH110, as `exists` raises if the name is too long
    if "://" not in location and path.suffix == JOIN_FILE and not is_there:
        raise RefusedError(
            f"{location}: there is no such join file; copy it to this machine, or correct its path"
        )


def is_bucket(location: str) -> bool:
    """Return whether a location is in a bucket, which needs the extra `bucket`."""
    scheme, separator, _ = location.partition("://")
    if separator:
        return scheme in BUCKETS
    return bool(location) and os.path.isfile(_path_of(location))  # noqa: PTH113, as above


def kind_at(location: str) -> Kind:
    """Return the kind of the store at a location, which is not opened."""
    place = _parse(location)
    if isinstance(place, Path):
        return Kind.FOLDER
    if isinstance(place, JoinFile):
        return place.store_kind
    return kind_of(endpoint_of_environment(place.partition("://")[0]))


def _parse(location: str) -> Path | JoinFile | str:
    """Return the path of a folder, the content of a join file, or the URL of a bucket."""
    scheme, separator, after = location.partition("://")
    if separator and scheme in BUCKETS:
        check_bucket_url(location)
        return location
    if separator:
        place = f"{scheme[:20]}://{after.rpartition('@')[2][:80]}"
        raise RefusedError(f"{place}: there is no such kind of store; give {KINDS}")
    if not location:
        raise RefusedError(f"the location of a store is empty; give {KINDS}")
    kind, colon, _ = location.partition(":")
    if colon and kind in BUCKETS:
        raise RefusedError(
            f"{kind}:... is no location; give {kind}://BUCKET/PATH, with two slashes, or "
            f"./{kind}:... for a folder"
        )
    path = _path_of(location)
    try:
        is_own_bucket = all((path / name).is_file() for name in OWN_BUCKET)
        is_file = path.is_file()
    except OSError as error:  # such as a name that is too long
        reason = f"it cannot be read ({error.strerror}); correct its path"
        raise RefusedError(f"{location[:80]}: {reason}") from None
    if is_own_bucket:
        raise RefusedError(
            f"{location}: it is the folder of a bucket that `islands serve` serves; give "
            f"{path / OWN_BUCKET[0]}"
        )
    return read_join_file(path) if is_file else path


def _path_of(location: str) -> Path:
    """Return a location as a path, if its home folder is known."""
    if not has_home(location):
        raise RefusedError(f"{location[:80]} {NO_HOME}")
    return Path(location).expanduser()


def _backend(location: str, *, make: bool) -> Backend:
    check_present(location)
    place = _parse(location)
    if isinstance(place, Path):
        return Folder(place, make=make)
    try:
        from torchtitan_diloco.store.bucket import Bucket
    except ImportError:
        raise UserError(f"install obstore: {install_command('bucket')}") from None
    return Bucket(place.location, place) if isinstance(place, JoinFile) else Bucket(place)
