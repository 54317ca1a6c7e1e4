"""Server of a run, which is nats-server with a certificate, logins and streams in a folder, and
islands on this machine to try it."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from torchtitan_diloco.base.hardware import end_with_parent
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.server_folder import (
    ADMIN,
    ISLAND,
    LOOPBACK,
    Folder,
    files_of,
    find_server,
    in_brackets,
    lock,
    make_folder,
    own_address,
    write_secret,
)
from torchtitan_diloco.islands.session import (
    STATE_INDEX,
    RequestError,
    open_session,
    stream_of,
    subject_of,
)

ISLAND_MAY = {
    "publish": [
        *("islands.>", "$JS.API.STREAM.INFO.*", "$JS.API.DIRECT.GET.*", "$JS.API.STREAM.MSG.GET.*"),
    ],
    "subscribe": ["_INBOX.>", "islands.*.log", "islands.*.beat", "islands.*.ask.*"],
}
"""Permissions: an island may append and read, but not delete, purge or change streams."""
SNAPSHOT_SECONDS = 6 * 3600
"""Age at which snapshots are deleted. They are created on request."""
LOG_BYTES, STATES_BYTES = 2**28, 2**26
"""Size of the log, and messages with states of the run, above which the oldest are deleted."""
OTHER_STREAM = 10058  # error code of the server: the stream is there with other settings
LOOK_SECONDS, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between checks of nats-server and the sites, and the longest pause before it is
restarted."""
LOCAL_GB = 1


class Server(Folder):
    """A folder, and the nats-server that runs in it."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        """`say`: receives the warnings and errors of nats-server."""
        super().__init__(path)
        self._say = say
        self.process: subprocess.Popen[str] | None = None
        self._lock: IO[str] | None = None

    @property
    def join(self) -> Join:
        """Join string of a new folder."""
        return self.joins[ISLAND]

    def start(self) -> None:
        """Start nats-server, and create the streams, or update them to the settings."""
        self._check_disk()
        self.launch()
        try:
            if self.settings.made:
                self._check_log()
            make_streams(self.admin, self.settings.keep_gb)
            self.settings.made = True
            self._take_up_sites()  # that `islands site` has changed meanwhile
            self.save()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start nats-server on the content of the folder."""
        self.stop()  # of this object: it holds the lock also if nats-server has died
        with files_of(self.path):
            self._lock = lock(self.path)
        try:
            self.process = subprocess.Popen(
                [find_server(), "--config", str(self._write_configuration())],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is for this process, which stops the server
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
            lines = self.process.stderr
            assert lines is not None
            self._wait_until_ready(lines)
            threading.Thread(target=self._pass_on, args=(lines,), daemon=True).start()
        except BaseException:
            self.stop()
            raise

    def keep_running(self) -> NoReturn:
        """Restart nats-server whenever it ends, and apply changes of the sites."""
        pause, began = 1.0, time.monotonic()
        while True:
            assert self.process is not None
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(LOOK_SECONDS)
                if time.monotonic() - began > LONGEST_PAUSE:
                    pause = 1.0
                self._say(f"nats-server ended with code {code}; restarting it in {pause:g} s")
                time.sleep(pause)
                pause, began = min(2 * pause, LONGEST_PAUSE), time.monotonic()
                try:
                    self.launch()
                except (ValueError, OSError) as error:
                    self._say(f"error: {error}")
            with suppress(ValueError, OSError):  # run.json is being restored
                self._take_up_sites()

    def _take_up_sites(self) -> None:
        """Reload the logins if `islands site` has changed them."""
        assert self.process is not None
        sites = self.read().sites
        if sites != self.settings.sites:
            self.settings.sites = sites
            self._write_configuration()
            self.process.send_signal(signal.SIGHUP)
            self._say(f"sites with a login: {', '.join(sites) or 'none'}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._lock is not None:
            self._lock.close()

    def _wait_until_ready(self, lines: IO[str]) -> None:
        said = ""
        for line in lines:
            said = line.strip() or said
            if "Server is ready" in line:
                return
        at = f"--host {self.settings.host} --port {self.settings.port}"
        remedy = "; give a free port, and an address of this machine" * ("listen" in said)
        raise UserError(f"{at}: nats-server did not start: {_message(said)}{remedy}")

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
                        f"{self.path}: the disk is full, and nothing more is "
                        "stored: free some space, then restart this server"
                    )

    def _write_configuration(self) -> Path:
        """Write the configuration of nats-server, which contains passwords, and return its path."""
        settings, path = self.settings, self.path / "nats-server.json"
        users = [
            {"user": site, "password": password, "permissions": ISLAND_MAY}
            for site, password in settings.sites.items()
        ]
        users.append({"user": ADMIN, "password": settings.admin_password})
        configuration = {
            "listen": f"{in_brackets(settings.host)}:{settings.port}",
            "write_deadline": "60s",  # do not drop an island on a slow link
            "jetstream": {
                "store_dir": str(self.path / "store"),
                "max_memory_store": 2**26,
                "max_file_store": int(3e9 * settings.keep_gb) + 2**33,
                "sync_interval": "always",
            },
            "tls": {
                "cert_file": str(self.path / "certificate.pem"),
                "key_file": str(self.path / "key.pem"),
                "handshake_first": True,
            },
            "authorization": {"users": users},
        }
        with files_of(self.path):
            write_secret(path, json.dumps(configuration, indent=1))
        return path

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.path).free / 1e9
        needed = 0.1 if self.settings.made else 2 * self.settings.keep_gb + 0.1
        if free < needed:
            raise UserError(
                f"{self.path}: the disk has {free:.1f} GB left, and the server "
                f"needs {needed:.1f}: free some space, or give a lower --keep-gb "
                "for a new folder"
            )

    def _check_log(self) -> None:
        """Raise a UserError if the log is missing: a new one would be another run."""
        with open_session(self.admin, "serve") as session:
            try:
                session.state_of("log")
            except RequestError as error:
                raise UserError(
                    f"{self.path}: the log of the run {self.settings.run} is "
                    "missing: start a new run in a new folder"
                ) from error


