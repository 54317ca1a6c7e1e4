"""Names of objects, checked in one place."""

import re

from torchtitan_diloco.store.errors import StoreError

MOST_SEGMENTS = 6
MOST_CHARACTERS = 300
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,149}"
_NAME = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")
_RULE = (
    f"at most {MOST_SEGMENTS} segments joined by '/', each of at most 150 "
    "characters from A-Z, a-z, 0-9, '_', '.' and '-', starting with a letter, a "
    "digit or '_'"
)


def check_name(name: str) -> str:
    """Return the name of an object, or raise a StoreError.

    No segment starts with a dot: this excludes `..`, and backends use such names for their files.
    """
    if not is_name(name):
        raise StoreError(f"{name[:80]!r} is not a valid name of an object: a name has {_RULE}")
    return name


def check_prefix(prefix: str) -> str:
    """Return a prefix of names, which may be empty, or raise a StoreError."""
    if not _PREFIX.fullmatch(prefix) or not _is_short(prefix):
        raise StoreError(f"{prefix[:80]!r} is not a valid prefix of a name: a name has {_RULE}")
    return prefix


def is_name(name: str) -> bool:
    """Return whether an object may have this name."""
    return _NAME.fullmatch(name) is not None and _is_short(name)


def is_segment(text: str) -> bool:
    return re.fullmatch(_SEGMENT, text) is not None


def _is_short(name: str) -> bool:
    return len(name) <= MOST_CHARACTERS and name.count("/") < MOST_SEGMENTS
