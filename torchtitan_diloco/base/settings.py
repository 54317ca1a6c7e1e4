"""Types and values of settings by dotted key, and their validation by msgspec."""

import difflib
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.registry import Entry, OneOf, find
from torchtitan_diloco.base.user import NOT_UTF8, UserError, is_utf8

NAMES = {
    "`int`": "a whole number",
    "`int | null`": 'a whole number, or "none"',
    "`float`": "a number",
    "`float | null`": 'a number, or "none"',
    "`bool`": "true or false",
    "`bool | null`": 'true or false, or "none"',
    "`str`": "text, in quotes",
}
TOO_LARGE = "expected a number that fits in 64 bits"
EXPONENTS = {"K": 3, "M": 6, "G": 9, "B": 9, "T": 12}
WITH_SUFFIX = re.compile(rf"(\d*\.?\d+)\s*([{''.join(EXPONENTS)}])", re.IGNORECASE)
WITH_SEPARATORS = re.compile(r"\d{1,3}([_, ]\d{3})+")
WITH_EXPONENT = re.compile(r"\d+(\.\d+)?e\+?\d{1,2}", re.IGNORECASE)

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
MOST_SECONDS = 365 * 24 * 3600
"""Longest timeout: gloo and the clocks of threads count nanoseconds in 64 bits."""
Seconds = Annotated[int, Meta(ge=1, le=MOST_SECONDS)]
MOST_WORKERS = 2**20
"""Largest number of workers, islands, or ranks of a worker, so that their products fit in 64
bits."""
Workers = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
NoneOrWorkers = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Length = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, lt=1)]
"""Length of a part of a run: steps, or a share of the run if below 1."""


def steps_of(length: float, total_steps: int) -> int:
    """Return a length in steps, in a run of `total_steps` steps."""
    return round(length * total_steps) if length < 1 else int(length)


Mistakes = Iterator[tuple[str, str]]
"""Pairs of the dotted key of a setting and what is wrong with it."""


class Section:
    """Base class of config dataclasses, which refuses invalid values."""

    def __post_init__(self) -> None:
        """Convert values to the types of the settings, such as 1e2 to 100."""
        kind: type = type(self)
        kinds = _types(kind)
        wrong = []
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            try:
                object.__setattr__(self, entry.name, convert(value, kinds[entry.name]))
            except ValueError as error:
                shown = f" = {value!r}" if entry.repr else ""
                wrong.append(f"{type(self).__name__}.{entry.name}{shown}: {error}")
        if wrong:
            raise UserError("\n".join(wrong))


