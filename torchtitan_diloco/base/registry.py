"""Dicts of what a setting chooses by name, such as optimizers, to which other modules add theirs.

An entry has facts about what it names, but not the thing itself, which may need PyTorch: a string
"module:attribute" says where it is, and `load` imports it when it is used.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from torchtitan_diloco.base.user import UserError, cause_of


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known about a choice before it is imported. A subclass has the facts of one kind."""

    build: str | Callable[..., Any]
    """The class or function, or "module:attribute", which is imported when it is used."""
    reads: tuple[str, ...] = ()
    """Settings of its section that it reads, of those that not every choice reads."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its own options, which `options` of its section may set, with their defaults."""
    takes: str = ""
    """What follows its name and a colon in the setting, such as PROJECT. Empty: nothing."""
    package: str = ""
    """Package that it imports, if that is not always installed."""
    extra: str = ""
    """Extra of torchtitan_diloco that installs it."""

    def load(self) -> Any:
        """Return the class or function."""
        if not isinstance(self.build, str):
            return self.build
        module, _, attribute = self.build.partition(":")
        return getattr(import_module(module), attribute)


E = TypeVar("E", bound=Entry)
IMPORTS_OPTION = "--imports"
_imported: dict[str, None] = {}
"""Modules that `import_modules` has imported, in order."""


def find(entries: Mapping[str, E], value: str) -> tuple[E, str] | None:
    """Return the entry that a value names, and the text after the name and a colon, which only
    some have. Return None if it names none."""
    name, _, text = value.partition(":")
    entry = entries.get(name)
    if entry is not None and not isinstance(entry, Entry):
        raise UserError(f"{name} was added as {entry!r}: add an Entry, such as Entry(build=...)")
    if entry is None or bool(entry.takes) != bool(text) or (":" in value and not text):
        return None
    return entry, text


class OneOf:
    """Says that a setting names an entry of a dict: `name: Annotated[str, OneOf(OPTIMIZERS)]`.

    The dict is read when a value is converted, so that entries may be added to it until then.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries

    def choices(self) -> list[str]:
        """Return the names, with what follows them."""
        return [
            f"{name}:{takes}" if (takes := getattr(entry, "takes", "")) else name
            for name, entry in self.entries.items()
        ]


def add_imports_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --imports of a command that reads no settings, which imports modules."""

    def imported(name: str) -> str:
        try:
            import_modules([name])
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return name

    text = "import a module of your own, as run.imports does; may be given several times"
    parser.add_argument(
        IMPORTS_OPTION, action="append", default=[], type=imported, metavar="MODULE", help=text
    )


def imports_words() -> list[str]:
    """Return the words of a command that import in a child what this process has imported."""
    return [word for name in _imported for word in (IMPORTS_OPTION, name)]


def import_modules(names: Iterable[str]) -> None:
    """Import modules of the current folder, or installed ones, which add entries to dicts."""
    folder = os.getcwd()  # noqa: PTH109
    if not {"", folder} & set(sys.path):  # it is there if a module was started
        sys.path.insert(0, folder)
    for name in names:
        if not name:
            raise UserError("the name of a module is empty: give one, such as mine for mine.py")
        try:
            import_module(name)
            _imported[name] = None
        except (Exception, SystemExit) as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            is_in_it = not last.filename.startswith("<frozen")  # and not in importlib
            where = f", {last.filename}:{last.lineno}" if is_in_it else ""
            raise UserError(
                f"{name} cannot be imported ({type(error).__name__}: {cause_of(error)}{where}): "
                "correct it, or give modules of the current folder or installed ones, such as mine "
                "for mine.py"
            ) from error
