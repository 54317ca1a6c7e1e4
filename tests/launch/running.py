"""Start the launcher on the stand-in program, as a shell would, and look at what it does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
START = "import sys; from torchtitan_diloco.launch import main; sys.exit(main(sys.argv[1:], 'stand_in'))"
PATIENCE_SECONDS = 90.0


class Running:
    """A launcher that is running, with all it has printed so far."""

    def __init__(self, process: "subprocess.Popen[bytes]", console: Path) -> None:
        self.process = process
        self._console = console

    @property
    def output(self) -> str:
        return self._console.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(
            lambda: self.output.count(text) >= times, f"{times} x {text!r} in\n{self.output}"
        )

    def wait(self) -> int:
        """The exit code as a shell shows it."""
        code = self.process.wait(PATIENCE_SECONDS)
        return code if code >= 0 else 128 - code

    def training_pids(self) -> list[int]:
        words = [
            word
            for line in self.output.splitlines()
            if line.startswith("started")
            for word in line.split()
        ]
        return [int(word.removeprefix("pid=")) for word in words if word.startswith("pid=")]


@contextmanager
def launcher(
    console: Path,
    does: str,
    *arguments: str,
    workers: int = 2,
    environment: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
) -> Iterator[Running]:
    """The launcher in a process group of its own, as a shell starts it, told to do the words of `does`; started by the
    command `inside`, if there is one."""
    settings = {key: value for key, value in os.environ.items() if key not in UNSET}
    settings["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_ROOT), str(Path(__file__).parent)])
    settings.update(environment or {})
    with console.open("wb") as stream:
        words = [
            "--run.device",
            "cpu",
            "--diloco.workers",
            str(workers),
            *arguments,
            "--run.description",
            does,
        ]
        process = subprocess.Popen(
            [*inside, sys.executable, "-u", "-c", START, *words],
            stdout=stream,
            stderr=stream,
            env=settings,
            process_group=0,
        )
    running = Running(process, console)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for pid in running.training_pids():  # of a launcher that left some behind: the tests do not
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


UNSET = {
    *(
        "NNODES",
        "NODE_RANK",
        "RDZV_ENDPOINT",
        "RDZV_ID",
        "RDZV_BACKEND",
        "NPROC",
        "SHUTDOWN_SECONDS",
    ),
    *(
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "LOGLEVEL",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
}


def run_launcher(
    console: Path,
    does: str,
    *arguments: str,
    workers: int = 2,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    with launcher(console, does, *arguments, workers=workers, environment=environment) as running:
        return running.wait(), running.output


def wait_until(
    condition: Callable[[], bool], described: str, seconds: float = PATIENCE_SECONDS
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {described}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but that its parent has not asked about does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return not state.startswith("Z") and state != ""


def wait_until_gone(pids: list[int]) -> None:
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids), f"processes {pids} to end", seconds=5
    )