@cache
def _types(section: Hashable) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def assemble(section: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a dataclass, nested sections included, from values by dotted key. `convert` has
    returned them, so they are not converted again. What is not given has its default."""
    built: Any = object.__new__(section)
    kinds = _types(section)
    for entry in fields(section):
        key = prefix + entry.name
        if is_dataclass(kinds[entry.name]):
            value = assemble(kinds[entry.name], values, f"{key}.")
        elif key in values:
            value = values[key]
        elif entry.default_factory is MISSING:
            value = entry.default
        else:
            value = entry.default_factory()
        object.__setattr__(built, entry.name, value)
    return built


def setting_types(section: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of each setting of a dataclass by dotted key, nested sections included."""
    kinds: dict[str, Any] = {}
    for name, kind in _types(section).items():
        if isinstance(kind, type) and is_dataclass(kind):
            kinds |= setting_types(kind, f"{prefix}{name}.")
        else:
            kinds[prefix + name] = kind
    return kinds


def flat_settings(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of each setting of a dataclass by dotted key, nested sections included."""
    tables = [key for key, kind in setting_types(type(section)).items() if is_table(kind)]
    return flatten(asdict(section), prefix, whole=[prefix + key for key in tables])


def is_table(kind: Any) -> bool:
    """Return whether a setting is itself a table, with names that a user chooses."""
    return get_origin(kind) is dict


def flatten(
    table: Mapping[str, Any], prefix: str = "", *, whole: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of nested tables by dotted key. `whole`: keys of tables that are values."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in whole:
            values |= flatten(value, f"{key}.", whole=whole)
        else:
            values[key] = value
    return values


def convert(value: Any, kind: Any, *, is_word: bool = False) -> Any:
    """Convert `value` to the type of a setting, or raise a ValueError that says what is expected.

    Integers may be whole floats, such as 25e9. A word of a command line may be a number.
    """
    if kind == Length:
        return _convert_length(value, is_word=is_word)
    try:  # without `strict`, msgspec converts text and whole floats
        converted = msgspec.convert(value, kind, strict=not (is_word or isinstance(value, float)))
    except msgspec.ValidationError as error:
        if "out of range" in str(error):
            raise UserError(TOO_LARGE) from None
        if choices_of(kind):
            raise _not_a_choice(value, kind) from None
        expected = str(error).partition(", got")[0].removeprefix("Expected ")
        words = NAMES | {"`object`": f"{getattr(kind, '__name__', '')}(...)"}
        for name, text in words.items():
            expected = expected.replace(name, text)
        raise UserError(f"expected {expected}{_number_meant(value, expected)}") from None
    if (named := entries_of(kind)) and isinstance(converted, str) and not find(named, converted):
        raise _not_a_choice(value, kind)
    if isinstance(converted, str) and not is_utf8(converted):
        raise UserError(NOT_UTF8)
    if isinstance(converted, float) and math.isnan(converted):
        raise UserError("expected a number, which nan is not")
    if isinstance(converted, int | float) and not abs(converted) < 2**63:
        raise UserError(TOO_LARGE)
    return converted


def choices_of(kind: Any) -> list[str]:
    """Return the texts that a setting of this type may be, or an empty list if it may be any."""
    if isinstance(kind, OneOf):
        return kind.choices()
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in choices_of(part)]


def entries_of(kind: Any) -> Mapping[str, Entry]:
    """Return the entries that a setting of this type may name, or an empty dict."""
    if isinstance(kind, OneOf):
        return kind.entries
    return next(filter(None, map(entries_of, get_args(kind))), {})


def options_of(entry: Entry, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an entry: those given, with the types of the defaults, and the defaults
    of the others. Raise a UserError that begins like "has no option"."""
    for name in given:
        if name not in entry.options:
            hint = nearest(name, entry.options)
            known = f"; it has {', '.join(entry.options)}" if entry.options else ": remove it"
            raise UserError(f"has no option {name}{hint or known}")
    options = dict(entry.options)
    for name, value in given.items():
        try:
            options[name] = convert(value, type(options[name]), is_word=isinstance(value, str))
        except ValueError as error:
            raise UserError(f"has the option {name} = {value!r}: {error}") from None
    return options


def _not_a_choice(value: Any, kind: Any) -> UserError:
    choices = choices_of(kind)
    number = "a number, or " if _may_be_number(kind) else ""  # 0.1 | "1/steps"
    hint = nearest(str(value), choices)
    return UserError(f"expected {number}one of {', '.join(choices)}{hint}")


def _may_be_number(kind: Any) -> bool:
    return kind in (int, float) or any(map(_may_be_number, get_args(kind)))


def _number_meant(value: Any, expected: str) -> str:
    """Return a hint about a number with a suffix, separators or an exponent, such as `1M`, `1,000`
    or `2e16`, or an empty string."""
    if "<=" in expected or not expected.startswith(("a whole number", "a number")):
        return ""
    if isinstance(value, float) and value.is_integer():
        return _in_digits(Decimal(value))
    if not isinstance(value, str):
        return ""
    if match := WITH_SUFFIX.fullmatch(value):
        return f"; did you mean {match[1]}e{EXPONENTS[match[2].upper()]}?"
    if WITH_SEPARATORS.fullmatch(value):
        return f"; did you mean {re.sub('[_, ]', '', value)}?"
    return _in_digits(Decimal(value)) if WITH_EXPONENT.fullmatch(value) else ""


def _in_digits(number: Decimal) -> str:
    """Return the remedy for a whole number that is too large to be exact as a float, or an empty
    string."""
    if number >= 2**63:
        return "; it must fit in 64 bits"
    if number < 2**53 or number != int(number):
        return ""
    return f": write it in digits, such as {int(number)}"


def _convert_length(value: Any, *, is_word: bool) -> int | float:
    for kind in get_args(Length):
        try:
            length: int | float = convert(value, kind, is_word=is_word)
        except ValueError:
            continue
        return length
    raise UserError("expected a whole number of steps of at least 0, or a share of the run below 1")


def nearest(key: str, known: Iterable[str]) -> str:
    """Return a hint that names the known key most similar to an unknown one, or an empty string."""
    known = list(known)
    last_word = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == last_word]
    for candidates, cutoff in ((known, 0.8), (same_name, 0.0), (known, 0.67)):
        if matches := difflib.get_close_matches(key, candidates, n=1, cutoff=cutoff):
            return f"; did you mean {matches[0]}?"
    return ""


def check_class(section: object, key: str, kind: type[Section]) -> None:
    """Raise a TypeError if an argument is not a section of this class."""
    if not isinstance(section, kind):
        raise TypeError(f"{key}: must be {kind.__name__}(...), not {described_class(section)}")


def described_class(argument: object) -> str:
    """Describe what was passed instead of an instance of a class: its type, or which class."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    return str(type(argument))


def raise_mistakes(mistakes: Iterable[tuple[str, str]], **sections: Section) -> None:
    """Raise a ValueError that lists the mistakes with the values of the settings, if there are
    any."""
    values: dict[str, Any] = {}
    for prefix, section in sections.items():
        values |= flat_settings(section, f"{prefix}.")
    shown = {key: f" = {value!r}" for key, value in values.items() if value != ""}
    if lines := [f"{key}{shown.get(key, '')}: {reason}" for key, reason in mistakes]:
        raise UserError("\n".join(lines))
