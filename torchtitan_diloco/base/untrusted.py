"""Decode what other processes have written, and may have written wrongly."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(raw: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Return a value of this type. Raise a ValueError for anything else.

    A value that is nested too deeply is a RecursionError of msgspec, which nobody expects.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
