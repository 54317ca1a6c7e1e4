"""Folder of a server: the settings and logins of its run, its certificate, and the join strings."""

import fcntl
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.settings import convert, setting_types
from torchtitan_diloco.base.user import UserError, install_command, no_run
from torchtitan_diloco.islands.config import HOST_PATTERN, RUN_PATTERN, Join
from torchtitan_diloco.islands_store.names import NAME_PATTERN

ANY_IPV4, ANY_IPV6, LOOPBACK = "0.0.0.0", "::", "127.0.0.1"
ISLAND, ADMIN = "island", "admin"
"""Login of a new folder for sites, and login of the server itself."""


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a folder, in its `run.json`. They contain passwords."""

    run: str
    sites: dict[str, str]  # password of each site
    admin_password: str
    address: str = ""
    host: str = ANY_IPV4
    port: Annotated[int, Meta(ge=1, le=65535)] = 4222
    keep_gb: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    made: bool = False  # whether the streams have been made


class Folder:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.settings = self.read()
        with files_of(self.path):
            text = (self.path / "certificate.pem").read_text()
        self._certificate = ssl.PEM_cert_to_DER_cert(text)

    def read(self) -> Settings:
        """Return the current settings in the folder."""
        path = self.path / "run.json"
        try:
            with files_of(self.path):
                if not path.exists():
                    raise no_run(self.path, path.name, "give the --folder of `serve`")
                return msgspec.json.decode(path.read_bytes(), type=Settings)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{path} is damaged ({error}): restore only this file, or start a "
                "new run in a new folder"
            ) from error

    def save(self) -> None:
        """Write the settings, and the join string of each site to a file."""
        with files_of(self.path):
            _write_settings(self.path, self.settings)
            for site, join in self.joins.items():
                write_secret(self.join_file(site), f"{join}\n")

    @property
    def joins(self) -> dict[str, Join]:
        """The join string of each site."""
        address, sites = self.settings.address, self.settings.sites
        return {site: self._join(site, password, address) for site, password in sites.items()}

    @property
    def admin(self) -> Join:
        """The join string of the server itself."""
        host = {ANY_IPV4: LOOPBACK, ANY_IPV6: "::1"}.get(self.settings.host, self.settings.host)
        return self._join(ADMIN, self.settings.admin_password, in_brackets(host))

    def _join(self, user: str, password: str, host: str) -> Join:
        address = f"{host}:{self.settings.port}"
        run, certificate = self.settings.run, self._certificate
        return Join((address,), run, user, password, certificate=certificate)

    def join_file(self, site: str = ISLAND) -> Path:
        return self.path / ("join.txt" if site == ISLAND else f"join-{site}.txt")

    def change_site(self, site: str, change: Literal["add", "renew", "revoke"]) -> Join | None:
        """Add a login for a site, or change its password, or remove it. Return its new join
        string."""
        sites = self.settings.sites
        if site == ADMIN or not re.fullmatch(NAME_PATTERN, site):
            raise UserError(
                f"site {site!r}: give a name other than {ADMIN}, of at most 60 "
                'characters from A-Z, a-z, 0-9, ".", "-" and "_"'
            )
        if change == "add" and site in sites:
            raise UserError(
                f"site {site} already has a login: its join string is in "
                f"{self.join_file(site)}; --renew gives it a new password, and "
                "--revoke removes it"
            )
        if change != "add" and site not in sites:
            raise UserError(f"there is no site {site}; there are: {', '.join(sites) or 'none'}")
        if change == "revoke":
            del sites[site]
            self.join_file(site).unlink(missing_ok=True)
        else:
            sites[site] = secrets.token_urlsafe(24)
        self.save()
        return self.joins.get(site)


def _write_settings(folder: Path, settings: Settings) -> None:
    write_secret(folder / "run.json", msgspec.json.encode(settings).decode())


def write_secret(path: Path, text: str) -> None:
    """Write a file atomically that only this user can read."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


@contextmanager
def files_of(folder: Path) -> Iterator[None]:
    """Name the folder in errors about its files."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--folder {folder}: {error.filename or folder}: {error.strerror}; give a folder that "
            "can be read and written"
        ) from error


def lock(folder: Path) -> IO[str]:
    """Return an open file that holds the lock of a folder. Raises a UserError if it is held."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(
            f"--folder {folder}: a server is already running in it; stop that one first"
        ) from error
    return file


def find_server() -> str:
    """Return the path of nats-server, from its package or on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise UserError(f"install nats-server: {install_command('islands')}")
    return found


# --- a new folder ---------------------------------------------------------------------------------


def make_folder(folder: Path, chosen: Mapping[str, Any]) -> None:
    """Check the chosen settings, and create the folder if it is new."""
    kinds = setting_types(Settings)
    for key, value in chosen.items():
        try:
            convert(value, kinds[key])
        except ValueError as error:
            raise UserError(f"--{key.replace('_', '-')} {value}: {error}") from error
    if not re.fullmatch(HOST_PATTERN, address := chosen.get("address", "localhost")):
        raise UserError(
            f"--address {address!r}: give a name or an address that islands can "
            "reach, without a port, and IPv6 in brackets"
        )
    if not re.fullmatch(HOST_PATTERN, in_brackets(host := chosen.get("host", ANY_IPV4))):
        raise UserError(
            f"--host {host!r}: give an address of this machine, such as {ANY_IPV4} or {ANY_IPV6} "
            "for all of them"
        )
    with files_of(folder):
        if folder.is_file():
            raise UserError(f"--folder {folder}: it is a file; give a new folder")
        if not (folder / "run.json").exists():
            if folder.exists() and any(folder.iterdir()):
                raise UserError(
                    f"--folder {folder}: it contains files, but no run; give a new folder"
                )
            _fill_folder(folder, {"run": f"run-{secrets.token_hex(4)}", **chosen})


def _fill_folder(folder: Path, chosen: dict[str, Any]) -> None:
    for key in ("host", "port", "address"):
        chosen.pop(key, None)  # they are stored once the server has started with them
    password, admin_password = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    settings = Settings(sites={ISLAND: password}, admin_password=admin_password, **chosen)
    if not re.fullmatch(RUN_PATTERN, settings.run):
        raise UserError(
            f"--run {settings.run!r}: give at most 64 characters from letters, digits, - and _"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    try:
        command = ["openssl", *options.split(), "-subj", "/CN=islands", *files]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            "the server needs the openssl command to create a certificate: install it"
        ) from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"openssl cannot create a certificate: {error.stderr[-300:]}") from error
    (folder / "key.pem").chmod(0o600)
    _write_settings(folder, settings)


def own_address(host: str) -> str:
    """Return `host`, or, for all addresses, the one that leads to other networks. Sends nothing."""
    if host not in (ANY_IPV4, ANY_IPV6):
        return in_brackets(host)
    others = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
    for family in others if host == ANY_IPV4 else reversed(others):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((others[family], 9))
            return in_brackets(probe.getsockname()[0])
    return socket.gethostname()


def in_brackets(host: str) -> str:
    """Put an IPv6 address in brackets, as before a port."""
    return f"[{host}]" if ":" in host else host
