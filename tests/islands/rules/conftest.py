"""Fixtures of the rules."""

import pytest

from tests.islands.rules.hand import Hand, build_hand


@pytest.fixture
def hand() -> Hand:
    return build_hand()
