"""Stores of all kinds, for the tests of all folders: each server runs once in a session."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.places import KINDS, BucketServer, Place, bucket_place, seaweed_place
from tests.store.seaweed import SeaweedServer
from torchtitan_diloco.store import Store


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[BucketServer]:
    server = BucketServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    pytest.importorskip("obstore", reason="needs obstore")
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.close()


@pytest.fixture
def bucket(bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for key, value in bucket_server.environment.items():
        monkeypatch.setenv(key, value)
    with bucket_place(bucket_server, uuid.uuid4().hex) as place:
        yield place


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "folder":
        yield Place("folder", str(tmp_path / "run"))
    elif request.param == "seaweed":
        yield seaweed_place(request.getfixturevalue("seaweed"), tmp_path)
    else:
        yield request.getfixturevalue("bucket")


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    # Servers are tested in tests of their own, as this takes them dozens of calls.
    opened = place.open(writes="" if place.kind == "folder" else None)
    yield opened
    opened.close()
