"""SeaweedFS in another process: an S3 server with TLS and rights by prefix."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import tomli_w

from tests.ports import free_port
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.store import StoreError, open_store

HOST = "127.0.0.1"
BUCKET = "islands"
SITE = "site-a"
START_SECONDS = 90.0
SECRETS = {"owner": "secret-of-owner", SITE: "secret-of-site"}
IDENTITIES = {
    "identities": [
        {
            "name": "owner",
            "credentials": [{"accessKey": "owner", "secretKey": SECRETS["owner"]}],
            "actions": ["Admin"],
        },
        {
            "name": SITE,
            "credentials": [{"accessKey": SITE, "secretKey": SECRETS[SITE]}],
            "actions": [
                f"Read:{BUCKET}",
                f"List:{BUCKET}",
                *(
                    f"Write:{BUCKET}/{folder}/{SITE}{end}"
                    for folder in ("part", "island")
                    for end in ("/*", ".*")
                ),
                f"Write:{BUCKET}/mirror/{SITE}/*",
            ],
        },
    ]
}
ROLES = "master", "volume", "filer", "s3"
PORTS = tuple(f"{role}.port" for role in ROLES)


class SeaweedServer:
    """A server with two logins: `owner` may write everything, `site-a` below its own names."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("cryptography", reason="needs cryptography")
        from tests.store.certificates import make_certificate

        self._folder = folder
        self._weed = _find_weed()
        self.certificate, self._key = make_certificate(folder)
        (folder / "s3.json").write_text(json.dumps(IDENTITIES))
        (folder / "data").mkdir()
        for _ in range(3):  # another process may take a port that was free
            self._start()
            if self._becomes_ready():
                return
            self.close()
        raise AssertionError((folder / "log").read_text()[-3000:])

    def join_file(self, path: Path, login: str = SITE, **changes: str) -> Path:
        """Write a join file of a login."""
        content: Mapping[str, str] = {
            "location": f"s3://{BUCKET}",
            "endpoint": f"https://{HOST}:{self.port}",
            "access_key_id": login,
            "secret_access_key": SECRETS[login],
            "certificate": self.certificate.read_text(),
            "name": login,
        }
        path.write_text(tomli_w.dumps({**content, **changes}))
        return path

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for path in self._sockets:
            path.unlink(missing_ok=True)

    def _start(self) -> None:
        names = [*PORTS, *(f"{name}.grpc" for name in PORTS)]
        numbers = set[int]()
        while len(numbers) < len(names):
            numbers.add(free_port())
        ports = dict(zip(names, numbers, strict=True))
        self.port = ports["s3.port"]
        self._sockets = [
            Path(f"/tmp/seaweedfs-{role}-grpc-{ports[f'{role}.port.grpc']}.sock") for role in ROLES
        ]
        options = {
            "dir": "data",
            "ip": HOST,
            "ip.bind": HOST,
            "filer": "true",
            "filer.localSocket": "filer.sock",
            "s3": "true",
            "s3.localSocket": "s3.sock",
            "s3.config": "s3.json",
            "s3.cert.file": str(self.certificate),
            "s3.key.file": str(self._key),
            "s3.iam": "false",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "64",
            "volume.max": "50",
            **{name: str(port) for name, port in ports.items()},
        }
        words = [str(self._weed), "server", *(f"-{key}={value}" for key, value in options.items())]
        code = "import os, sys; from torchtitan_diloco.base.hardware import end_with_parent; "
        code += "end_with_parent(); os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(self._folder), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _becomes_ready(self) -> bool:
        """Wait until an object can be stored. Return False if the server has ended."""
        join = self.join_file(self._folder / "owner.toml", "owner")
        until = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            try:
                open_store(join, patience=1.0, quiet=True).close()
            except StoreError:
                time.sleep(0.2)
            else:
                return True
        return False


def _find_weed() -> Path:
    """Return the program, or skip the test."""
    from torchtitan_diloco.islands.seaweed import find_weed

    try:
        return find_weed()
    except UserError as error:
        pytest.skip(str(error))
