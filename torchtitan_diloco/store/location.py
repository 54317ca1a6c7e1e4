"""Location of a store: a folder, a join file, `https://`, `s3://`, `gs://` or `az://`."""

from collections.abc import Mapping
from pathlib import Path

from torchtitan_diloco.base.user import UserError, install_command
from torchtitan_diloco.store.address import Address, read_join_file
from torchtitan_diloco.store.errors import RefusedError
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.store import PATIENCE_SECONDS, Backend, Store

BUCKETS = ("s3", "gs", "az")
KINDS = "a folder, a join file, https://, s3://, gs:// or az://"


def open_store(
    location: str | Path,
    *,
    credentials: Mapping[str, str] | None = None,
    patience: float = PATIENCE_SECONDS,
    writes: str | None = "",
    quiet: bool = False,
) -> Store:
    """Open a store and test it.

    `credentials`: settings of a bucket in addition to the environment, such as `endpoint` or
    `access_key_id`. `patience`: seconds for which a call is retried. `writes`: prefix below
    which this process may write, None to read only; by default everywhere, or over https below the
    parts of the login. `quiet`: log no attempts. Raises a UserError that describes the problem.
    """
    backend = _backend(str(location), credentials or {}, make=writes is not None)
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


def unknown_kind(location: str) -> str:
    """Return the scheme of a location if it is unknown, otherwise an empty string."""
    scheme, separator, _ = location.partition("://")
    return scheme if separator and scheme != "https" and scheme not in BUCKETS else ""


def is_bucket(location: str) -> bool:
    scheme, separator, _ = location.partition("://")
    return bool(separator) and scheme in BUCKETS


def _backend(location: str, credentials: Mapping[str, str], *, make: bool) -> Backend:
    scheme, separator, after = location.partition("://")
    if separator and scheme in BUCKETS:
        try:
            from torchtitan_diloco.store.bucket import Bucket
        except ImportError:
            raise UserError(f"install obstore: {install_command('bucket')}") from None
        return Bucket(location, credentials)
    if credentials:
        raise RefusedError(f"{location[:80]}: only buckets take credentials; remove them")
    if separator and scheme == "https":
        return _https(Address.parse(location))
    if separator:
        place = f"{scheme[:20]}://{after.rpartition('@')[2][:80]}"
        raise RefusedError(f"{place}: there is no such kind of store; give {KINDS}")
    if not location:
        raise RefusedError(f"the location of a store is empty; give {KINDS}")
    path = Path(location).expanduser()
    if path.is_file():
        return _https(read_join_file(path))
    return Folder(path, make=make)


def _https(address: Address) -> Backend:
    try:
        from torchtitan_diloco.store.https import Https
    except ImportError:
        raise UserError(f"install urllib3: {install_command('islands')}") from None
    return Https(address)
