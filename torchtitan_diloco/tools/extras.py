"""Packages that only some commands need: how to install them here."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """With the Python that runs, from the checkout it runs from."""
    return f"{sys.executable} -m pip install -e '{REPOSITORY}[{extra}]'"
