"""The command `torchtitan-diloco COMMAND ...`, which runs a module of this package."""

import os
import shutil
import sys
from pathlib import Path
from runpy import run_module

from torchtitan_diloco import __version__
from torchtitan_diloco.log import STARTED_BY, command_line

COMMANDS = {
    "train": ("launch", "train, on one machine or several"),
    "plan": ("plan", "find settings that fit a link"),
    "report": ("report", "one page about a run"),
    "generate": ("export.evaluate", "continue a text with a trained model"),
    "validate": ("export.evaluate", "loss of a trained model on held-out text"),
    "export": ("export", "write the weights for other programs"),
    "islands": ("islands", "serve and watch a run of islands"),
    "prepare": ("data.prepare", "tokenise a corpus"),
}
"""Module and description of each command."""


def arguments_of(name: str) -> list[str]:
    """Return what the module of a command is told first: its name, if it has several commands."""
    modules = [module for module, _ in COMMANDS.values()]
    return [name] if modules.count(COMMANDS[name][0]) > 1 else []


def main() -> int:
    program = Path(sys.argv[0]).name
    if program != "__main__.py":  # started as a module
        on_path = shutil.which(program) == sys.argv[0]
        os.environ[STARTED_BY] = program if on_path else sys.argv[0]
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [sys.argv[0], *arguments_of(name), *arguments]
        run_module(f"torchtitan_diloco.{COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
        return 0
    if name == "--version":
        print(f"torchtitan_diloco {__version__}")
        return 0
    lines = [f"  {command:<16} {text}" for command, (_, text) in COMMANDS.items()]
    known = name in ("--help", "-h")
    print(
        "" if known else f"error: there is no command {name}\n",
        f"usage: {command_line('COMMAND')} [--help] ...\n\n",
        "\n".join(lines),
        sep="",
        file=sys.stdout if known else sys.stderr,
    )
    return 0 if known else 2
