"""Mistakes in a configuration, collected so that the user sees all of them at once."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """One thing wrong: where it stands, what it is, why, and what to do."""

    origin: str
    """File, `command line` or `default`."""
    key: str
    value: Any
    reason: str
    """What is wrong with the value, and the remedy."""

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {show(self.value)}"
        return f"{self.origin}: {self.key}{value}: {self.reason}"


class ConfigError(ValueError):
    """The configuration cannot be used; the message names every mistake in it."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"{count} in the configuration:", *map(str, mistakes)]))


class InvalidValueError(ValueError):
    """A value does not fit its field; the message says what would."""


def show(value: Any) -> str:
    """The value as it would stand in TOML, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
