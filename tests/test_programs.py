"""Processes of tests have this package, and programs in forks behave as new interpreters do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import torchtitan_diloco
from tests.programs import Fork, Program, run_program
from torchtitan_diloco.base.process import run_and_exit
from torchtitan_diloco.base.user import USER_ERROR


def test_a_new_interpreter_finds_this_package(tmp_path: Path) -> None:
    """In any folder, although another copy may be installed."""
    code = "import torchtitan_diloco; print(torchtitan_diloco.__file__)"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert found.strip() == torchtitan_diloco.__file__


def start_another(words: list[str]) -> int:
    """Start the command of this package, and print what it printed."""
    print("first")
    process = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_diloco", *words],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": "nowhere"},
        text=True,
    )
    printed, _ = process.communicate()
    print(printed, isinstance(process, Fork), os.environ["COLOR"], Path.cwd())
    return process.returncode


def test_a_program_and_the_one_that_it_starts(tmp_path: Path) -> None:
    """Each prints once, and ends with its own code."""
    program = Program(
        tmp_path / "console.txt",
        ["--version"],
        main=start_another,
        folder=tmp_path,
        variables=os.environ | {"COLOR": "blue"},
    )
    with program:
        version = f"torchtitan_diloco {torchtitan_diloco.__version__}\n"
        assert program.end() == f"first\n{version} True blue {tmp_path}\n"
    assert run_program(tmp_path / "console.txt", ["train", "--version"]).stdout == version
    ended = run_program(tmp_path / "console.txt", ["nothing"])
    assert (ended.returncode, ended.stdout) == (USER_ERROR, "")
    assert ended.stderr.startswith("error: there is no command nothing")


def wait_for_a_signal(_: list[str]) -> int:
    print("waits", flush=True)
    signal.pause()
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_program(tmp_path: Path, number: signal.Signals) -> None:
    with Program(tmp_path / "console.txt", [], main=wait_for_a_signal) as program:
        program.line("waits")
        program.send_signal(number)
        assert program.wait() == -number


def pass_on(_: list[str]) -> int:
    """Start a child that ends by a signal which this process handles."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen([sys.executable, "-m", "tests.test_programs"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"waits\n"
    child.terminate()
    return 10 if child.wait() == -signal.SIGTERM else 11


def test_a_child_has_no_handlers_of_its_parent(tmp_path: Path) -> None:
    with Program(tmp_path / "console.txt", [], main=pass_on) as program:
        program.end(10)


if __name__ == "__main__":
    run_and_exit(wait_for_a_signal, [])
