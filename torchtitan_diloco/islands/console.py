"""Lines that commands print about what happens."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

Say: TypeAlias = Callable[[str], object]
"""Receives a line."""
say = partial(print, flush=True)
"""Print a line at once."""
