"""Names of the objects of a run, and which of them are garbage.

| name | written by |
|---|---|
| `run/000000000123` | the syncer: decision 123, created once |
| `version/N-F-V`, `copy/N-F-V`, `outer/N-F-V` | the syncer, once decision N has announced it |
| `island/LOGIN/NONCE` | that incarnation of the island LOGIN |
| `part/LOGIN/NONCE-F-NUMBER-CHUNK`, `part/LOGIN/NONCE-F-founds-CHUNK` | the same |
| `change/...` | a person |

All objects that an island writes are under its login, so permissions by prefix suffice. The name of
a part is derived from the name of the note that lists it, and is never read from a note.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

RUN, ISLAND, PART, CHANGE = "run/", "island/", "part/", "change/"
VERSION, COPY, OUTER = "version", "copy", "outer"
DIGITS = 12
LARGEST = 10**DIGITS - 1
"""Digits of numbers in names: enough for 30,000 years of decisions."""
LOGIN_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}"
INCARNATION_PATTERN = rf"{LOGIN_PATTERN}/[0-9a-f]{{4,16}}"

_RUN = re.compile(rf"run/([0-9]{{{DIGITS}}})")
_OBJECT = re.compile(r"(version|copy|outer)/([0-9]{1,12})-([0-9]{1,6})-([0-9]{1,12})")
_ISLAND = re.compile(rf"island/({INCARNATION_PATTERN})")
_PART = re.compile(rf"part/({INCARNATION_PATTERN})-[0-9]{{1,6}}-(?:[0-9]{{1,16}}|founds)-[0-9]+")


class Object(NamedTuple):
    """An object of the syncer.

    Because decision `number` was created once, the name has one writer.
    """

    kind: str
    number: int  # of the decision that announces it
    fragment: int
    version: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.number}-{self.fragment}-{self.version}"


def run_name(number: int) -> str:
    return f"{RUN}{max(0, number):0{DIGITS}d}"


def run_number(name: str) -> int | None:
    """Return the number of a decision, or None for any other name."""
    found = _RUN.fullmatch(name)
    return int(found[1]) if found else None


def object_of(name: str) -> Object | None:
    found = _OBJECT.fullmatch(name)
    return Object(found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


def incarnation_of(name: str) -> str | None:
    """Return the incarnation of an island, LOGIN/NONCE, to which a note or a part belongs."""
    found = _ISLAND.fullmatch(name) or _PART.fullmatch(name)
    return found[1] if found else None


def login_of(incarnation: str) -> str:
    return incarnation.partition("/")[0]


def part_names(incarnation: str, fragment: int, number: int | str, chunks: int) -> list[str]:
    prefix = f"{PART}{incarnation}-{fragment}-{number}"
    return [f"{prefix}-{chunk}" for chunk in range(chunks)]


def is_garbage(name: str, number: int, known: Collection[str]) -> bool:
    """Return whether an object of a syncer is garbage permanently, for every process.

    `number`: number of a decision that counts. `known`: names of all objects that it names or
    announces. An object is announced before its upload starts, by the decision whose number it has,
    which exists once. Later decisions can therefore only name objects that this one still names.
    """
    found = object_of(name)
    return found is not None and found.number <= number and name not in known
