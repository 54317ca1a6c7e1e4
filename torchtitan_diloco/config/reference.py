"""The settings in words, taken from the docstrings of the schema: for `--help`, and for docs/configuration.md."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import get_type_hints

from torchtitan_diloco.config.fields import FieldSpec, describe, field_specs
from torchtitan_diloco.config.loader import shipped_configs
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.config.toml_writer import format_value

USAGE = """\
usage: ./run_train.sh [--config NAME_OR_PATH] [--section.key VALUE ...] [--print-config] [--help]

  --config NAME_OR_PATH   a TOML file, or the name of one in train_configs/ (default: debug):
                          {configs}
  --print-config          print the resolved configuration as TOML and stop
  --section.key VALUE     any of the settings below; goes before the TOML"""

INTRODUCTION = """\
# Configuration

<!-- Generated from the docstrings in torchtitan_diloco/config/ (schema.py, diloco_schema.py) by
     python -m torchtitan_diloco.config > docs/configuration.md -->

A run is described by a TOML file; `./run_train.sh --config 1b` takes `train_configs/1b.toml`. Any setting can be given
on the command line as well: `--training.steps 100`. The command line goes before the TOML, the TOML before the default.

- `extends = "1b.toml"` as the first line inherits everything from another file (beside it, or in `train_configs/`), so
  that a variant only says what differs.
- An unknown key, a wrong type or a value out of range stops the run before it starts; all mistakes are listed together.
- A setting without a default is "not set"; `none` on the command line takes back what a TOML has set.
- Integers may be written as `25e9`. Lists are `[0, 1]` in TOML and `0,1` on the command line.
- The resolved configuration is saved as `config.toml` in the folder of the run and starts the same run again:
  `./run_train.sh --config outputs/.../config.toml`.
"""


@cache
def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field of a section. Fails on a field without one: every setting is explained."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[statement.target.id] = " ".join(text.split())
    return docs


def sections(section: type = Config, name: str = "") -> Iterator[tuple[str, type]]:
    """Every (dotted name, dataclass) that holds settings of its own."""
    hints = get_type_hints(section)
    nested = [(field.name, hints[field.name]) for field in dataclasses.fields(section)]
    if any(not dataclasses.is_dataclass(kind) for _, kind in nested):
        yield name, section
    for field_name, kind in nested:
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from sections(kind, f"{name}.{field_name}" if name else field_name)


def own_settings(name: str, section: type) -> Iterator[tuple[FieldSpec, str]]:
    docs = field_docs(section)
    for spec in field_specs(section):
        if "." not in spec.key:
            yield dataclasses.replace(spec, key=f"{name}.{spec.key}"), docs[spec.key]


def help_text() -> str:
    lines = [USAGE.format(configs=", ".join(shipped_configs()))]
    for name, section in sections():
        lines += ["", f"[{name}] {_summary(section)}"]
        for spec, doc in own_settings(name, section):
            default = "not set" if spec.default is None else format_value(spec.default)
            lines.append(f"  --{spec.key}  ({describe(spec.annotation)}; default: {default})")
            lines += textwrap.wrap(
                doc, width=112, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines)


def markdown() -> str:
    lines = [INTRODUCTION]
    for name, section in sections():
        lines += [
            f"## [{name}]",
            "",
            _summary(section),
            "",
            "| key | values | default | |",
            "|---|---|---|---|",
        ]
        for spec, doc in own_settings(name, section):
            default = "not set" if spec.default is None else f"`{format_value(spec.default)}`"
            values = describe(spec.annotation).replace("|", "\\|")
            lines.append(
                f"| `{spec.key}` | {values} | {default} | {doc.replace('|', chr(92) + '|')} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _summary(section: type) -> str:
    return " ".join((inspect.getdoc(section) or "").split())
