"""TOML files and command-line settings -> one checked Config.

Precedence: command line > TOML > what the TOML extends > default.
"""

import ast
import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from torchtitan_diloco.config.checks import ALTERNATIVES, cross_field_mistakes
from torchtitan_diloco.config.fields import FieldSpec, convert, field_specs, parse_text
from torchtitan_diloco.config.mistakes import ConfigError, InvalidValueError, Mistake
from torchtitan_diloco.config.schema import Config

CONFIGS_FOLDER = Path(__file__).parents[2] / "train_configs"
SPECS: dict[str, FieldSpec] = {spec.key: spec for spec in field_specs(Config)}
COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value somebody gave, and where."""

    value: Any
    origin: str


def load_config(name_or_path: str, overrides: Mapping[str, str] | None = None) -> Config:
    """The config of a TOML (a bare name is found in train_configs/) with command-line settings on top."""
    mistakes: list[Mistake] = []
    path = find_config(name_or_path)
    settings = _overlay(_read_toml(path, mistakes), _from_words(overrides or {}, mistakes))

    values: dict[str, Any] = {}
    for key, setting in settings.items():
        if key not in SPECS:
            mistakes.append(Mistake(setting.origin, key, setting.value, _unknown_key(key)))
            continue
        try:
            values[key] = convert(setting.value, SPECS[key].annotation)
        except InvalidValueError as error:
            mistakes.append(Mistake(setting.origin, key, setting.value, str(error)))
    values.setdefault("run.name", path.stem)

    config: Config = _build(Config, values, prefix="")
    if (
        not mistakes
    ):  # a value that was refused would show up a second time as a cross-field mistake
        for key, reason in cross_field_mistakes(config):
            origin = settings[key].origin if key in settings else "default"
            mistakes.append(Mistake(origin, key, values.get(key, SPECS[key].default), reason))
    if mistakes:
        raise ConfigError(mistakes)
    return config


def config_from_text(texts: Mapping[str, str], origin: str) -> Config:
    """The config whose flat settings, each as `str()` writes it, were saved in `origin`. Keys that are not there, because
    they are newer, have their defaults."""
    mistakes: list[Mistake] = []
    values: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in SPECS:
            reason = "is a setting that this program does not have: use the one that saved it"
            mistakes.append(Mistake(origin, key, text, reason))
            continue
        try:
            values[key] = convert(
                _written_by_str(text, SPECS[key].annotation), SPECS[key].annotation
            )
        except InvalidValueError as error:
            mistakes.append(Mistake(origin, key, text, f"{error}: is the file damaged?"))
    if mistakes:
        raise ConfigError(mistakes)
    config: Config = _build(Config, values, prefix="")
    return config


def _written_by_str(text: str, annotation: Any) -> Any:
    if annotation is str or get_origin(annotation) is Literal:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # one of the words that a field takes beside numbers


def find_config(name_or_path: str) -> Path:
    """The file meant by a path, or by a bare name (`1b`, `1b.toml`) in train_configs/."""
    given = Path(name_or_path).expanduser()
    candidates = [given]
    if len(given.parts) == 1:
        candidates += [CONFIGS_FOLDER / given, CONFIGS_FOLDER / f"{given}.toml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = shipped_configs()
    nearest = difflib.get_close_matches(given.name.removesuffix(".toml"), names, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    reason = f"no such file; {hint}train_configs/ has {', '.join(names) or 'nothing here: it is in the repository'}"
    raise ConfigError([Mistake(COMMAND_LINE, "--config", name_or_path, reason)])


def shipped_configs() -> list[str]:
    return sorted(path.stem for path in CONFIGS_FOLDER.glob("*.toml"))


def _read_toml(
    path: Path, mistakes: list[Mistake], children: tuple[Path, ...] = ()
) -> dict[str, Setting]:
    """All settings of a TOML, those it inherits through `extends` included."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Mistake(str(path), "(file)", path.name, f"is not valid TOML: {error}")]
        ) from None
    settings: dict[str, Setting] = {}
    parent = table.pop("extends", None)
    if parent is not None:
        parent_path = _find_parent(parent, path)
        if parent_path.resolve() in [child.resolve() for child in (*children, path)]:
            raise ConfigError(
                [
                    Mistake(
                        str(path),
                        "extends",
                        parent,
                        "extends itself; remove one link of the circle",
                    )
                ]
            )
        settings.update(_read_toml(parent_path, mistakes, (*children, path)))
    own: dict[str, Setting] = {}
    _flatten(table, "", str(path), own, mistakes)
    return _overlay(settings, own)


