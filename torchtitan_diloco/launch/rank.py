"""One training process, as the launcher starts it: `python -m torchtitan_diloco.launch.rank LAUNCHER MODULE ARGUMENTS`.

Between the start of the process and the moment when the training program takes over the signals lie seconds of
imports; and a launcher that is killed (out of memory, a second Ctrl-C) cannot tell its processes. This file covers
both.
"""

import importlib
import os
import signal
import sys
import threading
import time
from types import FrameType

from torchtitan_diloco.launch.stop import exit_code_of
from torchtitan_diloco.utils import STOP_SIGNALS

LOOK_AFTER_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    launcher, module, *training_arguments = arguments
    for stop_signal in STOP_SIGNALS:
        if signal.getsignal(stop_signal) is not signal.SIG_IGN:
            signal.signal(stop_signal, _stop_before_training)
    threading.Thread(
        target=_end_with, args=(int(launcher),), name="end with launcher", daemon=True
    ).start()
    result: int = importlib.import_module(module).main(training_arguments)
    return result


def _stop_before_training(received: int, _frame: FrameType | None) -> None:
    os._exit(exit_code_of(signal.Signals(received)))


def _end_with(launcher: int) -> None:
    """Kill this process, and its data loading processes, once the launcher is gone."""
    while os.getppid() == launcher:
        time.sleep(LOOK_AFTER_SECONDS)
    leads_its_group = os.getpgrp() == os.getpid()
    os.kill(-os.getpid() if leads_its_group else os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