def make_streams(admin: Join, keep_gb: float, replicas: int = 1) -> None:
    """Create the streams of a run, or apply these settings to existing ones."""
    bulk_bytes = int(keep_gb * 1e9)
    streams: dict[str, dict[str, object]] = {
        "log": {"max_bytes": LOG_BYTES, "deny_delete": True, "deny_purge": True},
        "parts": {"max_bytes": bulk_bytes},
        "snapshots": {"max_bytes": bulk_bytes, "max_age": SNAPSHOT_SECONDS * 10**9},
        "states": {"max_bytes": STATES_BYTES},
    }
    same = {"num_replicas": replicas, "discard": "old", "allow_direct": True, "storage": "file"}
    try:
        with open_session(admin, "serve") as session:
            for kind, settings in streams.items():
                kinds = [kind, STATE_INDEX] if kind == "states" else [kind]
                subjects = [subject_of(admin.run, one) for one in kinds]
                name = stream_of(admin.run, kind)
                settings |= same | {"name": name, "subjects": subjects}
                try:
                    session.call(f"STREAM.CREATE.{name}", settings)
                except RequestError as error:
                    if error.code != OTHER_STREAM:
                        raise
                    session.call(f"STREAM.UPDATE.{name}", settings)
    except (OSError, ValueError) as error:
        raise UserError(f"the streams of the run {admin.run} cannot be created: {error}") from error


def open_folder(
    path: Path, *, say: Callable[[str], object] = logger.debug, **chosen: str | float | None
) -> Server:
    """Return the server of a folder, which is created if it is new.

    `chosen`: `run`, `keep_gb`, `host`, `port`, `address`. None: the value of the folder, or the
    default.
    """
    changes: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
    make_folder(path, changes)
    server = Server(path, say)
    if changes.get("run", run := server.settings.run) != run:
        raise UserError(
            f"--run {changes['run']}: {path} belongs to the run {run}: give a new folder"
        )
    server.settings = settings = msgspec.structs.replace(server.settings, **changes)
    settings.address = settings.address or own_address(settings.host)
    return server


def _message(line: str) -> str:
    """Strip process number and time from a line of nats-server's log."""
    return re.sub(r"^\[\d+\] \S+ \S+ ", "", line).strip()


# --- on this machine ------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def local_server(
    folder: Path, *, keep_gb: float = LOCAL_GB, run: str | None = None
) -> Iterator[Server]:
    """Run a server for islands on this machine."""
    server = open_folder(
        folder, run=run, host=LOOPBACK, port=free_port(), address=LOOPBACK, keep_gb=keep_gb
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
