"""Training program for the tests of the launcher, whose process is killed before its first step."""

import os
import signal
import sys
from unittest.mock import patch

from torchtitan_diloco.base.process import run_and_exit


def main(arguments: list[str]) -> int:
    from torchtitan_diloco.launching.rank import train
    from torchtitan_diloco.trainer import Trainer

    def be_killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(Trainer, "run", be_killed):
        return train(arguments)


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