def _from_words(words: Mapping[str, str], mistakes: list[Mistake]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for key, text in words.items():
        if _is_section(key):
            mistakes.append(
                Mistake(
                    COMMAND_LINE, key, text, f"is a section; set one of its keys: {_keys_of(key)}"
                )
            )
        else:
            value = parse_text(text, SPECS[key].annotation) if key in SPECS else text
            settings[key] = Setting(value, COMMAND_LINE)
    return settings


def _overlay(below: dict[str, Setting], above: dict[str, Setting]) -> dict[str, Setting]:
    """`above` goes first. Of keys that exclude each other, one given above takes back the others given below, so that
    `--training.steps 100` is enough to shorten a preset that counts its length in tokens."""
    taken_back = {
        other
        for group in ALTERNATIVES
        for key in group
        if key in above and above[key].value
        for other in group
    }
    return {key: setting for key, setting in below.items() if key not in taken_back} | above


def _find_parent(parent: Any, child: Path) -> Path:
    if not isinstance(parent, str):
        raise ConfigError(
            [Mistake(str(child), "extends", parent, 'must name one TOML file, "like-this.toml"')]
        )
    beside = child.parent / parent
    if beside.is_file():
        return beside
    try:
        return find_config(parent)
    except ConfigError:
        reason = (
            f"no such file beside {child} or in train_configs/ ({', '.join(shipped_configs())})"
        )
        raise ConfigError([Mistake(str(child), "extends", parent, reason)]) from None


def _flatten(
    table: dict[str, Any],
    prefix: str,
    origin: str,
    settings: dict[str, Setting],
    mistakes: list[Mistake],
) -> None:
    for name, value in table.items():
        key = prefix + name
        is_section = _is_section(key)
        if isinstance(value, dict) and (is_section or value):
            _flatten(value, f"{key}.", origin, settings, mistakes)
        elif is_section:
            reason = f"is a section; write it as [{key}] with keys below it: {_keys_of(key)}"
            mistakes.append(Mistake(origin, key, value, reason))
        elif not isinstance(value, dict) or key in SPECS:
            settings[key] = Setting(value, origin)
        else:
            mistakes.append(Mistake(origin, f"[{key}]", value, _unknown_key(key)))


def _is_section(key: str) -> bool:
    return any(known.startswith(f"{key}.") for known in SPECS)


def _keys_of(section: str) -> str:
    return ", ".join(
        key.removeprefix(f"{section}.") for key in SPECS if key.startswith(f"{section}.")
    )


def _unknown_key(key: str) -> str:
    """Names the key that was probably meant: in the same section first, then of the same name elsewhere, then alike."""
    section, _, leaf = key.rpartition(".")
    siblings = [known for known in SPECS if known.rpartition(".")[0] == section]
    leaves = {known.rpartition(".")[2]: known for known in siblings}
    near_leaves = difflib.get_close_matches(leaf, leaves, n=1)
    same_leaf = [known for known in SPECS if known.rpartition(".")[2] == leaf]
    if near_leaves:
        meant = leaves[near_leaves[0]]
    elif same_leaf:
        meant = same_leaf[0]
    elif siblings:
        return f"unknown key; [{section}] has {', '.join(leaves)}"
    else:
        near_keys = difflib.get_close_matches(key, SPECS, n=1, cutoff=0.5)
        meant = near_keys[0] if near_keys else ""
    hint = f"did you mean {meant}?" if meant else "`./run_train.sh --help` lists all keys"
    return f"unknown {'key' if siblings else 'section or key'}; {hint}"


def _build(section: type, values: Mapping[str, Any], prefix: str) -> Any:
    arguments: dict[str, Any] = {}
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        key = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values, f"{key}.")
        elif key in values:
            arguments[field.name] = values[key]
    return section(**arguments)
