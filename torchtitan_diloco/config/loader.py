"""TOML files and command line to Config, and back to TOML.

Precedence: command line > TOML file > the files that it extends > defaults.
"""

import argparse
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import msgspec
import tomli
import tomli_w

from torchtitan_diloco.config.checks import RUN_LENGTH, config_mistakes
from torchtitan_diloco.config.schema import Config, flat_settings, format_value
from torchtitan_diloco.diloco.fields import SECRET, convert, setting_types
from torchtitan_diloco.utils import command_line

CONFIGS_FOLDER = Path(__file__).parents[1] / "train_configs"
DEFAULT_CONFIG = "demo"
COMMAND_LINE = "command line"
TYPES = setting_types(Config)
SECTIONS = {key.rpartition(".")[0] for key in TYPES}
REMOVED = {
    "diloco.link.backend": ("gloo", "workers always exchange over gloo"),
    "diloco.quantization.rounding": ("nearest", "values are rounded to nearest"),
    "diloco.quantization.error_feedback": (
        False,
        "topk keeps what it has not sent (residual_decay), others never do",
    ),
    "diloco.quantization.gather_codec": ("same", "means travel in diloco.quantization.codec"),
    "diloco.outer_optimizer.beta2": (0.99, "the outer optimizer adam was removed"),
    "diloco.outer_optimizer.epsilon": (1e-8, "the outer optimizer adam was removed"),
    "diloco.outer_optimizer.warmup_rounds": (0, "the outer learning rate is constant"),
    "diloco.outer_optimizer.decay": ("constant", "the outer learning rate is constant"),
    "diloco.outer_optimizer.decay_rounds": (0, "the outer learning rate is constant"),
    "diloco.outer_optimizer.floor": (0.0, "the outer learning rate is constant"),
    "checkpoint.new_workers": ("fresh", "the inner optimizer of new workers starts fresh"),
}
"""Keys of earlier versions: the value without effect, which is still accepted because the
config.toml of an old run has all keys, and what applies now."""
REMOVED_VALUES = {"adam", "sign_momentum", "balanced", "clusters"}


class ConfigError(ValueError):
    """Error that lists all mistakes in a configuration."""

    def __init__(self, mistakes: list[str]) -> None:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"{count} in the configuration:", *mistakes]))


class Setting(NamedTuple):
    """Valid value of a setting, and where it was given."""

    value: Any
    origin: str


