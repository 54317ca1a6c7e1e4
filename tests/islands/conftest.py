"""Fixtures: a server for islands, and shorter or longer timeouts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.islands.servers import PATIENCE
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.server import local_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Join]:
    with local_server(tmp_path / "server") as found:
        yield found.join


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a first connection the time that it takes on a busy machine. One server has no new
    leader to wait for."""
    monkeypatch.setattr("torchtitan_diloco.islands.connection.FIRST_CONNECTION_SECONDS", PATIENCE)
    monkeypatch.setattr("torchtitan_diloco.islands.session.LAG_SECONDS", 1.0)


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count an island as gone sooner."""
    monkeypatch.setattr("torchtitan_diloco.islands.connection.EXPIRY", 3.0)


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next process of an island in a store take its slot sooner."""
    monkeypatch.setattr("torchtitan_diloco.islands_store.presence.SILENT", 2.5)
