"""Decisions of the launcher before it starts anything."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from torchtitan_diloco.launch import describe_failures, main, read_nodes

SECOND = {"NNODES": "2", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 0, "localhost:0")),
        ({"NNODES": "1", "NODE_RANK": "0", "RDZV_ENDPOINT": "a:1"}, (1, 0, "localhost:0")),
        (SECOND | {"RDZV_ENDPOINT": "a"}, (2, 1, "a:29500")),
        (SECOND | {"RDZV_ENDPOINT": "[::1]"}, (2, 1, "[::1]:29500")),
        (SECOND | {"RDZV_ENDPOINT": "[::1]:12"}, (2, 1, "[::1]:12")),
    ],
)
def test_variables_of_a_node(variables: dict[str, str], expected: tuple[int, int, str]) -> None:
    assert read_nodes(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"RDZV_ENDPOINT": "host:1"},
        {"NODE_RANK": "1"},
        {"NNODES": "2", "RDZV_ENDPOINT": "h"},
        {"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "h"},
    ],
)
def test_several_nodes_need_all_variables(variables: dict[str, str]) -> None:
    needed = "several nodes need NNODES .*, NODE_RANK .* and RDZV_ENDPOINT"
    with pytest.raises(ValueError, match=needed):
        read_nodes(variables)
    with pytest.raises(ValueError, match="h:99999 must be host:port"):
        read_nodes(SECOND | {"RDZV_ENDPOINT": "h:99999"})


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for key, value in {"NPROC": "x", "NNODES": "-1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}.items():
        with patch.dict(os.environ, {key: value}):  # also undoes what the launcher sets
            assert main(["--run.device", "cpu"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {key}={value} must be a whole number")
    assert main(["--diloco.wrkers", "3"]) == 2
    assert "workers" in capsys.readouterr().err


def test_processes_that_do_not_fit_are_named_before_any_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for processes, error in ((3, "3 processes do not divide"), (4, "size = 8 is no multiple of 4")):
        with (
            patch.dict(os.environ, {"NPROC": str(processes)}),
            patch("subprocess.Popen", side_effect=AssertionError("a process was started")),
        ):
            assert main(["--run.device", "cpu", "--training.global_batch_size", "8"]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exit_codes", "code", "line"),
    [
        ({0: 3, 1: 9, 2: -signal.SIGTERM}, 9, "rank 1 failed with exit code 9"),
        ({2: 1, 0: 7}, 1, "rank 2 failed with exit code 1"),
        ({1: 3, 0: -signal.SIGSEGV}, 139, "rank 0 was ended by SIGSEGV"),
        ({1: 3, 0: 3}, 3, "rank 1 failed with exit code 3"),
        ({0: -signal.SIGTERM}, 143, "rank 0 was ended by SIGTERM"),
    ],
)
def test_the_rank_that_failed_by_itself_is_named(
    exit_codes: dict[int, int], code: int, line: str
) -> None:
    """Code 3 is that of ranks which have lost another one."""
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in exit_codes.items()}
    assert describe_failures(failures) == (code, line)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["--help", "--print-config"])
def test_questions_are_answered_without_torch(word: str) -> None:
    """Also if the reader of the answer leaves after a line."""
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan_diloco.launch", word]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "diloco" in answer.stdout
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "torchtitan_diloco.config" in imported
    assert not imported & {"torch", "matplotlib"}
    assert word == "--print-config" or "numpy" not in imported
    piped = f"'{sys.executable}' -u -m torchtitan_diloco.launch {word} | head -n 1"
    assert subprocess.run(["bash", "-c", piped], capture_output=True).stderr == b""


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan_diloco.launch"]
    process = subprocess.Popen(
        [*command, "--run.folder", str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.endswith(" dataclasses\n"):  # config is imported after it
            os.kill(process.pid, signal.SIGINT)
            break
    assert "Traceback" not in process.stderr.read()
    assert process.wait() == -signal.SIGINT