def load_config(name_or_path: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Load a TOML file (a path, or a name in train_configs/) with command-line settings on top."""
    mistakes: list[str] = []
    path = find_config(name_or_path)
    below = _read_file(path, mistakes)
    words = {key: _parse_word(text, TYPES.get(key)) for key, text in (overrides or {}).items()}
    settings = _overlay(below, _valid_settings(words, COMMAND_LINE, mistakes))
    if "run.name" not in settings or not settings["run.name"].value:
        settings["run.name"] = Setting(path.stem, "default")
    config = _build(settings)
    if not mistakes:  # a wrong value was replaced by the default, which could be a second mistake
        for key, reason in config_mistakes(config):
            origin = settings[key].origin if key in settings else "default"
            mistakes.append(_mistake(origin, key, flat_settings(config)[key], reason))
    if mistakes:
        raise ConfigError(mistakes)
    return config


def parse_config(toml_text: str, origin: str) -> Config:
    """Parse the output of `to_toml`. Missing settings have their defaults."""
    mistakes: list[str] = []
    settings = _valid_settings(_parse_toml(toml_text, origin), origin, mistakes)
    if mistakes:
        raise ConfigError(mistakes)
    return _build(settings)


def to_toml(config: Config) -> str:
    """Return all settings as TOML, including defaults, except those that are None."""
    return tomli_w.dumps(
        asdict(config, dict_factory=lambda pairs: {k: v for k, v in pairs if v is not None})
    )


def from_command_line(words: list[str]) -> Config | None:
    """Load the configuration of a command line, or print what was asked for and return None."""
    flags = {"--help", "-h", "--print-config"}.intersection(words)
    if flags & {"--help", "-h"}:
        from torchtitan_diloco.config.reference import help_text  # not needed to train

        print(help_text(shipped_configs()))
        return None
    settings: dict[str, str] = {}
    mistakes: list[str] = []
    remaining = [word for word in words if word not in flags]
    while remaining:
        word = remaining.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            mistakes.append(f"{COMMAND_LINE}: {word}: settings look like --section.key VALUE")
        elif equals:
            settings[key] = value
        elif remaining and not remaining[0].startswith("--"):
            settings[key] = remaining.pop(0)
        else:
            mistakes.append(f"{COMMAND_LINE}: {word}: needs a value: {word} VALUE")
    if mistakes:
        raise ConfigError(mistakes)
    config = load_config(settings.pop("config", DEFAULT_CONFIG), settings)
    if flags:
        print(to_toml(config), end="")
        return None
    return config


class OptionParser(argparse.ArgumentParser):
    """Parser of options and possibly settings (`--section.key`). Mistakes raise a ValueError."""

    takes_settings = True

    def __init__(self, **about: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**about, formatter_class=form, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Return the options and the words of settings."""
        options, words = super().parse_known_args(args, namespace)
        known = [name for action in self._actions for name in action.option_strings]
        for name in (word.partition("=")[0] for word in words if word.startswith("--")):
            is_setting = "." in name or name in ("--config", "--print-config")
            if not (is_setting and self.takes_settings):
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all options"
                self.error(f"{name} is unknown: {hint}")
        return options, words

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def find_config(name_or_path: str, child: Path | None = None) -> Path:
    """Find a file by its path or its name in train_configs/ (`1b`, `1b.toml`).

    The path in `extends` of a file `child` is relative to the folder of `child`.
    """
    given = Path(name_or_path).expanduser()
    candidates = [given if child is None else child.parent / given]
    if len(given.parts) == 1:
        candidates += [CONFIGS_FOLDER / given, CONFIGS_FOLDER / f"{given}.toml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = shipped_configs()
    nearest = difflib.get_close_matches(given.stem, names, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    found = "is a folder: give a file" if given.is_dir() else "no such file"
    reason = f"{found}; {hint}train_configs/ has {', '.join(names) or 'no files'}"
    origin, key = (COMMAND_LINE, "--config") if child is None else (str(child), "extends")
    raise ConfigError([_mistake(origin, key, name_or_path, reason)])


def shipped_configs() -> list[str]:
    """Return the names of the files in train_configs/."""
    return sorted(path.stem for path in CONFIGS_FOLDER.glob("*.toml"))


def _read_file(
    path: Path, mistakes: list[str], children: tuple[Path, ...] = ()
) -> dict[str, Setting]:
    """Read the settings of a TOML file, including those that it inherits through `extends`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read as a TOML file: {error}"]) from None
    table = _parse_toml(text, str(path))
    parent = table.pop("extends", None)
    settings = _valid_settings(table, str(path), mistakes)
    if parent is None:
        return settings
    reason = "must be the name of one TOML file, in quotes"
    if isinstance(parent, str):
        parent_path, children = find_config(parent, path), (*children, path.resolve())
        if parent_path.resolve() not in children:
            return _overlay(_read_file(parent_path, mistakes, children), settings)
        reason = "extends itself: remove one of the files from the circle"
    raise ConfigError([_mistake(str(path), "extends", parent, reason)])


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:  # tomli limits how deep tables are nested
        raise ConfigError([f"{origin}: is not valid TOML: {error}"]) from None


def _parse_word(text: str, kind: Any) -> Any:
    """Parse a value on the command line: text, `none`, `0,1` or TOML."""
    if kind in (None, str) or get_origin(kind) is Literal:
        return text
    if text == "none" and type(None) in get_args(kind):
        return None
    is_bare_list = get_origin(kind) is tuple and not text.startswith("[")
    try:
        table = tomli.loads(f"value = [{text}]" if is_bare_list else f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text


def _valid_settings(
    table: Mapping[str, Any], origin: str, mistakes: list[str]
) -> dict[str, Setting]:
    """Return the valid settings of a table, and add the errors of the others to `mistakes`."""
    settings: dict[str, Setting] = {}
    for key, value in flatten(table):
        if key in REMOVED and value == REMOVED[key][0]:
            continue
        try:
            if key not in TYPES:
                raise ValueError(_why_unknown(key))
            settings[key] = Setting(convert(value, TYPES[key]), origin)
        except ValueError as error:
            is_gone = isinstance(value, str) and value in REMOVED_VALUES
            reason = f"{error}; it was removed" if is_gone else str(error)
            mistakes.append(_mistake(origin, key, value, reason))
    return settings


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting. Unknown sections are values."""
    for name, value in table.items():
        if isinstance(value, dict) and prefix + name in SECTIONS:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _build(settings: Mapping[str, Setting]) -> Config:
    """Build a Config from valid settings and defaults."""
    tables: dict[str, Any] = {}
    for key, setting in settings.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = setting.value
    return msgspec.convert(tables, Config)


def _overlay(below: dict[str, Setting], above: dict[str, Setting]) -> dict[str, Setting]:
    """Merge settings; `above` takes precedence.

    A run length in `above` replaces any run length in `below`, so that `--training.steps 100`
    shortens any run.
    """
    if any(key in above and above[key].value for key in RUN_LENGTH):
        below = {key: setting for key, setting in below.items() if key not in RUN_LENGTH}
    return below | above


def _why_unknown(key: str) -> str:
    """Suggest a similar key, or the same name in another section."""
    if key in REMOVED:
        return f"was removed: {REMOVED[key][1]}; leave it out"
    if key in SECTIONS:
        return "is a section: set one of its keys"
    same_name = [known for known in TYPES if known.endswith(f".{key.rpartition('.')[2]}")]
    for candidates, cutoff in ((TYPES, 0.8), (same_name, 0.0), (SECTIONS, 0.8)):
        if meant := difflib.get_close_matches(key, candidates, n=1, cutoff=cutoff):
            return f"unknown key; did you mean {meant[0]}?"
    return f"unknown key; `{command_line('train')} --help` lists all keys"


def _mistake(origin: str, key: str, value: Any, reason: str) -> str:
    """Describe a mistake, with its value shortened to 80 characters. Hide tables."""
    hidden = value is None or isinstance(value, dict) or key == SECRET
    shown = "" if hidden else f" = {format_value(value)}"
    return f"{origin}: {key}{shown[:77] + '...' if len(shown) > 80 else shown}: {reason}"
