"""What a config field may hold: its declared type, the values that fit it, and the words for both."""

import difflib
import math
import tomllib
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from torchtitan_diloco.config.mistakes import InvalidValueError


def fits(rule: Meta, value: float) -> bool:
    return (
        (rule.ge is None or value >= rule.ge)
        and (rule.le is None or value <= rule.le)
        and (rule.gt is None or value > rule.gt)
        and (rule.lt is None or value < rule.lt)
    )


def bounds(rule: Meta) -> str:
    signs = {">=": rule.ge, ">": rule.gt, "<=": rule.le, "<": rule.lt}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None)


@dataclass(frozen=True)
class FieldSpec:
    """One setting: its dotted key, declared type and default."""

    key: str
    annotation: Any
    default: Any


def field_specs(section: type, prefix: str = "") -> Iterator[FieldSpec]:
    """Every setting of a section dataclass, nested sections included, in the order of declaration."""
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        key = f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            yield from field_specs(hints[field.name], prefix=f"{key}.")
        else:
            assert field.default is not MISSING, f"{key} needs a default"
            yield FieldSpec(key, hints[field.name], field.default)


def flat_settings(section: Any) -> dict[str, Any]:
    """The values of a section's settings by dotted key, nested sections included."""
    values = {}
    for spec in field_specs(type(section)):
        value = section
        for name in spec.key.split("."):
            value = getattr(value, name)
        values[spec.key] = value
    return values


def section_mistakes(section: Any, name: str) -> list[tuple[str, str]]:
    """What does not fit its field in a section that was made in Python, where nobody has looked: (key, reason)."""
    values, found = flat_settings(section), []
    for spec in field_specs(type(section)):
        try:
            convert(values[spec.key], spec.annotation)
        except InvalidValueError as error:
            found.append((f"{name}.{spec.key}", f"is {values[spec.key]!r}: {error}"))
    return found


def describe(annotation: Any) -> str:
    """The values a field takes, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join([describe(arguments[0]), *(bounds(rule) for rule in arguments[1:])])
    if origin is Literal:
        return " | ".join(arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(member) for member in arguments if member is not types.NoneType)
    if origin is tuple:
        return f"list of {describe(arguments[0])}"
    return {bool: "true | false", int: "integer", float: "number", str: "text"}[annotation]


def is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType) and types.NoneType in get_args(
        annotation
    )


def convert(value: Any, annotation: Any) -> Any:
    """The TOML value as the declared type; raises InvalidValueError with what would fit."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        converted = convert(value, arguments[0])
        for rule in arguments[1:]:
            if not fits(rule, converted):
                raise InvalidValueError(f"must be {bounds(rule)}")
        return converted
    if origin is Literal:
        return _convert_choice(value, arguments)
    if origin in (Union, types.UnionType):
        return _convert_union(value, annotation, arguments)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidValueError(f"must be a {describe(annotation)}, such as [1, 2]")
        return tuple(convert(item, arguments[0]) for item in value)
    return _convert_plain(value, annotation)


def _convert_choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    nearest = difflib.get_close_matches(str(value), choices, n=1)
    hint = f' (did you mean "{nearest[0]}"?)' if nearest else ""
    raise InvalidValueError(f"must be one of {', '.join(choices)}{hint}")


def _convert_union(value: Any, annotation: Any, members: tuple[Any, ...]) -> Any:
    if value is None and types.NoneType in members:
        return None
    reasons = []
    for member in members:
        if member is types.NoneType:
            continue
        try:
            return convert(value, member)
        except InvalidValueError as mistake:
            reasons.append(str(mistake))
    raise InvalidValueError(reasons[0] if len(reasons) == 1 else f"must be {describe(annotation)}")


def _convert_plain(value: Any, kind: type) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind is float and is_number and math.isfinite(value):
        return float(value)
    if kind is int and is_number and math.isfinite(value) and value == int(value):
        return int(value)  # a float such as 25e9 is an integer to a human
    raise InvalidValueError(f"must be {'an' if kind is int else 'a'} {_PLAIN_NAMES[kind]}")


_PLAIN_NAMES = {
    bool: "boolean, true or false",
    int: "integer",
    float: "number",
    str: 'text in quotes, "like this"',
}


def parse_text(text: str, annotation: Any) -> Any:
    """A command-line word as the TOML value that the field's type calls for."""
    if is_optional(annotation) and text == "none":
        return None
    if get_origin(annotation) is tuple and not text.lstrip().startswith("["):
        return [
            _parse_scalar(item.strip(), get_args(annotation)[0])
            for item in text.split(",")
            if item.strip()
        ]
    return _parse_scalar(text, annotation)


def _parse_scalar(text: str, annotation: Any) -> Any:
    if annotation is str or get_origin(annotation) is Literal:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # convert() then says what would fit
