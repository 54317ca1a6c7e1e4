"""Parts that a setting chooses by name, from dicts to which other modules may add their own.

A dict has facts about each part, but not the part itself, which may need PyTorch: a string
"module:attribute" says where it is, and `load` imports it when it is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is known about a part before it is built. A subclass has the facts of one kind."""

    build: str | Callable[..., Any]
    """What builds it: a class or function, or "module:attribute", which is imported when it is
    used."""
    reads: tuple[str, ...] = ()
    """Settings of its section that it reads, of those that not every part reads."""

    def load(self) -> Any:
        """Return what builds this part."""
        if not isinstance(self.build, str):
            return self.build
        module, _, attribute = self.build.partition(":")
        return getattr(import_module(module), attribute)


class OneOf:
    """Says that a setting is a name in a dict: `name: Annotated[str, OneOf(OPTIMIZERS)]`.

    The dict is read when a value is converted, so that names may be added to it until then.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts
