"""Types and values of settings by dotted key, and their validation by msgspec."""

import difflib
import math
import re
import types
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import msgspec

SECRET = "islands.join"
"""Setting that contains a password, which errors do not show."""


class Section:
    """Base class of config dataclasses. Suggests the right name for an unknown keyword."""

    def __new__(cls, *_: object, **settings: object) -> Self:
        own = {entry.name: entry.name for entry in fields(cls)}  # type: ignore[arg-type]
        for name in (one for one in settings if one not in own):
            known = {key.rpartition(".")[2]: key for key in setting_types(cls)} | own
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {known[nearest[0]]}?" if nearest else ""
            raise TypeError(f"{cls.__name__} has no setting {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Convert between integers and whole floats as the settings are typed."""
        kinds = setting_types(type(self))
        for name, value in vars(self).items():
            if type(value) in (int, float) and name in kinds:
                with suppress(ValueError):  # field_mistakes reports it
                    object.__setattr__(self, name, convert(value, kinds[name]))


def setting_types(section: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of each setting of a dataclass by dotted key, nested sections included."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(section, include_extras=True).items():
        is_section = isinstance(kind, type) and is_dataclass(kind)
        found |= setting_types(kind, f"{prefix}{name}.") if is_section else {prefix + name: kind}
    return found


def flat_settings(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of each setting of a dataclass by dotted key, nested sections included."""
    found: dict[str, Any] = {}
    for entry in fields(section):
        value, key = getattr(section, entry.name), prefix + entry.name
        is_section = is_dataclass(value) and not isinstance(value, type)
        found |= flat_settings(value, f"{key}.") if is_section else {key: value}
    return found


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to the type of a setting, or raise a ValueError that says what is allowed.

    Integers may be given as floats, such as 25e9. NaN, infinity and integers that do not fit in 64
    bits are errors.
    """
    candidates = [value]
    if isinstance(value, float):
        candidates = [float(value)] if math.isfinite(value) else []
        candidates += [int(value)] if value.is_integer() else []
    for candidate in candidates:
        try:
            converted = msgspec.convert(candidate, kind)
        except msgspec.ValidationError:
            continue
        if isinstance(converted, int) and converted >= 2**63:
            raise ValueError("is too large: it must fit in 64 bits")
        return converted
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    nearest = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {nearest[0]}?)" if nearest else ", in quotes" if kind is str else ""
    raise ValueError(f"must be {describe(kind)}{hint}")


def describe(kind: Any) -> str:
    """Describe the allowed values of a type, such as "an integer >= 1"."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rule = arguments[1]
        signs = {">=": rule.ge, ">": rule.gt, "<=": rule.le, "<": rule.lt}
        bounds = [f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None]
        return f"{describe(arguments[0])} {' and '.join(bounds)}"
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in arguments if member is not type(None))
    if origin is tuple:
        return "a list of " + re.sub(r"^an? (\w+)", r"\1s", describe(arguments[0]))
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]


def field_mistakes(section: Any, prefix: str, kind: type[Section]) -> list[tuple[str, str]]:
    """Check the values of a section built in Python and return (key, reason) pairs."""
    if not isinstance(section, kind):
        given = f"the class {section.__name__}" if isinstance(section, type) else type(section)
        raise TypeError(f"{prefix}: must be {kind.__name__}(...), not {given}")
    kinds, found = setting_types(type(section)), []
    for key, value in flat_settings(section).items():
        try:
            convert(value, kinds[key])
        except KeyError:
            section_of = get_type_hints(type(section)).get(key, Section)
            found.append((f"{prefix}.{key}", f"must be {section_of.__name__}(...)"))
        except ValueError as error:
            found.append((f"{prefix}.{key}", str(error)))
    return found


def raise_mistakes(mistakes: Iterable[tuple[str, str]], **sections: Section) -> None:
    """Raise a ValueError that lists the mistakes with the values of settings, if any."""
    values: dict[str, Any] = {}
    for prefix, section in sections.items():
        values |= flat_settings(section, f"{prefix}.")
    values.pop(SECRET, None)
    shown = {key: f" = {value!r}" for key, value in values.items() if value != ""}
    if lines := [f"{key}{shown.get(key, '')}: {reason}" for key, reason in mistakes]:
        raise ValueError("\n".join(lines))
