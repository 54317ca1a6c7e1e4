"""The help of a training: the settings that matter most, those of a section, or all of them."""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from torchtitan_diloco.base.settings import choices_of, entries_of, nearest
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.loader import (
    DEFAULT_CONFIG,
    TYPES,
    find_config,
    load_config,
    shipped_configs,
)
from torchtitan_diloco.config.schema import flat_settings, format_value

MATTER_MOST = (
    "run.folder",
    "run.device",
    "model.flavor",
    "data.corpus",
    "data.tokenizer",
    "training.sequence_length",
    "training.batch_size",
    "training.global_batch_size",
    "training.steps",
    "training.tokens_per_parameter",
    "optimizer.lr",
    "lr_schedule.warmup",
    "parallel.fsdp",
    "diloco.method",
    "diloco.workers",
    "diloco.sync_every",
    "diloco.overlap.delay",
    "diloco.quantization.codec",
    "islands.join",
    "checkpoint.every_minutes",
)
"""Settings of the short help."""
DESCRIPTION = (
    "Train. The command line takes precedence over the TOML file of --config, and the file over "
    "the defaults below. Values of that file stand after those defaults that it changes."
)
CONFIG = (
    f"A TOML file, or the name of one in train_configs/: {', '.join(shipped_configs())}. "
    "A file with such a name: ./NAME."
)
PRINT_CONFIG = (
    "Print the settings that the run would use, its warnings, and what is missing to start it."
)
ALL = "all"
"""The topic of the help that has all settings."""
MANY = 5
"""Number of choices of a setting from which on the short help lists them in its text."""
WIDTH = "108"
"""Columns if there is no terminal: as wide as the docstrings of the settings."""


def print_help(words: Sequence[str], commands: Mapping[str, str]) -> bool:
    """Print the help if the words ask for it (`--help`, `--help SECTION`, `--help all`), with the
    values of the config that they name. Return whether they do.

    `commands`: the text of each command, for the short help.
    """
    topic = _word_after(("--help", "-h"), words)
    if topic is None:
        return False
    name = _word_after(("--config",), words) or DEFAULT_CONFIG
    sections = [section.name for section in fields(Config)]
    section = topic.partition(".")[0]  # of a setting
    if topic and section not in (ALL, *sections):
        raise UserError(
            f"--help {topic}: there is no such section{nearest(section, sections)}; give {ALL}, or "
            f"one of {', '.join(sections)}"
        )
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", WIDTH)
    if topic:
        _print_settings(sections if section == ALL else [section], _changes_of(name))
    else:
        print(_short_help(commands, _changes_of(name)), end="")
    return True


