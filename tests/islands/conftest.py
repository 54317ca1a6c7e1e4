"""Fixtures: shorter timeouts."""

import pytest

from torchtitan_diloco.islands import past, reader, seen, syncing
from torchtitan_diloco.islands.rules import founding, presence, syncer

USERS = (presence, founding, syncer, syncing, reader, seen, past)
"""Modules that use `SILENT`."""


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next process of an island take its slot sooner."""
    for module in USERS:
        monkeypatch.setattr(module, "SILENT", 2.5)
