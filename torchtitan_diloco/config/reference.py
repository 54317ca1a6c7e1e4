"""Reference of all settings from their docstrings, for `--help` and docs/configuration.md."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import attrgetter

from torchtitan_diloco.config.schema import Config, format_value
from torchtitan_diloco.diloco.fields import describe, setting_types
from torchtitan_diloco.utils import command_line

Row = tuple[str, str, str, str]
"""Key, values, default and text of a setting."""

USAGE = """\
usage: {program} [--config NAME_OR_PATH] [--section.key VALUE ...] [--print-config] [--help]

  --config NAME_OR_PATH   a TOML file, or the name of one in train_configs/ (default: demo)
  --section.key VALUE     any setting below; takes precedence over the TOML file
  --print-config          print the resolved configuration as TOML and exit
  --help, -h              print this text and exit

train_configs/ has {configs}"""

GENERATED = "<!-- Generated from here on: .venv/bin/python -m torchtitan_diloco.config -->\n"


def help_text(shipped_configs: Sequence[str]) -> str:
    """Return the text of `--help`."""
    lines = [USAGE.format(program=command_line("train"), configs=", ".join(shipped_configs))]
    for name, summary, rows in sections():
        lines += ["", f"[{name}] {summary}"]
        for key, values, default, text in rows:
            lines.append(f"  --{key}  ({values}; default: {default})")
            lines.append(
                textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
            )
    return "\n".join(lines)


def markdown(page: str) -> str:
    """Return the text of docs/configuration.md with its generated part updated."""
    lines = [page.partition(GENERATED)[0] + GENERATED]
    for name, summary, rows in sections():
        lines += [
            f"## [{name}]\n",
            f"{summary}\n",
            "| key | values | default | |",
            "|---|---|---|---|",
        ]
        for key, values, default, text in rows:
            code = default if default == "not set" else f"`{default}`"
            lines.append(f"| `{key}` | {values} | {code} | {text} |")
        lines.append("")
    return "\n".join(lines)


def sections() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the name, docstring and rows of each section."""
    types = setting_types(Config)
    for name, keys in groupby(types, lambda key: key.rpartition(".")[0]):
        section = attrgetter(name)(Config())
        texts = field_docstrings(type(section))
        rows = []
        for key in keys:
            field = key.rpartition(".")[2]
            default = getattr(section, field)
            shown = "not set" if default is None else format_value(default)
            rows.append((key, re.sub(r"\ban? ", "", describe(types[key])), shown, texts[field]))
        yield name, section.__doc__, rows


def field_docstrings(section: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, on one line."""
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
