"""Errors of collectives in words for a user."""

import pytest

from torchtitan_diloco.utils import cause_of


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80. This means that. GLHF!",
            "Connection closed by peer [127.0.0.1]:80",
        ),
        ("Timed out waiting 4000ms. Try again\nand more", "Timed out waiting 4000ms. Try again"),
        ("", "RuntimeError"),
    ],
)
def test_the_cause_without_what_is_for_gloos_authors(said: str, told: str) -> None:
    assert cause_of(RuntimeError(said)) == told
