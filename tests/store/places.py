"""Stores for tests: a folder, and buckets of two servers in other processes."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.store.seaweed import SITE, SeaweedServer
from torchtitan_diloco.store import Store, open_store
from torchtitan_diloco.store.store import Sealed

PATIENCE = 100.0
"""Seconds after which a test counts as hanging."""
KINDS = ("folder", "bucket", "seaweed")


@dataclass
class Place:
    """Where a store is, for this process and others."""

    kind: str
    location: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that other processes need."""
    name: str = SITE
    """Name of an island: this login may write the parts and notes of it."""
    port: int = 0
    """Port of the server, 0 if there is none."""
    at_port: Callable[[int], str] | None = None
    """Returns the location of the same store through another port, if the location names one."""

    def open(self, **options: Any) -> Store:
        return open_store(self.location, **options)

    @property
    def own(self) -> str:
        """Prefix below which this login may create objects."""
        return f"part/{self.name}/"

    @property
    def notes(self) -> str:
        """Prefix of objects that this login may replace."""
        return f"island/{self.name}/"

    @property
    def note(self) -> str:
        return f"{self.notes}1"

    def write_raw(self, name: str, content: bytes) -> None:
        """Write a content without a checksum, as a damaged disk would."""
        backend = self.open(writes=None).backend
        backend.replace(name, Sealed(content, b""), large=True, durable=True)

    def read_raw(self, name: str) -> bytes:
        found = self.open(writes=None).backend.get(name, large=True)
        assert found is not None
        return found.sealed.whole


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


def seaweed_place(server: SeaweedServer, folder: Path) -> Place:
    """Return a place of its own, whose join file is in a folder."""
    name = f"{SITE}.{uuid.uuid4().hex}"
    prefix = f"mirror/{SITE}/{name}/"

    def at_port(port: int) -> str:
        path = folder / f"join-{port}.toml"
        return str(server.join_file(path, endpoint=f"https://127.0.0.1:{port}", prefix=prefix))

    return Place("seaweed", at_port(server.port), name=name, port=server.port, at_port=at_port)


def start_writer(place: Place, *words: str) -> "subprocess.Popen[str]":
    """Start `writer.py` in another process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store.writer", place.location, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | dict(place.environment),
    )
