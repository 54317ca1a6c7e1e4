import argparse

import pytest

from torchtitan_diloco.data.quantities import parse_quantity


@pytest.mark.parametrize(
    "text", ["1000000", "1_000_000", "1e6", "1M", "1MB", "1mb", "1000K", "0.001G"]
)
def test_a_million(text: str) -> None:
    assert parse_quantity(text) == 1_000_000


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1X", "1 000"])
def test_no_quantity(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number"):
        parse_quantity(text)
