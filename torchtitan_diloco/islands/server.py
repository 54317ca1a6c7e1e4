"""Server of a run: nats-server with a certificate, logins and streams in a folder."""

import asyncio
import errno
import json
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta

from torchtitan_diloco.diloco.fields import convert, setting_types
from torchtitan_diloco.hardware import end_with_parent
from torchtitan_diloco.islands.config import HOST_PATTERN, RUN_PATTERN, Join, RefusedError
from torchtitan_diloco.islands.connection import LOG_PATIENCE
from torchtitan_diloco.islands.session import Session, check_installed, stream_of, subject_of
from torchtitan_diloco.log import UserError, install_command, logger

ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"
ISLAND, ADMIN = "island", "admin"
ISLAND_MAY = {
    "publish": [
        *("islands.>", "$JS.API.STREAM.INFO.*", "$JS.API.DIRECT.GET.*", "$JS.API.STREAM.MSG.GET.*"),
    ],
    "subscribe": ["_INBOX.>", "islands.*.log", "islands.*.beat", "islands.*.ask.*"],
}
"""Permissions: an island may append and read, but not delete, purge or change streams."""
SNAPSHOT_SECONDS = 6 * 3600
"""Age at which snapshots are deleted. They are made on request."""
LOG_BYTES, STATES = 2**28, 64
"""Size of the log, and messages with states of the run, above which the oldest are deleted."""
MAKE_SECONDS = 10.0


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a folder, in its `run.json`. They contain passwords."""

    run: str
    password: str
    admin_password: str
    address: str
    host: str = ANY_IPV4
    port: Annotated[int, Meta(ge=1, le=65535)] = 4222
    keep_gb: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    made: bool = False
    """Whether the streams have been made."""


class Server:
    """A folder, and the nats-server that runs in it."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], object]) -> None:
        """`say`: receives the warnings and errors of nats-server."""
        self.folder, self.settings, self._say = folder, settings, say
        self.process: subprocess.Popen[str] | None = None
        host = {ANY_IPV4: "127.0.0.1", ANY_IPV6: "::1"}.get(settings.host, settings.host)
        self.join = self._join(ISLAND, settings.password, settings.address)
        self.admin = self._join(ADMIN, settings.admin_password, _in_brackets(host))
        self.join_file = folder / "join.txt"

    def start(self) -> "subprocess.Popen[str]":
        """Start nats-server, and make the streams if the folder is new."""
        check_installed()
        self._check_port()
        program, path = find_server(), self.folder / "nats-server.json"
        with _files_of(self.folder):
            self._check_disk()
            save(self.folder, self.settings)
            _write_secret(self.join_file, f"{self.join}\n")
            _write_secret(path, json.dumps(self._configuration(), indent=1))
        self.process = subprocess.Popen(
            [program, "--config", str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C is for this process, which stops the server
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        try:
            assert self.process.stderr is not None
            self._wait_until_ready(self.process.stderr)
            threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True).start()
            asyncio.run(self._make_streams_once())
        except BaseException:
            self.stop()
            raise
        return self.process

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_until_ready(self, lines: IO[str]) -> None:
        said = ""
        for line in lines:
            said = line.strip() or said
            if "Server is ready" in line:
                return
        raise UserError(f"nats-server did not start: {_message(said)}")

    def _pass_on(self, lines: IO[str]) -> None:
        full = False
        with lines:
            for line in lines:
                if "no space left on device" not in line:
                    if re.search(r"\[(WRN|ERR|FTL)\]", line):
                        self._say(_message(line))
                elif not full:  # nats-server logs this for each stream and record, in three forms
                    full = True
                    self._say(
                        f"{self.folder}: the disk is full, and nothing more is stored: free some "
                        "space, then stop this server and start it again"
                    )

    def _join(self, user: str, password: str, host: str) -> Join:
        address = f"{host}:{self.settings.port}"
        certificate = ssl.PEM_cert_to_DER_cert((self.folder / "certificate.pem").read_text())
        return Join((address,), self.settings.run, user, password, certificate=certificate)

    def _configuration(self) -> dict[str, Any]:
        settings = self.settings
        users = [
            {"user": ISLAND, "password": settings.password, "permissions": ISLAND_MAY},
            {"user": ADMIN, "password": settings.admin_password},
        ]
        return {
            "listen": f"{_in_brackets(settings.host)}:{settings.port}",
            "write_deadline": "60s",  # do not drop an island on a slow link
            "jetstream": {
                "store_dir": str(self.folder / "store"),
                "max_memory_store": 2**26,
                "max_file_store": int(3e9 * settings.keep_gb) + 2**33,
                "sync_interval": "always",
            },
            "tls": {
                "cert_file": str(self.folder / "certificate.pem"),
                "key_file": str(self.folder / "key.pem"),
                "handshake_first": True,
            },
            "authorization": {"users": users},
        }

    def _check_port(self) -> None:
        """Check that the port is free: a second server must not run in the same folder."""
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            remedy = "give a port and an address of this machine that the server may use"
            if error.errno == errno.EADDRINUSE:
                remedy = "is the server of this folder still running? Stop it, or give another port"
            elif family == socket.AF_INET6:
                remedy = (
                    f"this machine has no such IPv6 address: give one that it has, or {ANY_IPV4}"
                )
            raise UserError(f"--host {host} --port {port}: {error.strerror}; {remedy}") from error

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.folder).free / 1e9
        needed = 0.1 if self.settings.made else 2 * self.settings.keep_gb + 0.1
        if free < needed:
            raise UserError(
                f"{self.folder}: the disk has {free:.1f} GB left, and the server needs "
                f"{needed:.1f}: free some, or give a lower --keep-gb for a new folder"
            )

    async def _make_streams_once(self) -> None:
        from nats.js.errors import NotFoundError

        if not self.settings.made:
            await make_streams(self.admin, self.settings.keep_gb)
            self.settings.made = True
            save(self.folder, self.settings)
        try:
            async with _session(self.admin) as session:
                await session.jetstream.stream_info(stream_of(self.settings.run, "log"))
        except NotFoundError as error:
            raise UserError(
                f"{self.folder}: the log of the run {self.settings.run} is gone; begin a new "
                "run in a new folder"
            ) from error


