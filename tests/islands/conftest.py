"""Fixtures: shorter timeouts."""

import pytest

from torchtitan_diloco.islands.rules import presence


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next process of an island take its slot sooner."""
    monkeypatch.setattr(presence, "SILENT", 2.5)
