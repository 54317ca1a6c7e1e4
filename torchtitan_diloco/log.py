"""Messages of a process to its user: log lines, errors, exit codes, and commands to run."""

import argparse
import gc
import logging
import os
import re
import shlex
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

logger = logging.getLogger("torchtitan_diloco")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run after the current step."""
USER_ERROR = 2
"""Exit code for a mistake in the configuration or the data."""
FENCED = 4
"""Exit code of an island whose slot another one has taken: it must not be restarted."""
WORKER_LOST = 3
"""Exit code if another worker died or did not answer in time."""
SAME_SIGNAL_SECONDS = 0.5
"""Service managers signal a process and then its group. Both signals count as one."""
LOCAL_ISLANDS = "TORCHTITAN_DILOCO_LOCAL_ISLANDS"
"""Environment variable: the folder of a run of `islands.local`, whose islands are below it."""
STARTED_BY = "TORCHTITAN_DILOCO_STARTED_BY"
"""Environment variable: the program that the user started, run_train.sh or torchtitan-diloco."""
REPOSITORY = Path(__file__).parents[1]


class UserError(ValueError):
    """A mistake of the user. The message has the value, its key and the remedy, and needs no
    traceback. Any other ValueError, such as one of torch, is a bug."""

    exit_code = USER_ERROR


class PeersLostError(RuntimeError):
    """Others that this process needs are lost. The message names them, and needs no traceback."""


RUN_REMEDY = "give the folder of a run, such as outputs/NAME-DATE"


def no_run(folder: Path, lacking: str, remedy: str = RUN_REMEDY) -> UserError:
    """Return the error of a command that finds no run in a folder, which has no `lacking`."""
    reason = "it does not exist"
    if folder.is_dir():
        reason = f"it has no {lacking}"
    elif folder.exists():
        reason = "it is a file"
    return UserError(f"there is no run in {folder}: {reason}; {remedy}")


class Parser(argparse.ArgumentParser):
    """A parser of options that reports their mistakes in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message}; `{self.prog} --help` lists the options\n")


def run_and_exit(main: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Call `main` and exit with its code, without the clean-up of the interpreter.

    After a failure, clean-up would wait for other ranks, and tell them that this one ended
    normally. Without it, the rank that fails first is the first to exit, and its exit code is that
    of the run. After a success, `main` has closed what others wait for.

    Ctrl-C ends the process also while torch waits in C++, where no handler of Python runs, until
    torchrun's agent or the trainer handles it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(100_000)  # else collections take a tenth of the time of importing torch
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before the start
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def start_logging() -> None:
    """Log to stdout on the first rank of each node, and warnings to stderr on the other ranks."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    handler = logging.StreamHandler(sys.stdout if first else sys.stderr)
    handler.setFormatter(_RankFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if first else logging.WARNING)


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno < logging.WARNING:
            return message
        rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
        return f"{rank}{record.levelname.lower()}: {message}"


def clock(seconds: float) -> str:
    """Format as `2d 3:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{rest:02d}"


def brief(seconds: float) -> str:
    """Format as `1.23 s` or `45.6 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"


def few_digits(value: float, decimals: int) -> str:
    """Format as `1,234.5`, and below 1 with two significant digits, as `0.043`."""
    return f"{value:,.{decimals}f}" if value >= 1 else f"{value:.2g}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 step`, or `1,000 steps`. `plural`: if it does not only add an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]
    rows = [columns, ["-" * width for width in widths], *rows]
    lines = [map(str.ljust, row, widths) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    checkout = (REPOSITORY / "pyproject.toml").exists()
    folder = "." if Path.cwd() == REPOSITORY else REPOSITORY
    package = f"-e '{folder}[{extra}]'" if checkout else f"'torchtitan_diloco[{extra}]'"
    return f"{_relative(sys.executable)} -m pip install {package}"


def command_line(name: str) -> str:
    """Return the shell command for a command such as `train`, in the way this process was
    started."""
    program, own = os.environ.get(STARTED_BY), f"-m torchtitan_diloco {name}"
    if program and Path(program).name == "run_train.sh":
        if name == "train":
            return _relative(program)
        program = installed("torchtitan-diloco")
        if not Path(program).exists():  # a Python of the user, without this package
            return f"PYTHONPATH={shlex.quote(str(REPOSITORY))} {_relative(sys.executable)} {own}"
    if program:
        return f"{_relative(program)} {name}"
    return f"{_relative(sys.executable)} {own}"


def installed(program: str) -> str:
    """Return the path at which pip puts a program for this Python."""
    return str(Path(sysconfig.get_path("scripts"), program))


def _relative(program: str) -> str:
    """Return the path of a program, relative to the current folder if it is inside."""
    if Path(program).is_relative_to(Path.cwd()):
        program = str(Path(program).relative_to(Path.cwd()))
        program = program if "/" in program else f"./{program}"
    return shlex.quote(program)


GLOO_LOCATION = re.compile(r"^\[[^]]*:\d+\]\s*")


def cause_of(error: Exception) -> str:
    """Return the first line of an error, without gloo's source location."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    text, found = GLOO_LOCATION.subn("", line)
    return text.partition(". ")[0] if found else line
