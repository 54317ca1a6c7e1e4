"""Config -> TOML that loads to the same Config."""

import dataclasses
import json
from typing import Any

from torchtitan_diloco.config.schema import Config


def to_toml(config: Config) -> str:
    """Every setting of the run, defaults included; settings that are not set are left out."""
    return "\n\n".join(_sections(config, name="")) + "\n"


def _sections(section: Any, name: str) -> list[str]:
    own: list[str] = []
    nested: list[str] = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            nested += _sections(value, f"{name}.{field.name}" if name else field.name)
        elif value is not None:
            own.append(f"{field.name} = {format_value(value)}")
    return (["\n".join([f"[{name}]", *own])] if own else []) + nested


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON's escapes are TOML's, bar DEL
    if isinstance(value, tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    return repr(value)
