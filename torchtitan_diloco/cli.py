"""The command `torchtitan-diloco COMMAND ...`, which runs a module of this package."""

import os
import shutil
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from torchtitan_diloco import __version__
from torchtitan_diloco.base.process import raise_on_interrupt, run_and_exit, say
from torchtitan_diloco.base.user import STARTED_BY, USER_ERROR, UserError, command_line

COMMANDS = {
    "train": ("launching.launch", "train, on one machine or several"),
    "compare": ("machines.compare", "measure two machines, and what training on both gains"),
    "plan": ("planner.plan", "find settings that fit a link"),
    "report": ("report.page", "write one page about a run"),
    "generate": ("export.__main__ generate", "continue a text with a trained model"),
    "export": ("export.__main__ export", "write the weights for other programs"),
    "islands": ("islands.__main__", "serve and watch a run of islands"),
    "doctor": ("machines.doctor", "check this machine, and that machines reach each other"),
    "tokenizer": ("data.tokenizer", "train a tokenizer on a corpus"),
    "prepare": ("data.prepare", "tokenize a corpus"),
}
"""Module, with its first argument if any, and description of each command."""
INTERRUPTED = ("compare", "islands", "doctor", "prepare")
"""Commands that have something to do after Ctrl-C. It ends the others at once, also in C++."""


def main() -> NoReturn:
    run_and_exit(run, sys.argv[1:])


def run(words: list[str]) -> int:
    """Run a command, and return its exit code."""
    program = Path(sys.argv[0]).name
    if program != "__main__.py":  # started as a module
        on_path = shutil.which(program) == sys.argv[0]
        os.environ[STARTED_BY] = program if on_path else sys.argv[0]
    name, *arguments = words or ["--help"]
    if name in COMMANDS and arguments == ["--version"]:  # as of run_train.sh
        name = "--version"
    try:
        if name == "train" and _prints_help(arguments):
            return 0
    except UserError as error:
        say(f"error: {error}")
        return USER_ERROR
    if name in COMMANDS:
        module, *first = COMMANDS[name][0].split()
        command = import_module(f"torchtitan_diloco.{module}")  # imports torch
        if name in INTERRUPTED:
            raise_on_interrupt()
        code: int | None = command.main([*first, *arguments])
        return code or 0
    if name == "--version":
        print(f"torchtitan_diloco {__version__}")
        return 0
    if name in ("--help", "-h"):
        lines = [f"  {command:<16} {text}" for command, (_, text) in COMMANDS.items()]
        print(f"usage: {command_line('COMMAND')} [--help] ...\n", *lines, sep="\n")
        return 0
    hint = "".join(f"; did you mean {like}?" for like in get_close_matches(name, COMMANDS, n=1))
    usage = f"{command_line('COMMAND').removesuffix(' COMMAND')} --help"
    print(f"error: there is no command {name}{hint}; `{usage}` lists them", file=sys.stderr)
    return USER_ERROR


def _prints_help(arguments: list[str]) -> bool:
    """Print the help of a training if it is asked for, and return whether it is."""
    from torchtitan_diloco.config.help import print_help  # for this command only

    return print_help(arguments, {name: text for name, (_, text) in COMMANDS.items()})