def _word_after(options: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the word after an option, which may be empty, or None without the option."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        option, _, value = word.partition("=")
        if option in options:
            return value or ("" if after.startswith("-") else after)
    return None


def _changes_of(config: str) -> dict[str, str]:
    """Return what a config sets to another value than the default, as a text such as
    `1b.toml: 30`."""
    name = find_config(config).name
    defaults = flat_settings(Config())
    return {
        key: f"{name}: {_shown(value)}"
        for key, value in flat_settings(load_config(config)).items()
        if value != defaults[key] and not key.startswith("run.")  # which say what the file is
    }


def _shown(value: Any) -> str:
    if isinstance(value, tuple | dict):
        return format_value(value)
    return "not set" if value in (None, "") else str(value)


def _short_help(commands: Mapping[str, str], changes: Mapping[str, str]) -> str:
    program = command_line("train")
    parser = argparse.ArgumentParser(
        usage=f"{program} [--config NAME_OR_PATH] [--section.key VALUE ...]",
        description=textwrap.fill(DESCRIPTION, shutil.get_terminal_size().columns - 2),
        epilog=f"All {len(TYPES)} settings: {program} --help {ALL}\n"
        f"Those of a section: {program} --help diloco",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # a command is never broken
        add_help=False,
    )
    config = f"{CONFIG} (default: {DEFAULT_CONFIG})"
    parser.add_argument("--config", metavar="NAME_OR_PATH", help=config)
    parser.add_argument("--print-config", action="store_true", help=PRINT_CONFIG)
    parser.add_argument(
        "--help",
        metavar=f"{ALL}|SECTION",
        nargs="?",
        help="Print this text, all settings, or those of a section.",
    )
    settings = parser.add_argument_group("settings")
    defaults = flat_settings(Config())
    for key in MATTER_MOST:
        metavar = _metavar(TYPES[key])
        text = _first_sentence(key)
        if metavar.count(",") >= MANY:
            choices = metavar.strip("{}").replace(",", ", ")
            text = f"{text} One of {choices}."
            metavar = "NAME"
        values = "; ".join([f"default: {_shown(defaults[key])}", *filter(None, [changes.get(key)])])
        text = f"{text} ({values})".replace("%", "%%")
        settings.add_argument(f"--{key}", metavar=metavar, help=text)
    usage = f"{command_line('COMMAND')} --help"
    subparsers = parser.add_subparsers(title="commands", description=usage, metavar="COMMAND")
    for name, text in commands.items():
        subparsers.add_parser(name, help=text)
    return parser.format_help()


def _first_sentence(key: str) -> str:
    """Return the first sentence of the docstring of a setting."""
    *sections, name = key.split(".")
    owner: Any = Config
    for section in sections:
        owner = get_type_hints(owner)[section]
    texts = {entry.arg_name: entry.description or "" for entry in parse_from_object(owner).params}
    sentence, *others = " ".join(texts[name].split()).split(". ")
    return f"{sentence}." if others else sentence


def _metavar(kind: Any) -> str:
    """Return the choices of a setting of this type, or the name of the type, such as INT."""
    if choices := choices_of(kind):
        return f"{{{','.join(choices)}}}"
    parts = get_args(kind)  # of `Annotated[int, ...]` and of `int | None`
    return _metavar(parts[0]) if parts else str(kind.__name__).upper()


def _as_shown(section: type, changes: Mapping[str, str], prefix: str = "") -> type:
    """Return a section for tyro to show. Settings that name entries of dicts are Literals, as it
    shows the choices of these only, and the changes of a config stand beside the defaults."""
    kinds = get_type_hints(section, include_extras=True)
    changed = list[tuple[str, Any, Any]]()
    for entry in fields(section):
        kind = kinds[entry.name]
        key = prefix + entry.name
        if isinstance(kind, type) and is_dataclass(kind):
            shown = _as_shown(kind, changes, f"{key}.")
            changed.append((entry.name, shown, field(default_factory=shown)))
            continue
        if entries_of(kind):
            choices: Any = Literal[*choices_of(kind)]
            kind = GenericAlias(tuple, (choices, ...)) if get_origin(kind) is tuple else choices
        if key in changes:
            kind = Annotated[kind, _beside_default(changes[key])]
        if kind is not kinds[entry.name]:
            default: Any = entry.default
            if entry.default_factory is not MISSING:
                default = field(default_factory=entry.default_factory)
            changed.append((entry.name, kind, default))
    documented = {"__doc__": section.__doc__}
    return make_dataclass(
        section.__name__, changed, bases=(section,), namespace=documented, frozen=True
    )


def _beside_default(change: str) -> Any:
    """Return what makes tyro show a text after the default of a setting."""
    import tyro

    return tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default}; {change})")


def _print_settings(sections: Sequence[str], changes: Mapping[str, str]) -> None:
    """Print all settings of some sections."""
    import tyro  # takes longer than all other imports

    kinds = get_type_hints(_as_shown(Config, changes), include_extras=True)
    config = Annotated[str, tyro.conf.arg(metavar="NAME_OR_PATH", help=CONFIG)]
    entries = [(name, kinds[name], field(default_factory=kinds[name])) for name in sections]
    command = make_dataclass("Settings", [*entries, ("config", config, DEFAULT_CONFIG)])
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def tables(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        """Show a list of tables, and a table of any values, as one value. tyro would omit both."""
        shown = {TYPES["data.phases"]: "TABLES", TYPES["optimizer.options"]: "TABLE"}
        if info.type not in shown:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=shown[info.type],
            instance_from_str=lambda _: (),
            is_instance=lambda value: isinstance(value, tuple | dict),
            str_from_instance=lambda value: [str(value if isinstance(value, dict) else [*value])],
        )

    with suppress(SystemExit):
        tyro.cli(
            command,
            prog=f"{command_line('train')} [--config NAME_OR_PATH] [--print-config]",
            description=DESCRIPTION,
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
            registry=registry,
        )
