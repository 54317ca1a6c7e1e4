"""Names of the objects of a run, who may write them, and which of them are garbage.

| name | written by |
|---|---|
| `run/000000000123` | the syncer: decision 123, created once |
| `version/N-F-V`, `copy/N-F-V`, `outer/N-F-V` | the syncer, once decision N has announced it |
| `history/000012` | the syncer, created once |
| `island/NAME/NONCE` | that incarnation of the island NAME, which also replaces it |
| `part/NAME/NONCE-F-NUMBER` | the same |
| `found/NAME/NONCE`, `found/NAME/NONCE-F` | the same, with a login of an owner |
| `change/...` | a person with a login of an owner |
| `mirror/NAME/...` | the island NAME: mirrors of its checkpoints |

Where a store has logins, NAME is `LOGIN`, or `LOGIN.` and any other characters, so a site may run
several islands with one login. All objects that an island writes are under its name, so permissions
by prefix suffice. The name of a part is derived from the name of the note that lists it, and is
never read from a note. Contents of any size have one name here; a store may hold them in chunks.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

RUN = "run/"
HISTORY = "history/"
ISLAND = "island/"
PART = "part/"
FOUND = "found/"
CHANGE = "change/"
MIRROR = "mirror/"
OWNER = "owner"
"""Login that may write all names, which founds and changes runs."""
VERSION = "version"
COPY = "copy"
OUTER = "outer"
DIGITS = 12
"""Digits of numbers in names: enough for 30,000 years of decisions."""
LARGEST = 10**DIGITS - 1
"""Largest number in a name."""
HISTORY_DIGITS = 6
LOGIN_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,39}"
NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}"
INCARNATION_PATTERN = rf"{NAME_PATTERN}/[0-9a-f]{{4,16}}"

_RUN = re.compile(rf"run/([0-9]{{{DIGITS}}})")
_OBJECT = re.compile(r"(version|copy|outer)/([0-9]{1,12})-([0-9]{1,6})-([0-9]{1,12})")
_OF_INCARNATION = re.compile(
    rf"(?:island/({INCARNATION_PATTERN})"
    rf"|part/({INCARNATION_PATTERN})-[0-9]{{1,6}}-[0-9]{{1,16}}"
    rf"|found/({INCARNATION_PATTERN})(?:-[0-9]{{1,6}})?)"
)


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
    match = _RUN.fullmatch(name)
    return int(match[1]) if match else None


def history_name(number: int) -> str:
    return f"{HISTORY}{number:0{HISTORY_DIGITS}d}"


def part_name(incarnation: str, fragment: int, number: int) -> str:
    return f"{PART}{incarnation}-{fragment}-{number}"


def founding_name(incarnation: str, fragment: int | None = None) -> str:
    """Return the name of a founding, or of its copy of a fragment."""
    return f"{FOUND}{incarnation}" if fragment is None else f"{FOUND}{incarnation}-{fragment}"


def object_of(name: str) -> Object | None:
    match = _OBJECT.fullmatch(name)
    return Object(match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def incarnation_of(name: str) -> str | None:
    """Return the incarnation of an island, NAME/NONCE, to which an object belongs."""
    match = _OF_INCARNATION.fullmatch(name)
    return next(filter(None, match.groups())) if match else None


def name_of(incarnation: str) -> str:
    """Return the name of an island."""
    return incarnation.partition("/")[0]


def login_of(incarnation: str) -> str:
    """Return the login of an island, which contains no dot."""
    return name_of(incarnation).partition(".")[0]


def site_prefixes(login: str) -> list[str]:
    """Return the prefixes below which the login of a site writes: those of all its islands."""
    names = (f"{login}/", f"{login}.")
    return [f"{kind}{name}" for kind in (ISLAND, PART, MIRROR) for name in names]


def is_garbage(name: str, number: int, known: Collection[str]) -> bool:
    """Return whether an object of a syncer is garbage permanently, for every process.

    `number`: number of a decision that counts. `known`: names of all objects that it names or
    announces. An object is announced before its upload starts, by the decision whose number it has,
    which exists once. Later decisions can therefore only name objects that this one still names.
    """
    stored = object_of(name)
    return stored is not None and stored.number <= number and name not in known
