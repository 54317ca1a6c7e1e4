"""What users get to read beside the log: errors, exit codes, and commands to type."""

import argparse
import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

USER_ERROR = 2
"""Exit code for a mistake in the configuration or the data."""
FENCED = 4
"""Exit code of an island of which another process has the slot, or which was evicted: it must not
be restarted."""
WORKER_LOST = 3
"""Exit code if another worker died or did not answer in time."""
LOCAL_ISLANDS = "TORCHTITAN_DILOCO_LOCAL_ISLANDS"
"""Environment variable: the folder of a run of `islands.local`, whose islands are below it."""
STARTED_BY = "TORCHTITAN_DILOCO_STARTED_BY"
"""Environment variable: the program that the user started, run_train.sh or torchtitan-diloco."""
PACKAGE = Path(__file__).parents[1]
REPOSITORY = PACKAGE.parent


class UserError(ValueError):
    """A mistake of the user. The message has the value, its key and the remedy, and needs no
    traceback. Any other ValueError, such as one of torch, is a bug."""

    exit_code = USER_ERROR


class PeersLostError(RuntimeError):
    """Others that this process needs are lost. The message names them, and needs no traceback."""


NO_HOME = "is in the home folder of a user whom this machine does not have: give a full path"


def has_home(path: str) -> bool:
    """Return whether `Path.expanduser` knows the home folder that a path may begin with."""
    try:
        Path(path).expanduser()
    except (RuntimeError, ValueError):  # there is no such user, or its name has a NUL character
        return False
    return True


NOT_UTF8 = "is not text in UTF-8, in which settings are saved: give other text, or rename the file"


def is_utf8(text: str) -> bool:
    """Return whether a text of the command line can be saved. The name of a file in another
    encoding cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def no_run(folder: Path, lacking: str) -> UserError:
    """Return the error of a command that finds no run in a folder, which has no `lacking`."""
    reason = "it does not exist"
    if folder.is_dir():
        reason = f"it has no {lacking}"
    elif folder.exists():
        reason = "it is a file"
    return UserError(
        f"there is no run in {folder}: {reason}; give the folder of a run, such as "
        "outputs/NAME-DATE"
    )


GLOO_LOCATION = re.compile(r"^\[[^]]*:\d+\]\s*")


def cause_of(error: BaseException) -> str:
    """Return the first line of an error, without gloo's source location."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    text, locations = GLOO_LOCATION.subn("", line)
    return text.partition(". ")[0] if locations else line


NEGATIVE = re.compile(r"-\.?\d")
"""Beginning of a negative number."""

# --- commands -------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser of options that reports their mistakes in one line, with a remedy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for kind, convert in ((int, _whole_number), (float, _number), (Path, _path)):
            self.register("type", kind, convert)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words, where those after an option that begin as a negative number, such as
        `-1Gbit`, are its value."""
        words = list[str]()
        for word in sys.argv[1:] if args is None else args:
            if words and words[-1].startswith("--") and NEGATIVE.match(word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message}; `{self.prog} --help` lists the options\n")


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}": give a whole number') from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}": give a number') from None


def _path(text: str) -> Path:
    return Path(paths_of_option(text)).expanduser()


def paths_of_option(text: str) -> str:
    """Return an option that is a path, or several with commas between them, if their home folders
    are known."""
    if not all(map(has_home, text.split(","))):
        raise argparse.ArgumentTypeError(f'"{text}" {NO_HOME}')
    return text


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    checkout = (REPOSITORY / "pyproject.toml").exists()
    folder = "." if Path.cwd() == REPOSITORY else REPOSITORY
    package = f"-e '{folder}[{extra}]'" if checkout else f"'torchtitan_diloco[{extra}]'"
    return f"{_relative(sys.executable)} -m pip install {package}"


def command_line(name: str) -> str:
    """Return the shell command for a command such as `train`, in the way this process was
    started."""
    program = os.environ.get(STARTED_BY)
    module = f"-m torchtitan_diloco {name}"
    if program and Path(program).name == "run_train.sh":
        if name == "train":
            return _relative(program)
        program = installed("torchtitan-diloco")
        if not Path(program).exists() or not _is_installed_from_here():  # a Python of the user
            return f"PYTHONPATH={shlex.quote(str(REPOSITORY))} {_relative(sys.executable)} {module}"
    if program:
        return f"{_relative(program)} {name}"
    return f"{_relative(sys.executable)} {module}"


def training_command() -> str:
    """Return the shell command that starts a training as this process was started: `train`, or
    torchrun with a program of the user, which may add a model that `train` does not know."""
    started = sys.modules["__main__"]
    path = Path(getattr(started, "__file__", None) or __file__)
    if "TORCHELASTIC_RUN_ID" not in os.environ or path.is_relative_to(PACKAGE):
        return command_line("train")
    spec = started.__spec__  # None if it was not started with `-m`
    program = f"-m {spec.name}" if spec else _relative(str(path.absolute()))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    nodes = f"--standalone --nproc-per-node {ranks}"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        nodes = "..."  # the options that it was started with on each node
    return f"{_relative(sys.executable)} -m torch.distributed.run {nodes} {program}"


def installed(program: str) -> str:
    """Return the path at which pip puts a program for this Python."""
    return str(Path(sysconfig.get_path("scripts"), program))


def _is_installed_from_here() -> bool:
    """Return whether the package that pip has installed for this Python is this checkout."""
    from importlib.metadata import distributions

    places = [sysconfig.get_path("purelib")]
    origins = [
        json.loads(package.read_text("direct_url.json") or "{}").get("url")
        for package in distributions(name="torchtitan_diloco", path=places)
    ]
    return origins == [REPOSITORY.resolve().as_uri()]


def _relative(program: str) -> str:
    """Return the path of a program, relative to the current folder if it is inside."""
    if Path(program).is_relative_to(Path.cwd()):
        program = str(Path(program).relative_to(Path.cwd()))
        program = program if "/" in program else f"./{program}"
    return shlex.quote(program)
