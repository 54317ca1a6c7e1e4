"""Decode what other processes have written, and may have written wrongly."""

from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")


@overload
def decode_json(raw: bytes | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_json(raw: bytes | msgspec.Raw, kind: Any) -> Any: ...


def decode_json(raw: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return a value of this type, or union of types. Raise a ValueError for anything else.

    A value that is nested too deeply is a RecursionError of msgspec, which nobody expects.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
