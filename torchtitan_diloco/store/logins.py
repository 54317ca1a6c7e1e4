"""Logins of a folder that is served over https.

They are kept in the folder `.serve` in it, which no name of an object reaches: passwords, the
server's certificate, and a join file for each site.
"""

import fcntl
import hmac
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from torchtitan_diloco.store.address import Address
from torchtitan_diloco.store.certificate import fingerprint_of, make_certificate
from torchtitan_diloco.store.errors import RefusedError
from torchtitan_diloco.store.rights import LOGIN

OWN_FOLDER = ".serve"


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """A login of a site."""

    password: str
    owner: bool = False
    """Whether it may create the run and change its settings."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    address: str
    port: int
    logins: dict[str, Login]


class Logins:
    """The logins of a folder. A server immediately sees a change by another process."""

    def __init__(self, folder: Path) -> None:
        """Create the certificate and the list if they do not exist."""
        self._folder = folder / OWN_FOLDER
        self.certificate = self._folder / "certificate.pem"
        self.key = self._folder / "key.pem"
        self._path = self._folder / "logins.json"
        with self._files():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self.certificate.exists():
                certificate, key = make_certificate()
                write_secret(self.key, key)
                write_secret(self.certificate, certificate)
            if not self._path.exists():
                self._save(_File(address="localhost", port=0, logins={}))
            self.fingerprint = fingerprint_of(self.certificate.read_bytes())
        self._read_as: object = None
        self._file = self._load()

    @property
    def names(self) -> list[str]:
        return list(self._fresh().logins)

    def find(self, name: str, password: str) -> Login | None:
        """Return a login if the password is the right one."""
        login = self._fresh().logins.get(name)
        right = hmac.compare_digest((login.password if login else "").encode(), password.encode())
        return login if right and login is not None and login.password else None

    def set_address(self, address: str, port: int) -> None:
        """Set the address at which sites reach the server, and rewrite their join files."""
        with self._change() as file:
            file.address = address
            file.port = port
            for name in file.logins:
                self._write_join_file(file, name)

    def add(self, name: str, *, owner: bool = False) -> Path:
        """Add a login and return its join file."""
        if not re.fullmatch(LOGIN, name):
            raise RefusedError(
                f"site {name[:80]!r}: give a name of at most 60 characters from "
                "A-Z, a-z, 0-9, '.', '-' and '_' that starts with a letter, a digit "
                "or '_'"
            )
        with self._change() as file:
            if name in file.logins:
                raise RefusedError(
                    f"site {name} already has a login: its join file is {self.join_file(name)}"
                )
            file.logins[name] = Login(password=secrets.token_urlsafe(24), owner=owner)
            return self._write_join_file(file, name)

    def renew(self, name: str) -> Path:
        """Give a login a new password and return its new join file."""
        with self._change() as file:
            self._known(file, name).password = secrets.token_urlsafe(24)
            return self._write_join_file(file, name)

    def revoke(self, name: str) -> None:
        """Remove a login. Its objects stay."""
        with self._change() as file:
            self._known(file, name)
            del file.logins[name]
            self.join_file(name).unlink(missing_ok=True)

    def join_file(self, name: str) -> Path:
        return self._folder / f"join-{name}.txt"

    def _known(self, file: _File, name: str) -> Login:
        if name not in file.logins:
            there = ", ".join(file.logins) or "none"
            raise RefusedError(f"there is no site {name[:80]}; there are: {there}")
        return file.logins[name]

    @contextmanager
    def _change(self) -> Iterator[_File]:
        """Yield the list, and save it. No other process changes it at the same time."""
        with self._files(), (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self._load()
            yield file
            self._save(file)

    def _write_join_file(self, file: _File, name: str) -> Path:
        address = Address(
            host=file.address,
            port=file.port,
            login=name,
            password=file.logins[name].password,
            fingerprint=self.fingerprint,
        )
        path = self.join_file(name)
        with self._files():
            write_secret(path, f"{address.line}\n".encode())
        return path

    def _fresh(self) -> _File:
        """Return the current list."""
        with self._files():
            if self._state() != self._read_as:
                self._file = self._load()
        return self._file

    def _load(self) -> _File:
        with self._files():
            self._read_as = self._state()
            content = self._path.read_bytes()
        try:
            return msgspec.json.decode(content, type=_File)
        except ValueError as error:
            raise RefusedError(
                f"{self._path} is damaged ({error}); restore it, or delete it and "
                "give each site a new join file"
            ) from error

    def _state(self) -> tuple[int, int, int]:
        """Return a value that changes whenever the list is written."""
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _save(self, file: _File) -> None:
        with self._files():
            write_secret(self._path, msgspec.json.format(msgspec.json.encode(file)))

    @contextmanager
    def _files(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RefusedError(
                f"{error.filename or self._folder}: {error.strerror}; give a folder that can be "
                "read and written"
            ) from error


def write_secret(path: Path, content: bytes) -> None:
    """Write a file atomically that only this user can read."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    new.write_bytes(content)
    new.replace(path)
