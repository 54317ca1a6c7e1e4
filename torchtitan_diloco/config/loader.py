"""TOML files and command line to Config, and back to TOML.

Precedence: command line > TOML file > the files that it extends > defaults.
"""

import difflib
import os
import shlex
import sys
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
import tomli_w

from torchtitan_diloco.base.registry import IMPORTS_OPTION, import_modules
from torchtitan_diloco.base.settings import (
    assemble,
    convert,
    is_table,
    nearest,
    options_of,
    setting_types,
)
from torchtitan_diloco.base.user import NO_HOME, UserError, command_line, has_home
from torchtitan_diloco.config.checks import MIXTURE, RUN_LENGTH, config_mistakes
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import (
    Config,
    Training,
    flat_settings,
    flatten,
    format_value,
)

CONFIGS_FOLDER = Path(__file__).parents[1] / "train_configs"
DEFAULT_CONFIG = "demo"
COMMAND_LINE = "command line"
EXTENDS = "extends"
"""Key of a file that names the file that it extends."""
TYPES = setting_types(Config)
SECRETS = ("islands.join", "checkpoint.mirror")
"""Settings that may contain a password. Errors do not show their values."""


TOKENIZER = "data.tokenizer"
VOCABULARY = "model.vocab_size"
CORPUS = "data.corpus"
IMPORTS = "run.imports"
TABLES = [key for key, kind in TYPES.items() if is_table(kind)]
LISTS = [key for key, kind in TYPES.items() if get_origin(kind) is tuple]


class ConfigError(UserError):
    """Error that lists all mistakes in a configuration."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"{count} in the configuration:", *mistakes]))


def load_config(
    name_or_path: str, overrides: Mapping[str, str] | None = None, *, location: str = ""
) -> Config:
    """Load a TOML file (a path, or a name in train_configs/) with command-line settings on top.

    `location`: `islands.join` of an island whose settings lack it, as those in its folder do.
    """
    path = find_config(name_or_path)
    tables = _read_file(path) | {COMMAND_LINE: overrides or {}}
    _import_modules(tables)
    values, origins = _merge(tables)
    values["run.name"] = values.get("run.name") or path.stem
    if values.get("islands.name"):
        values["islands.join"] = values.get("islands.join") or location
    config: Config = assemble(Config, values)
    chosen = flat_settings(config)
    mistakes = [
        _mistake(origins.get(key, "default"), key, chosen[key], reason)
        for key, reason in config_mistakes(config)
    ]
    if mistakes:
        raise ConfigError(mistakes)
    optimizer = config.optimizer
    options = options_of(OPTIMIZERS[optimizer.name], optimizer.options)
    return replace(config, optimizer=replace(optimizer, options=options))


def parse_config(toml_text: str, origin: str) -> Config:
    """Parse the output of `to_toml`. Missing settings have their defaults.

    The text is data that may come from others: it is an error if it names modules that have not
    been imported.
    """
    table = _parse_toml(toml_text, origin)
    named = flatten(table).get(IMPORTS)
    names = named if isinstance(named, list) else []
    if lacking := [name for name in map(str, names) if name not in sys.modules]:
        words = " ".join(f"{IMPORTS_OPTION} {name}" for name in lacking)
        reason = f"a checkpoint does not choose what is imported: add {words} if it is yours"
        raise ConfigError([_mistake(origin, IMPORTS, named, reason)])
    config: Config = assemble(Config, _merge({origin: table})[0])
    return config


def to_toml(config: Config) -> str:
    """Return all settings as TOML, including defaults, except those that are None."""

    def without_none(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if value is not None}

    return tomli_w.dumps(asdict(config, dict_factory=without_none))


def _read_file(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Mapping[str, Any]]:
    """Return the table of a TOML file by its path, after those of the files that it extends."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # without the byte-order mark of some editors
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: is not text in UTF-8: save it with this encoding"]) from None
    except OSError as error:
        reason = f"cannot be read ({error.strerror}): give a TOML file that can be"
        raise ConfigError([f"{path}: {reason}"]) from None
    table = _parse_toml(text, str(path))
    if (parent := table.pop(EXTENDS, None)) is None:
        return {str(path): table}
    extended = find_config(parent, path) if isinstance(parent, str) else None
    extending = (*children, path.resolve())
    if extended is None or extended.resolve() in extending:
        reason = "must be the name of one other TOML file, which does not extend this one"
        raise ConfigError([_mistake(str(path), EXTENDS, parent, reason)])
    return _read_file(extended, extending) | {str(path): table}


