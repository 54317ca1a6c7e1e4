import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.places import (
    KINDS,
    BucketServer,
    Place,
    bucket_place,
    https_place,
)
from torchtitan_diloco.store import Store


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[BucketServer]:
    server = BucketServer()
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
    elif request.param == "https":
        with https_place(tmp_path / "run") as (found, _):
            yield found
    else:
        yield request.getfixturevalue("bucket")


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    opened = place.open()
    yield opened
    opened.close()
