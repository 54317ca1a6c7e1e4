"""Child processes that are started again whenever they end, such as the syncer of a run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from torchtitan_diloco.base.hardware import end_with_parent
from torchtitan_diloco.base.registry import imports_words
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.console import Say

FIRST_PAUSE = 1.0
"""Seconds until a process that has ended is started again for the first time."""
LONGEST_RESTART_PAUSE = 30.0
"""The pause doubles each time, up to these seconds."""
SYNCER_SECONDS = 20.0
"""Time for the syncer to publish what it merges when it is stopped."""
SCRATCH = Path(".cache/syncer")
"""Default folder of the files of syncers, in which each run has its own."""
NICE = 10
"""Lower priority of a syncer that shares its cores with training."""


class Child:
    """A process that is started again whenever it ends."""

    def __init__(
        self,
        name: str,
        start: Callable[[], "subprocess.Popen[bytes]"],
        say: Say,
        why: Callable[[], str] = str,
        *,
        may_end: bool = False,
    ) -> None:
        """Describe a process, which `start` or `runs` starts.

        `why`: returns the reason of its end, or an empty string. `may_end`: whether it has done its
        work when it ends with code 0, and is not started again.
        """
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.is_done = False
        """Whether it has done its work."""
        self._start = start
        self._say = say
        self._why = why
        self._may_end = may_end
        self._pause = FIRST_PAUSE
        self._due = 0.0
        self._began = 0.0

    def start(self) -> None:
        self.process = self._start()
        self._began = time.monotonic()

    def runs(self) -> bool:
        """Return whether the process runs. Start it again if its pause is over."""
        now = time.monotonic()
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return True
            self.process = None
            if code == 0 and self._may_end:
                self.is_done = True
                return False
            if now - self._began > LONGEST_RESTART_PAUSE:
                self._pause = FIRST_PAUSE
            why = self._why()
            self._again(now, f"{self.name} ended with code {code}{f' ({why})' if why else ''}")
        if self.is_done or now < self._due:
            return False
        try:
            self.start()
        except (UserError, OSError) as error:
            self._again(now, f"{self.name} did not start ({error})")
        return self.process is not None

    def stop(self, seconds: float) -> None:
        """End the process with SIGTERM, and with SIGKILL if it still runs after so many seconds."""
        self.is_done = True
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _again(self, now: float, what: str) -> None:
        self._say(f"{what}; starting it again in {self._pause:g} s")
        self._due = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_RESTART_PAUSE)


def syncer_of(
    location: str | Path,
    scratch: Path,
    say: Say,
    *,
    options: Sequence[str] = (),
    output: Path | None = None,
    nice: int = 0,
    may_end: bool = True,
) -> Child:
    """Return the syncer of a run as a child, which is not started yet.

    It ends in order when this process does, and when the thread ends that has started it. A
    syncer that is started after one that died does not wait for it: see `sync`.

    `options`: more options of `islands sync`. `output`: file to which its lines are added, instead
    of the output of this process. `nice`: by how much its priority is lower. `may_end`: whether the
    end of the run is also its end.
    """
    words = ["sync", str(location), "--scratch", str(scratch), *options, *imports_words()]

    def launch() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "torchtitan_diloco.islands", *words]
        stream = None if output is None else output.open("ab")
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=None if stream is None else subprocess.STDOUT,
                process_group=0,  # signals of the terminal are for this process, which stops it
                preexec_fn=partial(_prepare, nice),
            )
        finally:
            if stream is not None:
                stream.close()

    def why() -> str:
        """Return the last line of its output, if that is a file."""
        with suppress(OSError):
            lines = output.read_text(errors="replace").split("\n") if output else []
            return next((f"{line[:300]}" for line in reversed(lines) if line.strip()), "")
        return ""

    return Child("the syncer", launch, say, why, may_end=may_end)


def _prepare(nice: int) -> None:
    end_with_parent(signal.SIGTERM)
    os.nice(nice)