def _import_modules(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Import the modules that the last of these tables names, so that all settings may have the
    names that they add."""
    named = {origin: flatten(table).get(IMPORTS) for origin, table in tables.items()}
    given = [(origin, value) for origin, value in named.items() if value is not None]
    for origin, value in given[-1:]:
        try:
            import_modules(_convert(IMPORTS, value, is_word=origin == COMMAND_LINE))
        except UserError as error:
            raise ConfigError([_mistake(origin, IMPORTS, value, str(error))]) from error


def _merge(tables: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of settings, and the origin of each. Later tables, whose keys are their
    origins, override earlier ones."""
    values = dict[str, Any]()
    origins = dict[str, str]()
    mistakes = list[str]()
    for origin, table in tables.items():
        given = {}
        for key, value in flatten(table, whole=TABLES).items():
            try:
                given[key] = _convert(key, value, is_word=origin == COMMAND_LINE)
            except ValueError as error:
                mistakes.append(_mistake(origin, key, value, str(error)))
        if any(given.get(key) for key in RUN_LENGTH):  # so that `--training.steps 9` shortens any
            values |= {key: flat_settings(Training(), "training.")[key] for key in RUN_LENGTH}
        if given.get(CORPUS) and given.get(MIXTURE):
            reason = f"{CORPUS} already sets the corpus: set only one of them"
            mistakes.append(_mistake(origin, MIXTURE, given[MIXTURE], reason))
        if given.get(CORPUS):  # the one that was given last counts
            values[MIXTURE] = {}
        elif given.get(MIXTURE):
            values[CORPUS] = ""
        if TOKENIZER in given:  # a vocabulary that was given before was that of another tokenizer
            values.pop(VOCABULARY, None)
        values |= given
        origins |= dict.fromkeys(given, origin)
    if mistakes:
        raise ConfigError(mistakes)
    return values, origins


def _convert(key: str, value: Any, *, is_word: bool) -> Any:
    """Return the value with the type of its setting, or raise a ValueError with a remedy."""
    if key not in TYPES:
        raise UserError(f"{_why_no_setting(key)}{_hint(key)}")
    kind = TYPES[key]
    if is_word and value.lower() == "none" and types.NoneType in get_args(kind):
        return None
    if is_word and key in (*LISTS, *TABLES):
        value = _parse_words(key, value)
    return _convert_value(key, value, kind, is_word=is_word)


def _parse_words(key: str, words: str) -> Any:
    """Return the list or table that is written on a command line, as in TOML or in words."""
    if key in LISTS and not is_dataclass(get_args(TYPES[key])[0]) and not words.startswith("["):
        return [] if words.lower() == "none" else _split_words(words)
    try:
        return tomli.loads(f"items = {words}")["items"]
    except ValueError:
        return _parse_pairs(words) if key in TABLES else words


def _split_words(text: str) -> list[str]:
    """Return the words of a text, which may be in quotes, as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        reason = str(error).lower()
        raise UserError(
            f"{reason}: write each quote and each backslash with \\ before it"
        ) from None


def _convert_value(place: str, value: Any, kind: Any, *, is_word: bool) -> Any:
    """Return a value with a type. `place`: such as data.phases, for errors inside a list."""
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]  # of `tuple[Phase, ...]` or `tuple[str, ...]`
        if isinstance(item, type) and is_dataclass(item):
            if not isinstance(value, list):
                raise UserError(f"expected a list of tables, each with {_names(item)}")
            return tuple(
                _convert_table(f"{place}[{index}]", table, item)
                for index, table in enumerate(value)
            )
        if not isinstance(value, list):
            raise UserError(f'expected a list of names, such as ["{value}"]')
        return tuple(convert(name, item) for name in value)
    if kind == dict[str, Any]:
        if not isinstance(value, dict):
            raise UserError("expected options by name, such as {rank = 8, rescale = true}")
        return value
    if is_table(kind):
        if not isinstance(value, dict):
            raise UserError('expected weights by name, such as {"data/web" = 0.7, stdlib = 0.3}')
        return {name: _convert_weight(name, value[name], is_word=is_word) for name in value}
    return convert(value, kind, is_word=is_word)


def _convert_table(place: str, table: Any, section: type) -> Any:
    """Return a table of a list as a dataclass, of which it must have all fields."""
    kinds = setting_types(section)
    names = _names(section)
    if not isinstance(table, dict):
        raise UserError(f"{place} = {format_value(table)}: expected a table with {names}")
    values = {}
    for name, value in table.items():
        if name not in kinds:
            hint = nearest(name, kinds) or f"; it has {names}"
            raise UserError(f"{place}.{name}: unknown key{hint}")
        try:
            values[name] = _convert_value(f"{place}.{name}", value, kinds[name], is_word=False)
        except ValueError as error:
            raise UserError(f"{place}.{name} = {format_value(value)}: {error}") from None
    if lacking := [name for name in kinds if name not in values]:
        raise UserError(f"{place} has no {lacking[0]}: give {names}")
    return section(**values)


def _names(section: type) -> str:
    return " and ".join(setting_types(section))


def _convert_weight(name: str, value: Any, *, is_word: bool) -> float:
    try:
        weight: float = convert(value, float, is_word=is_word)
    except ValueError as error:
        raise UserError(f'the weight of "{name}" is {format_value(value)}: {error}') from None
    return weight


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse NAME=VALUE pairs with spaces between them."""
    pairs = [word.rpartition("=") for word in _split_words(text)]
    if wrong := [value for name, _, value in pairs if not name]:
        raise UserError(
            f"{wrong[0]}: give NAME=VALUE pairs, such as data/web=0.7 data/code=0.3, and quote a "
            "name with spaces once more, such as \"'my data/web'=0.7\""
        )
    names = [name for name, _, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        values = " and ".join(value for name, _, value in pairs if name == repeated[0])
        raise UserError(f"{repeated[0]} is given several times, as {values}: give each name once")
    return {name: value for name, _, value in pairs}


def _why_no_setting(key: str) -> str:
    """Return why a key is no setting: it is a section, or unknown."""
    if any(known.startswith(f"{key}.") for known in TYPES):
        return f"is a section: write [{key}] in a file, or --{key}.KEY VALUE"
    return "unknown key"


def _hint(key: str) -> str:
    """Return a hint about a key that is no setting: a similar key of its section, or else all its
    keys."""
    sections = {known.rpartition(".")[0] for known in TYPES}
    given, _, name = (key, "", "") if key in sections else key.rpartition(".")
    if given and name == EXTENDS:
        return f": move {EXTENDS} above the first [section] of the file"
    for parent in LISTS:
        if key.startswith(f"{parent}.") and is_dataclass(get_args(TYPES[parent])[0]):
            return f": {parent} is a list of tables, each of which begins with [[{parent}]]"
    for section in difflib.get_close_matches(given, sections, n=1, cutoff=0.8):
        prefix = f"{section}."
        in_section = [known.removeprefix(prefix) for known in TYPES if known.startswith(prefix)]
        if similar := difflib.get_close_matches(name, in_section, n=1):
            return f"; did you mean {section}.{similar[0]}?"
        others = [known.rpartition(".")[0] for known in TYPES if known.endswith(f".{name}")]
        elsewhere = f"; {name} is a key of {', '.join(others)}" if others else ""
        names = dict.fromkeys(known.partition(".")[0] for known in in_section)  # nested sections
        return f"{elsewhere}; {section} has {', '.join(names)}"
    return nearest(key, TYPES) or f"; `{command_line('train')} --help all` lists all keys"


def _mistake(origin: str, key: str, value: Any, reason: str) -> str:
    """Describe a mistake, with its value shortened to 80 characters. Hide tables."""
    hidden = value is None or isinstance(value, dict) or key in SECRETS
    shown = "" if hidden else f" = {format_value(value)}"
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return f"{origin}: {key}{shown}: {reason}"


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:  # tomli limits how deep tables are nested
        raise ConfigError([f"{origin}: is not valid TOML: {error}"]) from None


def find_config(name_or_path: str, child: Path | None = None) -> Path:
    """Find a file by its path or its name in train_configs/ (`1b`, `1b.toml`).

    A name without a slash and without `.toml` is first looked up in train_configs/. The path in
    `extends` of a file `child` is relative to the folder of `child`.
    """
    origin, key = (COMMAND_LINE, "--config") if child is None else (str(child), EXTENDS)
    if not has_home(name_or_path):
        raise ConfigError([_mistake(origin, key, name_or_path, NO_HOME)])
    given = Path(name_or_path).expanduser()
    path = given if child is None else child.parent / given
    candidates = [path]
    if len(given.parts) == 1:
        candidates += [CONFIGS_FOLDER / given, CONFIGS_FOLDER / f"{given}.toml"]
    if "/" not in name_or_path and not name_or_path.endswith(".toml"):  # a preset comes first
        candidates.reverse()
    for candidate in candidates:
        if os.path.isfile(candidate):  # noqa: PTH113, as `is_file` raises if the name is too long
            return candidate
    names = shipped_configs()
    problem = "no such file"
    if os.path.isdir(path):  # noqa: PTH112
        problem = "is a folder: give a TOML file"
    elif os.path.exists(path):  # noqa: PTH110
        problem = "is not a regular file, as all processes of a run read it: give a TOML file"
    reason = f"{problem}; train_configs/ has {', '.join(names)}{nearest(given.stem, names)}"
    raise ConfigError([_mistake(origin, key, name_or_path, reason)])


def shipped_configs() -> list[str]:
    """Return the names of the files in train_configs/."""
    return sorted(path.stem for path in CONFIGS_FOLDER.glob("*.toml"))


# --- command line ---------------------------------------------------------------------------------


def from_command_line(words: list[str], *, location: str = "") -> Config:
    """Load the configuration of a command line. `location`: as in `load_config`.

    Of several values of a setting, the last one counts, as a script may add to what it is given. A
    list or a table may not be given twice, as one would expect that they are joined.
    """
    words_of: dict[str, list[str]] = {}
    repeated = dict[str, None]()
    values: list[str] | None = None
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            if key in words_of and key in (*LISTS, *TABLES):
                repeated[key] = None
            values = [value] if equals else []
            words_of[key] = values
        elif values is None:
            raise ConfigError([f"{COMMAND_LINE}: {word}: give settings as --section.key VALUE"])
        else:
            values.append(word)
    if repeated:
        reason = "is given twice: give all values after one"
        raise ConfigError([f"{COMMAND_LINE}: --{key}: {reason} --{key}" for key in repeated])
    if lacking := [key for key, values in words_of.items() if not values]:
        raise ConfigError([f"{COMMAND_LINE}: --{key}: {_without_value(key)}" for key in lacking])
    if mistakes := [*_surplus_words(words_of)]:
        raise ConfigError(mistakes)
    settings = {key: _join_items(values) for key, values in words_of.items()}
    config = settings.pop("config", DEFAULT_CONFIG)
    return load_config(config, settings, location=location)


def without_settings(words: Sequence[str], keys: Container[str]) -> list[str]:
    """Return the words of a command line without those of some settings, which a program sets
    itself."""
    kept = list[str]()
    is_kept = True
    for word in words:
        if word.startswith("--"):
            is_kept = word.removeprefix("--").partition("=")[0] not in keys
        if is_kept:
            kept.append(word)
    return kept


def _surplus_words(words_of: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a mistake for each known setting that has several words and takes a single value."""
    for key, words in words_of.items():
        takes_one = key == "config" or key in TYPES.keys() - {*LISTS, *TABLES}
        if takes_one and len(words) > 1:
            yield (
                f"{COMMAND_LINE}: {words[1]}: has no key, as --{key} takes one value: give "
                "settings as --section.key VALUE, and a value with spaces or a pattern in quotes"
            )


def _join_items(words: list[str]) -> str:
    """Join the words of a setting, of which a list or a table may have several. A name with spaces
    that a shell made one word stays one, unless the words are a value in TOML."""
    if len(words) == 1 or words[0].startswith(("[", "{")):
        return " ".join(words)
    return " ".join(shlex.quote(word) if _has_spaces_in_a_name(word) else word for word in words)


def _has_spaces_in_a_name(word: str) -> bool:
    """Return whether a word is one name, or one NAME=VALUE pair, with spaces and no quotes."""
    return " " in word and word.count("=") <= 1 and not {"'", '"'} & {*word}


def _without_value(key: str) -> str:
    known = key == "config" or key in TYPES
    return f"needs a value: --{key} VALUE" if known else f"{_why_no_setting(key)}{_hint(key)}"
