"""Reference of all settings, built from their docstrings: `--help` and docs/configuration.md."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from operator import attrgetter

from torchtitan_diloco.config.schema import Config, format_value
from torchtitan_diloco.diloco.fields import describe, setting_types

Row = tuple[str, str, str, str]
"""Key, values, default and text of a setting."""

USAGE = """\
usage: ./run_train.sh [--config NAME_OR_PATH] [--section.key VALUE ...] [--print-config] [--help]

  --config NAME_OR_PATH   a TOML file, or the name of one in train_configs/ (default: debug)
  --section.key VALUE     any setting below; takes precedence over the TOML file
  --print-config          print the resolved configuration as TOML and exit
  --help, -h              print this text and exit

train_configs/ has {configs}"""

INTRODUCTION = """\
# Configuration

<!-- Generated: python -m torchtitan_diloco.config > docs/configuration.md -->

Every setting of a run is a key of a TOML file, and an option of the command line:

```text
./run_train.sh --config 1b                              # train_configs/1b.toml
./run_train.sh --config mine.toml --training.steps 100
./run_train.sh --config mine.toml --print-config        # print all settings, do not train
```

- The command line takes precedence over the TOML file, and the file over the defaults below.
- `extends = "1b.toml"` in the first line inherits the settings of another file, beside this one or
  in `train_configs/`. The file then lists only what differs.
- Unknown keys, wrong types, values out of range and contradictions stop the run before it starts.
  All of them are listed, each with the file that it comes from.
- Integers may be written as `25e9`. Lists are `[0, 1]` in TOML and `0,1` on the command line.
- `none` on the command line removes a value that the file sets, if the default is "not set".
- The length of a run is one of `training.steps`, `training.tokens` and
  `training.tokens_per_parameter`. One of them on the command line replaces that of the file.
- A run saves its settings as `config.toml` in its folder. To start the same run again:
  `./run_train.sh --config outputs/.../config.toml`.
"""


def help_text(shipped_configs: Sequence[str]) -> str:
    """Return the text of `--help`."""
    lines = [USAGE.format(configs=", ".join(shipped_configs))]
    for name, summary, rows in sections():
        lines += ["", f"[{name}] {summary}"]
        for key, values, default, text in rows:
            lines.append(f"  --{key}  ({values}; default: {default})")
            lines += textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    lines = [INTRODUCTION]
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
    """Yield the name, the docstring and a row for each setting of each section."""
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
    body = _classes(section.__module__)[section.__name__].body
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
