"""How a process ends: the signals that stop it, and its exit."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

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
