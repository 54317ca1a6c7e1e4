"""Fixtures: shorter timeouts."""

import pytest


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next process of an island take its slot sooner."""
    monkeypatch.setattr("torchtitan_diloco.islands.rules.presence.SILENT", 2.5)
