"""How a process ends if nobody reads its output any more, and on Ctrl-C."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco.base.log import logger, start_logging
from torchtitan_diloco.base.process import say

COMMAND = [sys.executable, "-u", "-m", "torchtitan_diloco"]
HANGS = """
import ctypes
print("hangs", flush=True)
ctypes.PyDLL(None).sleep(600)  # as C code that lets no handler of Python run
"""


@pytest.mark.parametrize("words", ["--help", "plan --presets"])
def test_the_reader_of_an_answer_may_leave_after_a_line(words: str, tmp_path: Path) -> None:
    piped = f"'{sys.executable}' -u -m torchtitan_diloco {words} | head -n 1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, cwd=tmp_path, check=False)
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


@pytest.mark.parametrize(("error", "code"), [("BrokenPipeError()", 1), ("SystemExit('no')", 1)])
def test_another_pipe_that_breaks_is_an_error(error: str, code: int) -> None:
    program = "import sys\nfrom torchtitan_diloco.base.process import run_and_exit\n"
    program += f"def main(_):\n    raise {error}\nrun_and_exit(main, [])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == ("Pipe" in error)


def test_training_continues_if_nobody_reads_its_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        start_logging()
        logger.info("step 1")
        os.close(reader)
        for step in (2, 3, 4):
            logger.info(f"step {step}")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["warning: nobody reads the log any more; training continues"]


@pytest.mark.parametrize(
    ("hangs", "command"),
    [
        ("msgspec", [*COMMAND, "plan"]),
        ("msgspec", [*COMMAND, "train"]),
        ("msgspec", [sys.executable, "-m", "torchtitan_diloco.train"]),
        ("msgspec", [*COMMAND, "compare"]),
        ("tokenizers", [*COMMAND, "tokenizer", "--source", "stdlib", "--out", "new.json"]),
    ],
)
def test_ctrl_c_ends_a_command_that_imports_or_computes_in_c(
    hangs: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / f"{hangs}.py").write_text(HANGS)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert errors == ""


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the line of another process may come before its end."""
    written = list[str]()

    class Console(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Console())
    say("error: no")
    assert written == ["error: no\n"]


def test_a_signal_in_a_hook_of_a_fork_ends_the_process() -> None:
    """Python drops what the handler raises there."""
    program = """
import os, signal, time
from torchtitan_diloco.base.process import ExitSignals
signals = ExitSignals()
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
if os.fork() == 0:
    os._exit(0)
print("continues", flush=True)
while True:
    signals.check()
    time.sleep(0.01)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "continues\n"), ended.stderr
