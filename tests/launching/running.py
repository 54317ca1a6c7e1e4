"""Start the launcher on the stand-in program, as a shell would, and observe it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from benchmarks import network
from tests.launching.stand_in import is_alive
from tests.programs import Main, Program
from tests.waiting import wait_until
from torchtitan_diloco.base.process import run_and_exit
from torchtitan_diloco.launching.launch import main as launcher_of_package

START = "import sys; from tests.launching.running import main; main(sys.argv[1:])"
PATIENCE_SECONDS = 200.0
LAUNCHER_VARIABLES = re.compile(
    r"NNODES|NODE_RANK|RDZV_.*|NPROC|TORCH_ELASTIC.*|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME|LOGLEVEL"
)


class Running(network.Program):
    """A launcher that was started."""

    def wait_for(self, text: str, times: int = 1) -> None:
        def is_there() -> bool:
            return self.printed().count(text) >= times or not self.running

        wait_until(is_there, text, self.log, PATIENCE_SECONDS)
        assert self.printed().count(text) >= times, self.printed()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Return the exit code as a shell shows it."""
        code = self.process.wait(seconds)
        return code if code >= 0 else 128 - code

    def wait_until_ranks_are_gone(self) -> None:
        pids = self.ranks()
        wait_until(lambda: not any(map(is_alive, pids)), "their end", self.log, PATIENCE_SECONDS)

    def ranks(self) -> set[int]:
        """Return the process ids that the ranks have printed."""
        return {int(pid) for pid in re.findall(r"pid=(\d+)", self.printed())}


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process without variables of the launcher, and these ones."""
    usual = {key: one for key, one in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(key)}
    return usual | variables


def start(
    console: Path,
    words: Iterable[str],
    *,
    main: Main | str = "torchtitan_diloco",
    folder: Path | None = None,
    **variables: str,
) -> Running:
    """Start a program in a fork, without other variables of the launcher."""
    program = Program(console, words, main=main, folder=folder, variables=environment(**variables))
    return Running(cast("subprocess.Popen[Any]", program), console)


def start_interpreter(
    console: Path, command: Sequence[str], *, folder: Path | None = None, **variables: str
) -> Running:
    """Start a command in a process group of its own, without other variables of the launcher."""
    with console.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**variables),
            stdout=stream,
            stderr=stream,
            process_group=0,
        )
    return Running(process, console)


def launch(module: str, arguments: list[str]) -> int:
    """Run the launcher on a module of this folder."""
    return launcher_of_package(arguments, module=f"{__package__}.{module}")


def main(arguments: list[str]) -> NoReturn:
    run_and_exit(partial(launch, arguments[0]), arguments[1:])


@contextmanager
def launcher(
    console: Path,
    does: str,
    *arguments: str,
    workers: int = 2,
    inside: Sequence[str] = (),
    module: str = "stand_in",
    **variables: str,
) -> Iterator[Running]:
    """Start the launcher on a module of this folder: in a fork, or with a command that starts a new
    interpreter, `inside`."""
    words = ["--run.device", "cpu", "--diloco.workers", str(workers), *arguments]
    words += ["--run.description", does]
    if inside:
        command = [*inside, sys.executable, "-u", "-c", START, module, *words]
        run = start_interpreter(console, command, folder=None, **variables)
    else:
        run = start(console, words, main=partial(launch, module), folder=None, **variables)
    try:
        yield run
    finally:
        run.kill()
