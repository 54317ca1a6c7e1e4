"""Stores for tests: a folder, an https server in this process, a bucket in another process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.store import Store, open_store
from torchtitan_diloco.store.store import Raw

PATIENCE = 100.0
"""Seconds after which a test counts as hanging."""
SITE = "site-a"
KINDS = ("folder", "https", "bucket")


@dataclass
class Place:
    """Where a store is, for this process and others."""

    kind: str
    location: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that other processes need."""
    raw: Callable[[], Store] | None = None
    """Opens the store with all rights, if `open` does not."""
    port: int = 0
    """Port of the server, 0 if there is none."""

    def open(self, **options: Any) -> Store:
        return open_store(self.location, **options)

    @property
    def own(self) -> str:
        """Prefix below which this login may create objects."""
        return f"part/{SITE}/"

    @property
    def note(self) -> str:
        """An object that this login may replace."""
        return f"island/{SITE}-1"

    def write_raw(self, name: str, content: bytes) -> None:
        """Write a content without a checksum, as a damaged disk would."""
        (self.raw or self.open)().backend.replace(name, content, PATIENCE)

    def read_raw(self, name: str) -> bytes:
        found = (self.raw or self.open)().backend.get(name, PATIENCE)
        assert isinstance(found, Raw)
        return found.content


@contextmanager
def https_place(folder: Path, **options: Any) -> Iterator[tuple[Place, Any]]:
    """Yield a place, and its server."""
    pytest.importorskip("aiohttp", reason="needs aiohttp")
    from torchtitan_diloco.store.server import Server

    server = Server(folder, host="127.0.0.1", **options)
    server.start()
    try:
        server.logins.set_address("127.0.0.1", server.port)
        join = server.logins.add(SITE)
        everything = lambda: open_store(folder)  # noqa: E731
        yield Place("https", str(join), raw=everything, port=server.port), server
    finally:
        server.stop()


class BucketServer:
    """S3 in another process."""

    def __init__(self) -> None:
        for name in ("moto", "obstore"):
            pytest.importorskip(name, reason=f"needs {name}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.bucket_server"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def environment(self) -> dict[str, str]:
        return bucket_environment(self.port)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def bucket_environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def bucket_place(server: BucketServer, path: str, bucket: str = "run") -> Iterator[Place]:
    """Yield a place. This process needs its environment."""
    yield Place("bucket", f"s3://{bucket}/{path}", server.environment, port=server.port)


def start_writer(place: Place, *words: str) -> "subprocess.Popen[str]":
    """Start `writer.py` in another process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store.writer", place.location, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | dict(place.environment),
    )
