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
from typing import IO, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from torchtitan_diloco.diloco.fields import convert, setting_types
from torchtitan_diloco.islands.config import HOST_PATTERN, NAME, RUN_PATTERN, Join
from torchtitan_diloco.log import UserError, install_command

ANY_IPV4, ANY_IPV6, LOOPBACK = "0.0.0.0", "::", "127.0.0.1"
ISLAND, ADMIN = "island", "admin"
"""The login that a new folder has for sites, and that of the server itself."""

SiteChange: TypeAlias = Literal["add", "renew", "revoke"]


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a folder, in its `run.json`. They contain passwords."""

    run: str
    sites: dict[str, str]
    """Password of each site."""
    admin_password: str
    address: str = ""
    host: str = ANY_IPV4
    port: Annotated[int, Meta(ge=1, le=65535)] = 4222
    keep_gb: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    made: bool = False
    """Whether the streams have been made."""


def open_settings(folder: Path, chosen: Mapping[str, Any]) -> Settings:
    """Return the settings of a folder, which is made if it is new.

    `chosen`: `run`, `keep_gb`, `host`, `port`, `address`. In an existing folder, `run` cannot
    change.
    """
    _check_options(chosen)
    if folder.is_file():
        raise UserError(f"--folder {folder}: it is a file; give a new folder")
    if not (folder / "run.json").exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--folder {folder}: it has files, but no run; give a new folder")
        _make_folder(folder, chosen)
    settings = read_settings(folder)
    if chosen.get("run", settings.run) != settings.run:
        raise UserError(
            f"--run {chosen['run']}: {folder} was made with {settings.run}; give a new folder"
        )
    settings = msgspec.structs.replace(settings, **chosen)
    settings.address = settings.address or _own_address(settings.host)
    return settings


def read_settings(folder: Path) -> Settings:
    path = folder / "run.json"
    if not path.exists():
        raise UserError(f"--folder {folder}: it has no run; give the folder of `serve`")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path} is damaged ({error}); restore this file, and no other of the folder, or begin "
            "a new run in a new one"
        ) from error


def save(folder: Path, settings: Settings) -> None:
    write_secret(folder / "run.json", msgspec.json.encode(settings).decode())


def write_secret(path: Path, text: str) -> None:
    """Write a file atomically that only this user can read."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


@contextmanager
def files_of(folder: Path) -> Iterator[None]:
    """Name the folder in the errors of its files."""
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
            f"--folder {folder}: a server is running in it already; stop that one first"
        ) from error
    return file


def find_server() -> str:
    """Return the path of nats-server, from its package or on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise UserError(f"install nats-server: {install_command('islands')}")
    return found


# --- sites ----------------------------------------------------------------------------------------


def join_file(folder: Path, site: str) -> Path:
    return folder / ("join.txt" if site == ISLAND else f"join-{site}.txt")


def join_of(folder: Path, settings: Settings, user: str, password: str, host: str) -> Join:
    certificate = ssl.PEM_cert_to_DER_cert((folder / "certificate.pem").read_text())
    address = f"{host}:{settings.port}"
    return Join((address,), settings.run, user, password, certificate=certificate)


def joins_of(folder: Path, settings: Settings) -> dict[str, Join]:
    """Return the join string of each site."""
    return {
        site: join_of(folder, settings, site, password, settings.address)
        for site, password in settings.sites.items()
    }


def write_joins(folder: Path, joins: Mapping[str, Join]) -> None:
    """Write each join string to a file."""
    for site, join in joins.items():
        write_secret(join_file(folder, site), f"{join}\n")


def change_site(folder: Path, site: str, change: SiteChange = "add") -> Join | None:
    """Add a login for a site, or change its password, or remove it. Return its new join string."""
    settings = read_settings(folder)
    if site == ADMIN or not re.fullmatch(NAME, site):
        raise UserError(
            f"site {site!r}: give a name other than {ADMIN}, of at most 60 of the characters A-Z, "
            'a-z, 0-9, ".", "-" and "_"'
        )
    if change == "add" and site in settings.sites:
        raise UserError(
            f"site {site} has a login: {join_file(folder, site)} holds its join string, --renew "
            "gives it another password, and --revoke removes it"
        )
    if change != "add" and site not in settings.sites:
        raise UserError(
            f"there is no site {site}; there are: {', '.join(settings.sites) or 'none'}"
        )
    if change == "revoke":
        del settings.sites[site]
        join_file(folder, site).unlink(missing_ok=True)
    else:
        settings.sites[site] = secrets.token_urlsafe(24)
    save(folder, settings)
    joins = joins_of(folder, settings)
    write_joins(folder, joins)
    return joins.get(site)


# --- a new folder ---------------------------------------------------------------------------------


def _check_options(chosen: Mapping[str, Any]) -> None:
    kinds = setting_types(Settings)
    for key, value in chosen.items():
        try:
            convert(value, kinds[key])
        except ValueError as error:
            raise UserError(f"--{key.replace('_', '-')} {value}: {error}") from error
    if not re.fullmatch(HOST_PATTERN, address := chosen.get("address", "localhost")):
        raise UserError(
            f"--address {address!r}: give a name or an address that islands can reach, without a "
            "port, IPv6 in brackets"
        )
    if not re.fullmatch(HOST_PATTERN, in_brackets(host := chosen.get("host", ANY_IPV4))):
        raise UserError(
            f"--host {host!r}: give an address of this machine, such as {ANY_IPV4} or {ANY_IPV6} "
            "for all of them"
        )


def _make_folder(folder: Path, chosen: Mapping[str, Any]) -> None:
    made = {"run": f"run-{secrets.token_hex(4)}", **chosen}
    for key in ("host", "port", "address"):
        made.pop(key, None)  # they are stored once the server has started with them
    password, admin_password = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    settings = Settings(sites={ISLAND: password}, admin_password=admin_password, **made)
    if not re.fullmatch(RUN_PATTERN, settings.run):
        raise UserError(f"--run {settings.run!r}: use at most 64 letters, digits, - and _")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    try:
        command = ["openssl", *options.split(), "-subj", "/CN=islands", *files]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("the server needs the openssl command, for a certificate") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"openssl cannot make a certificate: {error.stderr[-300:]}") from error
    (folder / "key.pem").chmod(0o600)
    save(folder, settings)


def _own_address(host: str) -> str:
    """Return `host`, or for all addresses the one towards other networks. Nothing is sent."""
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