@asynccontextmanager
async def _session(admin: Join) -> AsyncIterator[Session]:
    session = Session(LOG_PATIENCE)
    try:
        await session.open(admin, admin.addresses[0], "serve")
        yield session
    finally:
        await session.close()


async def make_streams(admin: Join, keep_gb: float, replicas: int = 1) -> None:
    """Make the streams of a run. Existing ones must have the same settings."""
    from nats.js.api import DiscardPolicy, StreamConfig
    from nats.js.errors import APIError

    def config(kind: str, **settings: Any) -> StreamConfig:
        name, subjects = stream_of(admin.run, kind), [subject_of(admin.run, kind)]
        settings |= {"num_replicas": replicas, "discard": DiscardPolicy.OLD, "allow_direct": True}
        return StreamConfig(name=name, subjects=subjects, **settings)

    bulk_bytes = int(keep_gb * 1e9)
    streams = [
        config("log", max_bytes=LOG_BYTES, deny_delete=True, deny_purge=True),
        config("parts", max_bytes=bulk_bytes),
        config("snapshots", max_bytes=bulk_bytes, max_age=SNAPSHOT_SECONDS),
        config("states", max_msgs=STATES),
    ]
    try:
        async with _session(admin) as session:
            for stream in streams:
                await session.run(session.jetstream.add_stream(stream), MAKE_SECONDS)
    except (APIError, ConnectionError, TimeoutError, RefusedError) as error:
        raise UserError(f"the streams of the run {admin.run} cannot be made: {error}") from error


def open_folder(
    folder: Path, *, say: Callable[[str], object] = logger.debug, **chosen: str | float | None
) -> Server:
    """Return the server of a folder, which is made if it is new.

    `chosen`: `run`, `keep_gb`, `host`, `port`, `address`. In an existing folder, None keeps a
    setting, and the first two cannot change.
    """
    folder = folder.absolute()
    changes = {key: value for key, value in chosen.items() if value is not None}
    _check_options(changes)
    with _files_of(folder):
        return Server(folder, _read_or_make(folder, changes), say)


def _read_or_make(folder: Path, changes: dict[str, Any]) -> Settings:
    path = folder / "run.json"
    if folder.is_file():
        raise UserError(f"--folder {folder}: it is a file; give a new folder")
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--folder {folder}: it has files, but no run; give a new folder")
        _make_folder(folder, changes)
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=Settings)
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path} is damaged ({error}); restore this file, and no other of the folder, or begin "
            "a new run in a new one"
        ) from error
    for key in ("run", "keep_gb"):
        new, old = changes.get(key), getattr(settings, key)
        if new is not None and new != old:
            flag = f"--{key.replace('_', '-')} {new}"
            raise UserError(f"{flag}: {folder} was made with {old}; give a new folder")
    return msgspec.structs.replace(settings, **changes)


@contextmanager
def _files_of(folder: Path) -> Iterator[None]:
    """Name the folder in the errors of its files."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--folder {folder}: {error.filename or folder}: {error.strerror}; give a folder that "
            "can be read and written"
        ) from error


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
    if not re.fullmatch(HOST_PATTERN, _in_brackets(host := chosen.get("host", ANY_IPV4))):
        raise UserError(
            f"--host {host!r}: give an address of this machine, such as {ANY_IPV4} or {ANY_IPV6} "
            "for all of them"
        )


def _make_folder(folder: Path, chosen: Mapping[str, Any]) -> None:
    made = {"run": f"run-{secrets.token_hex(4)}", **chosen}
    made.setdefault("address", _own_address(chosen.get("host", ANY_IPV4)))
    made |= {key: secrets.token_urlsafe(24) for key in ("password", "admin_password")}
    settings = Settings(**made)
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


def save(folder: Path, settings: Settings) -> None:
    _write_secret(folder / "run.json", msgspec.json.encode(settings).decode())


def _write_secret(path: Path, text: str) -> None:
    """Write a file atomically that only this user can read."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


def _own_address(host: str) -> str:
    """Return `host`, or for all addresses the one towards other networks. Nothing is sent."""
    if host not in (ANY_IPV4, ANY_IPV6):
        return _in_brackets(host)
    others = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
    for family in others if host == ANY_IPV4 else reversed(others):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((others[family], 9))
            return _in_brackets(probe.getsockname()[0])
    return socket.gethostname()


def _in_brackets(host: str) -> str:
    """Put an IPv6 address in brackets, as before a port."""
    return f"[{host}]" if ":" in host else host


def find_server() -> str:
    """Return the path of nats-server, from its package or on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise UserError(f"the server needs nats-server: {install_command('islands')}")
    return found


def _message(line: str) -> str:
    """Strip process number and time from a line of nats-server's log."""
    return re.sub(r"^\[\d+\] \S+ \S+ ", "", line).strip()
