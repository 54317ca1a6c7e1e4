"""A setting may be a name in a dict of parts, to which others add."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from torchtitan_diloco.base.registry import Entry, OneOf
from torchtitan_diloco.base.settings import Section, choices_of, setting_types

SHAPES = {"round": Entry(build="fractions:Fraction"), "square": Entry(build=str)}


@dataclass(frozen=True)
class Shape(Section):
    name: Annotated[str, OneOf(SHAPES)] = "round"
    other: Annotated[str, OneOf(SHAPES)] | None = None


def test_an_entry_is_a_module_and_an_attribute_or_given_itself() -> None:
    from fractions import Fraction

    assert SHAPES["round"].load() is Fraction
    assert SHAPES["square"].load() is str


@pytest.mark.parametrize("name", ["name", "other"])
def test_only_names_of_the_dict_are_taken_also_those_that_were_added(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(Shape(**{name: "square"}), name) == "square"
    for wrong in ("squared", 3):
        with pytest.raises(ValueError, match=f"^Shape.{name} = .*: expected one of round, square"):
            Shape(**{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"square; did you mean square\?$"):
        Shape(**{name: "squared"})
    monkeypatch.setitem(SHAPES, "squared", Entry(build=str))
    assert getattr(Shape(**{name: "squared"}), name) == "squared"
    assert choices_of(setting_types(Shape)[name]) == ["round", "square", "squared"]
