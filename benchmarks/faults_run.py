"""A run of `benchmarks.faults`: its processes, and what they have written so far."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import core
from benchmarks.network import Network
from torchtitan_diloco.utils import read_json_lines

PATIENCE_SECONDS = 90.0
"""Limit of each wait. An event that takes longer counts as one that never came."""
LISTENING = "0A"
SETTINGS: core.Settings = {
    "run.device": "cpu",
    "model.layers": "2",
    "model.width": "128",
    "model.heads": "2",
    "model.head_dim": "64",
    "model.feed_forward": "512",
    "training.sequence_length": "64",
    "training.batch_size": "8",
    "training.steps": "400",
    "optimizer.lr": "4e-3",
    "lr_schedule.warmup_steps": "50",
    "diloco.workers": "2",
    "diloco.sync_every": "10",
    "diloco.overlap.delay": "1",
    "diloco.fragments.layers_per_fragment": "1",
    "validation.every": "0",
    "metrics.log_every": "10",
    "metrics.tensorboard": "false",
}
"""0.5M parameters in 3 fragments; a step takes some 30 ms on one core."""


class Job:
    """A run whose processes have been started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: list[subprocess.Popen[Any]] = []
        self._logs: list[Path] = []

    def log(self, worker: int = 0) -> str:
        return self._logs[worker].read_text(errors="replace")

    def new_log(self) -> Path:
        self._logs.append(self.folder / f"log-{len(self._logs)}.txt")
        return self._logs[-1]

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        found = read_json_lines(path)[0] if path.exists() else []
        return [record for record in found if "kind" not in record]

    @property
    def step(self) -> int:
        """The last step that is known to be done."""
        return int(self.records[-1]["step"]) if self.records else 0

    def reach(self, step: int) -> None:
        wait_until(lambda: self.step >= step or self.ended, f"step {step}", self.log)
        if self.step < step:
            raise SystemExit(f"the run ended before step {step}:\n{self.log()[-3000:]}")

    @property
    def ended(self) -> bool:
        return all(program.poll() is not None for program in self.programs)

    def seconds_until(self, pattern: str, worker: int = 0) -> float | None:
        """Return after how many seconds the log of a worker has a line, or None for never."""
        started = time.monotonic()
        while time.monotonic() - started < PATIENCE_SECONDS:
            if re.search(pattern, self.log(worker)):
                return time.monotonic() - started
            if self.programs[worker].poll() is not None:
                return 0.0 if re.search(pattern, self.log(worker)) else None
            time.sleep(0.02)
        return None

    def line(self, pattern: str, worker: int = 0) -> str:
        """Return the first line of a worker's log that has the pattern, or an empty text."""
        return next((one for one in self.log(worker).splitlines() if re.search(pattern, one)), "")

    def wait(self) -> list[int | None]:
        """Return the exit codes; a program that does not end has None and is killed."""
        with suppress(TimeoutError):
            wait_until(lambda: self.ended, "the end", self.log)
        codes = [program.poll() for program in self.programs]
        for program in self.programs:
            with suppress(ProcessLookupError):
                os.kill(program.pid, signal.SIGCONT)
                program.kill()
            program.wait()
        return codes

    def ranks(self) -> list[int]:
        """Return the process ids of the launcher's ranks, in their order."""
        found = []
        for children in Path(f"/proc/{self.programs[-1].pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                with suppress(OSError):
                    if b"run_rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(int(pid))
        return sorted(found)


def wait_until(
    condition: Callable[[], bool], what: str, log: Callable[[], str] = lambda: ""
) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come in {PATIENCE_SECONDS:g} s:\n{log()[-2000:]}")
        time.sleep(0.02)


@contextmanager
def running(
    folder: Path,
    settings: Mapping[str, str],
    *,
    network: Network | None = None,
    inside: Sequence[str] = (),
) -> Iterator[Job]:
    """Start a run: one process in each namespace of a network, or the launcher.

    `inside`: the start of a command that runs the launcher.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, env = Job(folder), os.environ | {"OMP_NUM_THREADS": "1"}
    words = core.command_line(SETTINGS | dict(settings) | {"run.folder": str(folder / "run")})
    if network is None:
        command = [*inside, sys.executable, "-u", "-m", "torchtitan_diloco.launch", *words]
        with job.new_log().open("wb") as out:
            program = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
        job.programs.append(program)
    else:
        command = [sys.executable, "-u", "-m", "torchtitan_diloco.train", *words]
        command += ["--diloco.workers", str(network.workers)]
        for worker in range(network.workers):
            with job.new_log().open("wb") as out:
                job.programs.append(network.start(worker, command, env, out))
    try:
        yield job
    finally:
        job.wait()


def scribble(connections: int) -> None:
    """Send garbage to every port that something listens on in this network, and stay connected."""
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            if state == LISTENING:
                ports.add(int(address.rpartition(":")[2], 16))
    kept = []
    for port in [port for port in ports for _ in range(connections)]:
        with suppress(OSError):
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            kept[-1].sendall(os.urandom(4096))
    time.sleep(2)
    print(f"{len(kept)} connections to {len(ports)} ports")
