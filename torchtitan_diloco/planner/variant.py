"""A plan as a TOML of its own, which extends the one it was made for."""

import os
from pathlib import Path

from torchtitan_diloco.config.loader import CONFIGS_FOLDER, find_config, load_config
from torchtitan_diloco.config.schema import Config, flat_settings, format_value


def check_variant_path(path: Path) -> None:
    """A file that is there already is left alone."""
    if path.suffix != ".toml":
        raise ValueError(
            f'--write "{path}": a configuration ends in .toml; write {path.with_suffix(".toml")}'
        )
    if path.exists():
        raise ValueError(
            f'--write "{path}": there is such a file already; give another name, or remove it'
        )
    if not path.parent.is_dir():
        raise ValueError(
            f'--write "{path}": there is no folder {path.parent}; make it, or give another name'
        )


def write_variant(path: Path, config_name: str, wanted: Config, comment: str) -> None:
    """Writes what `wanted` sets differently from the config of that name, and reads it back: it gives `wanted`."""
    check_variant_path(path)
    parent = find_config(config_name)
    base = load_config(config_name)
    text = f"# {comment}\nextends = {format_value(_name_of(parent, path))}\n" + _differences(
        base, wanted
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    loaded, expected = (
        flat_settings(one) | {"run.name": ""} for one in (load_config(str(path)), wanted)
    )
    assert loaded == expected, "what was written does not load to what was planned"


def _name_of(parent: Path, child: Path) -> str:
    """As the loader finds it: a bare name in train_configs/, unless another file of that name lies beside the child."""
    bare_name_is_free = not (child.parent / parent.name).exists() and child.name != parent.name
    if parent.resolve().parent == CONFIGS_FOLDER.resolve() and bare_name_is_free:
        return parent.name
    return os.path.relpath(parent.resolve(), child.parent.resolve())


def _differences(base: Config, wanted: Config) -> str:
    before, after = flat_settings(base), flat_settings(wanted)
    unsaid = [key for key, value in after.items() if value is None and before[key] is not None]
    if unsaid:
        raise ValueError(
            f"{unsaid[0]} = none cannot be said in a TOML that extends another: leave it out of the other one"
        )
    sections: dict[str, list[str]] = {}
    for key, value in after.items():
        if value != before[key]:
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(f"{name} = {format_value(value)}")
    return "".join(
        f"\n[{section}]\n" + "".join(f"{line}\n" for line in lines)
        for section, lines in sections.items()
    )
