"""Decisions of the launcher before it starts anything."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from torchtitan_diloco.launch import connect, describe_failures, main, open_store
from torchtitan_diloco.placement import (
    LaunchError,
    Node,
    count_gpus,
    local_processes,
    read_node,
)


def check(task: Callable[[], object], expected: object) -> None:
    """Compare a result. A text is expected in the error."""
    if not isinstance(expected, str):
        assert task() == expected
        return
    with pytest.raises(LaunchError, match=expected):
        task()


@pytest.mark.parametrize(
    ("workers", "fsdp", "nodes", "gpus", "nproc", "expected"),
    [
        # On the CPU the config decides.
        (1, 0, 1, 0, None, 1),
        (4, 0, 2, 0, None, 2),
        (3, 2, 2, 0, None, 3),
        (3, 0, 2, 0, None, "diloco.workers=3 x parallel.fsdp=1 = 3 processes do not fit NNODES=2"),
        # Every GPU gets a process, unless the config fixes the world.
        (3, 0, 3, 8, None, 8),
        (2, 2, 1, 8, None, 4),
        (3, 0, 1, 8, None, "8 GPUs x NNODES=1 = 8 processes cannot be divided among diloco.work"),
        (2, 8, 1, 8, None, "parallel.fsdp=8 = 16 processes do not fit 8 GPUs x NNODES=1"),
        # NPROC goes before both.
        (2, 0, 1, 0, 4, 4),
        (2, 0, 1, 8, 2, 2),
        (2, 2, 1, 2, 4, 4),
        (2, 0, 1, 0, 3, "NPROC=3 x NNODES=1 = 3 processes cannot be divided"),
        (2, 2, 1, 0, 3, "parallel.fsdp=2 = 4 processes do not fit NPROC=3 x NNODES=1"),
    ],
)
def test_processes_of_a_node(
    workers: int, fsdp: int, nodes: int, gpus: int, nproc: int | None, expected: int | str
) -> None:
    given = {"workers": workers, "fsdp": fsdp, "nodes": nodes, "gpus": gpus}
    check(lambda: local_processes(**given, nproc=nproc), expected)


SECOND = {"NNODES": "2", "NODE_RANK": "1", "RDZV_ID": "job"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Node()),
        ({"NNODES": "1", "NODE_RANK": "0", "RDZV_ENDPOINT": "host:1"}, Node()),
        (SECOND | {"RDZV_ENDPOINT": "a"}, Node(2, 1, "a:29500", "job")),
        (SECOND | {"RDZV_ENDPOINT": "a:12"}, Node(2, 1, "a:12", "job")),
        (SECOND | {"RDZV_ENDPOINT": "[::1]"}, Node(2, 1, "[::1]:29500", "job")),
        (SECOND | {"RDZV_ENDPOINT": "[::1]:12"}, Node(2, 1, "[::1]:12", "job")),
        ({"RDZV_ENDPOINT": "host:1"}, "RDZV_ENDPOINT=host:1 .* but NNODES is not set"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1, but NNODES is not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 needs RDZV_ENDPOINT"),
        (SECOND | {"RDZV_ENDPOINT": "a:b"}, "RDZV_ENDPOINT=a:b: 'b' is no port"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "h"}, r"NODE_RANK \(now None\).* 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "h"}, "numbered 0 to 1"),
        ({"NNODES": "2", "RDZV_BACKEND": "c10d"}, "RDZV_BACKEND=c10d: nodes are numbered by"),
        ({"NNODES": "-1"}, "NNODES=-1 must be a whole number of at least 1"),
    ],
)
def test_variables_of_a_node(variables: dict[str, str], expected: Node | str) -> None:
    check(lambda: read_node(variables), expected)


@pytest.mark.parametrize("key", ["NPROC", "SHUTDOWN_SECONDS", "OMP_NUM_THREADS"])
def test_mistakes_are_one_line(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(key, "x")
    assert main(["--run.device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {key}=x must be a whole number")
    assert main(["--diloco.wrkers", "3"]) == 2
    assert "workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "selection", "expected"),
    [
        (8, None, 8),
        (0, "0,1", 0),  # set for all of a cluster, on a node without GPUs
        (8, "", 0),
        (8, "0,9,1", 1),  # CUDA stops at the first that does not exist
        (8, "GPU-8932f937,GPU-1", 2),
        (1, "MIG-1,MIG-2", 2),
    ],
)
def test_gpus(
    listed: int,
    selection: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = "".join(f"GPU {number}: A\\n  MIG 1g: (UUID)\\n" for number in range(listed))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if selection is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
    for version, found in (("2.13.0+cpu", 0), ("2.13.0", expected)):
        monkeypatch.setattr(metadata, "version", lambda _name, version=version: version)
        assert count_gpus() == found


@pytest.mark.parametrize(
    ("exit_codes", "code", "line"),
    [
        ({0: 3, 1: 2, 2: -signal.SIGTERM}, 2, "rank 1 failed with exit code 2"),
        ({2: 1, 0: 7}, 1, "rank 2 failed with exit code 1, rank 0 failed with exit code 7"),
        ({1: 3, 0: -signal.SIGSEGV}, 139, "rank 0 was ended by SIGSEGV"),
        ({1: 3, 0: 3}, 3, "rank 1 failed with exit code 3, rank 0 failed with exit code 3"),
        ({0: -signal.SIGTERM}, 143, "rank 0 was ended by SIGTERM"),
    ],
)
def test_ranks_that_failed_by_themselves_are_named(
    exit_codes: dict[int, int], code: int, line: str
) -> None:
    """Code 3 is that of ranks which have lost another one."""
    assert describe_failures(exit_codes) == (code, line)


@pytest.mark.parametrize("word", ["--help", "--print-config"])
def test_questions_are_answered_without_torch(word: str) -> None:
    """Also if the reader of the answer leaves after a line."""
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan_diloco.launch", word]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "diloco" in answer.stdout
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "torchtitan_diloco.config" in imported
    assert not imported & {"torch", "numpy"}
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


def test_nodes_meet_in_a_store_on_the_address_of_the_endpoint() -> None:
    store = open_store(Node(2, 0, "127.0.0.1:0"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=10)
    other = Node(2, 1, f"127.0.0.1:{store.port}")
    assert connect(other)[1] == ""
    assert "has not ended" in connect(other)[1], "it has been in this one"
    assert connect(Node(2, 1, other.endpoint, run_id="another"))[1] == ""
    assert connect(Node(2, 1, "127.0.0.2:1")) == (None, "Connection refused")
    with Node(2, 0, "192.0.2.1:0").listen() as listener:  # no address of this machine
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_the_limit_of_open_files_is_raised() -> None:
    code = """
import resource
from torchtitan_diloco.utils import raise_open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 50))
raise_open_files_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "50 50\n"
