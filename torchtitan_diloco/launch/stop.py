"""Ctrl-C, SIGTERM and SIGHUP: the first asks the training processes to finish, the second kills them.

A thread does it, because the main thread may be deep inside torch for minutes (waiting for other nodes), where Python
runs no signal handlers. The C part of Python writes every signal's number into a pipe at once, and the thread reads it.
"""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torchtitan_diloco.launch.mistakes import LaunchError
from torchtitan_diloco.utils import STOP_SIGNALS

DEFAULT_GRACE_SECONDS = 120.0
SAME_SIGNAL_SECONDS = 0.5
"""`timeout`, service managers and job systems signal a process and then its group: twice, but meant once."""


class StopSignals:
    """While entered, stop signals are passed on to the training processes, and nothing is left behind."""

    def __init__(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> None:
        self.first: signal.Signals | None = None
        self._left_to_training = False
        """Training was in this process when the signal came: it has heard it, and ends when it has saved."""
        self._grace_seconds = grace_seconds
        self._first_at = 0.0
        self._passed_on_to: set[int] = set()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._read_end, self._write_end = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="stop signals", daemon=True)

    def __enter__(self) -> "StopSignals":
        os.set_blocking(self._write_end, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for stop_signal in STOP_SIGNALS:
            # nohup and background jobs of scripts ignore some signals on purpose.
            if signal.getsignal(stop_signal) is not signal.SIG_IGN:
                self._previous_handlers[stop_signal] = signal.signal(
                    stop_signal, _leave_it_to_the_thread
                )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._write_end, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._previous_wakeup)
        for stop_signal, handler in self._previous_handlers.items():
            signal.signal(stop_signal, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def _watch(self) -> None:
        while True:
            readable, _, _ = select.select([self._read_end], [], [], 0.1)
            for number in os.read(self._read_end, 64) if readable else b"":
                if number == 0:
                    return
                if number in self._previous_handlers:
                    self._on_signal(signal.Signals(number))
            if self.first is not None and not self._left_to_training:
                self._pass_on(self.first)
                if time.monotonic() - self._first_at > self._grace_seconds:
                    self._kill(
                        self.first,
                        f"still training {self._grace_seconds:g} s after {self.first.name}; killed",
                    )

    def _on_signal(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self.first is not None:
            if now - self._first_at > SAME_SIGNAL_SECONDS:
                self._kill(received, f"killed, as {received.name} came again")
            return
        self.first, self._first_at = received, now
        if self._training_is_in_this_process(received):
            self._left_to_training = True
            return
        if not training_processes():
            self._kill(received, f"stopped by {received.name}; no training was running")
        _say(
            f"{received.name}: the training processes finish their step and stop; once more kills them"
        )

    def _training_is_in_this_process(self, received: signal.Signals) -> bool:
        return signal.getsignal(received) is not _leave_it_to_the_thread

    def _pass_on(self, received: signal.Signals) -> None:
        """To each training process once, those that are only just starting included."""
        for pid in training_processes() - self._passed_on_to:
            self._passed_on_to.add(pid)
            _send(pid, received)

    def _kill(self, received: signal.Signals, reason: str) -> None:
        for pid in training_processes():
            _send(-pid, signal.SIGKILL)  # the group: its data loading processes too
        _say(reason)
        os._exit(exit_code_of(received))


def _leave_it_to_the_thread(_signal: int, _frame: FrameType | None) -> None:
    """Having a handler at all is what makes Python write the signal into the pipe."""


def exit_code_of(received: signal.Signals) -> int:
    """What a shell reports for a program that a signal ended."""
    return 128 + received


def grace_seconds(setting: str) -> float:
    """SHUTDOWN_SECONDS as a number."""
    if not setting:
        return DEFAULT_GRACE_SECONDS
    if not setting.isdecimal():
        raise LaunchError(
            f"SHUTDOWN_SECONDS={setting} is not a whole number of seconds; set it to one or unset it"
        )
    return float(setting)


def training_processes() -> set[int]:
    """Children of this process that lead a process group of their own, as torchrun starts them (it keeps their ids to
    itself)."""
    children = {pid for pid, parent in _pids_with_parents() if parent == os.getpid()}
    return {pid for pid in children if _group_of(pid) == pid}


def _pids_with_parents() -> list[tuple[int, int]]:
    if Path("/proc/self/stat").exists():
        pairs = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if after_name[0] != "Z":
                pairs.append((int(folder.name), int(after_name[1])))
        return pairs
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    return [
        (int(pid), int(parent)) for pid, parent in (line.split() for line in listing.splitlines())
    ]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have just ended by itself
        os.kill(pid, number)


def _say(text: str) -> None:
    """Where nobody reads any more, there are still processes to be told."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
