"""How a process ends: the signals that stop it, and its exit."""

import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run after the current step. Job systems send SIGUSR1 before a time limit."""
STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which the ranks write the stacks of all threads to a file and continue."""
SAME_SIGNAL_SECONDS = 0.5
"""Service managers signal a process and then its group. Both signals count as one."""


def run_and_exit(main: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Call `main` and exit with its code, without the clean-up of the interpreter.

    After a failure, clean-up would wait for other ranks, and tell them that this one ended
    normally. Without it, the rank that fails first is the first to exit, and its exit code is that
    of the run. After a success, `main` has closed what others wait for.

    Ctrl-C ends the process without a traceback, also while it imports torch or waits in C++, where
    no handler of Python runs, until torchrun's agent, the trainer or `raise_on_interrupt` handles
    it. If nobody reads the output any more, as after `| head`, the process ends without a word.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(100_000)  # else collections take a tenth of the time of importing torch
    try:
        code = main(arguments)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as end:  # of a parser of options
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not _is_read(sys.stdout):
            code = 128 + signal.SIGPIPE
        else:
            code = 1
            say(traceback.format_exc().rstrip())
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before the start
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


class ExitSignals:
    """Let signals end this process with a SystemExit, which `check` raises again.

    Python drops what a handler raises in a hook of a fork or in a finalizer. Therefore, what runs
    until a signal comes calls `check` now and then.
    """

    def __init__(self) -> None:
        self._has_come = False
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._exit)

    def _exit(self, *_: object) -> None:
        self._has_come = True
        sys.exit()

    def check(self) -> None:
        """Raise a SystemExit if a signal has come."""
        if self._has_come:
            sys.exit()


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt on Ctrl-C again, for a command that then has something to do."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say(text: str) -> None:
    """Print a line to stderr, unless nobody reads it any more: training still has to be saved.

    It is written at once, with its end, as lines of several processes may meet in one console.
    """
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _is_read(stream: TextIO) -> bool:
    """Return whether the other end of a pipe is open. True for a file or a terminal."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are always reported
    return not poll.poll(0)
