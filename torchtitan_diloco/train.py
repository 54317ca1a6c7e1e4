"""Entry point of a training process. Everything is imported after the process is prepared
for it."""

import sys

from torchtitan_diloco.base.process import run_and_exit


def main(arguments: list[str]) -> int:
    """Train, and return the exit code."""
    from torchtitan_diloco.launching.launch import follow_launcher

    follow_launcher()
    from torchtitan_diloco.launching.rank import train

    return train(arguments)


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
