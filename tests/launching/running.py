"""Start the launcher on the stand-in program, as a shell would, and observe it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.network import Program, wait_until
from tests.conftest import REPOSITORY
from tests.launching.stand_in import is_alive

START = """
import functools, sys
from torchtitan_diloco.base import process
from torchtitan_diloco.launching import launch
process.run_and_exit(functools.partial(launch.main, module="{}"), sys.argv[1:])
"""
PATIENCE_SECONDS = 200.0
LAUNCHER_VARIABLES = re.compile(
    r"NNODES|NODE_RANK|RDZV_.*|NPROC|TORCH_ELASTIC.*|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME|LOGLEVEL"
)


class Running(Program):
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
        pids = [int(pid) for pid in re.findall(r"pid=(\d+)", self.printed())]
        wait_until(lambda: not any(map(is_alive, pids)), "their end", self.log, PATIENCE_SECONDS)


def start(
    console: Path, command: Sequence[str], variables: Mapping[str, str], folder: Path | None = None
) -> Running:
    """Start a program in a process group of its own, without other variables of the launcher."""
    usual = {key: one for key, one in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(key)}
    with console.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=usual | dict(variables),
            stdout=stream,
            stderr=stream,
            process_group=0,
        )
    return Running(process, console)


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
    """Start the launcher of a module of this folder; `inside` is a command that starts it."""
    options = ["--run.device", "cpu", "--diloco.workers", str(workers), *arguments]
    options += ["--run.description", does]
    program = [*inside, sys.executable, "-u", "-c", START.format(module), *options]
    paths = f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"
    run = start(console, program, {"PYTHONPATH": paths, **variables})
    try:
        yield run
    finally:
        run.kill()
