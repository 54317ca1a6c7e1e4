"""Decode what other processes have written, and may have written wrongly."""

import threading
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_building = threading.Lock()
"""msgspec learns about a type when it is first used, which crashes in two threads at once."""


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@overload
def decode_json(raw: bytes | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_json(raw: bytes | msgspec.Raw, kind: Any) -> Any: ...


def decode_json(raw: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return a value of this type, or union of types. Raise a ValueError for anything else.

    A value that is nested too deeply is a RecursionError of msgspec, which nobody expects.
    """
    with _building:
        decoder = _decoder(kind)
    try:
        return decoder.decode(raw)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
