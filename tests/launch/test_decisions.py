"""What the launcher decides before it starts anything."""

import signal
from pathlib import Path

import pytest

from torchtitan_diloco.launch.gpus import installed_gpus, visible_gpus
from torchtitan_diloco.launch.mistakes import LaunchError
from torchtitan_diloco.launch.place import Place, read_place
from torchtitan_diloco.launch.processes import local_processes
from torchtitan_diloco.launch.stop import exit_code_of, grace_seconds
from torchtitan_diloco.launch.torchrun import (
    describe_failure,
    exit_code_of_run,
    settings_for_processes,
    torchrun_arguments,
)
from torchtitan_diloco.utils import available_cores


@pytest.mark.parametrize(
    ("workers", "fsdp", "nodes", "gpus", "asked", "expected"),
    [
        # On the CPU the config decides.
        (1, 0, 1, 0, None, 1),
        (2, 0, 1, 0, None, 2),
        (2, 3, 1, 0, None, 6),
        (4, 0, 2, 0, None, 2),
        (3, 2, 2, 0, None, 3),
        # Every GPU gets a process, unless the config fixes the world.
        (1, 0, 1, 1, None, 1),
        (2, 0, 1, 8, None, 8),
        (3, 0, 3, 8, None, 8),
        (2, 2, 1, 8, None, 4),
        (2, 8, 2, 8, None, 8),
        # NPROC goes before both.
        (2, 0, 1, 0, 4, 4),
        (2, 0, 1, 8, 2, 2),
        (2, 0, 2, 0, 1, 1),
        (2, 2, 2, 0, 2, 2),
        (2, 2, 1, 2, 4, 4),
    ],
)
def test_local_processes(
    workers: int, fsdp: int, nodes: int, gpus: int, asked: int | None, expected: int
) -> None:
    assert (
        local_processes(workers=workers, fsdp=fsdp, nodes=nodes, gpus=gpus, asked=asked) == expected
    )


@pytest.mark.parametrize(
    ("workers", "fsdp", "nodes", "gpus", "asked", "named"),
    [
        (
            3,
            0,
            1,
            8,
            None,
            ["8 GPUs x NNODES=1", "diloco.workers=3", "a divisor of 8", "--run.device cpu"],
        ),
        (2, 0, 1, 1, None, ["1 GPUs", "diloco.workers=2", "--run.device cpu"]),
        (2, 0, 1, 0, 3, ["NPROC=3", "diloco.workers=2", "change NPROC"]),
        (3, 0, 2, 0, None, ["diloco.workers=3", "NNODES=2", "a multiple of 2"]),
        (2, 2, 1, 0, 3, ["NPROC=3", "3 processes", "4 processes", "unset NPROC"]),
        (3, 1, 2, 0, None, ["3 processes", "NNODES=2"]),
        (2, 8, 1, 8, None, ["parallel.fsdp=8", "16 on each", "8 GPUs", "add nodes"]),
    ],
)
def test_totals_that_do_not_fit(
    workers: int, fsdp: int, nodes: int, gpus: int, asked: int | None, named: list[str]
) -> None:
    with pytest.raises(LaunchError) as mistake:
        local_processes(workers=workers, fsdp=fsdp, nodes=nodes, gpus=gpus, asked=asked)
    assert [words for words in named if words not in str(mistake.value)] == [], str(mistake.value)


def test_one_node_needs_no_environment() -> None:
    assert read_place({}) == Place()
    assert read_place({"NNODES": "1", "NODE_RANK": "0", "RDZV_ENDPOINT": "host:1"}) == Place()
    assert read_place({"NPROC": "4"}) == Place(processes=4)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("node0", "node0:29500"),
        ("node0:1234", "node0:1234"),
        ("[fe80::1]", "[fe80::1]:29500"),
        ("[fe80::1]:1234", "[fe80::1]:1234"),
    ],
)
def test_where_nodes_meet(endpoint: str, expected: str) -> None:
    place = read_place(
        {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": endpoint, "RDZV_ID": "job-7"}
    )
    assert place == Place(nodes=2, node_rank=1, endpoint=expected, run_id="job-7")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"NPROC": "0"}, "NPROC=0 is not a whole number from 1 up"),
        ({"NNODES": "-1"}, "NNODES=-1 is not"),
        ({"RDZV_ENDPOINT": "host:1"}, "RDZV_ENDPOINT=host:1 is set but NNODES is not"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 is set but NNODES is not"),
        ({"NODE_RANK": "1", "NNODES": "1"}, "the only node has NODE_RANK=0"),
        (
            {"NNODES": "2", "NODE_RANK": "0"},
            "RDZV_ENDPOINT is not set; set it to host:port of the first node",
        ),
        (
            {"NNODES": "2", "RDZV_ENDPOINT": "h"},
            "NODE_RANK is not set; set it to this node's number, 0 to 1",
        ),
        ({"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "h"}, "nodes are numbered 0 to 1"),
        (
            {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "h:0"},
            "RDZV_ENDPOINT=h:0 is not host:port",
        ),
        (
            {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": ":9"},
            "RDZV_ENDPOINT=:9 is not host:port",
        ),
        ({"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "fe80::1"}, "put it in brackets"),
    ],
)
def test_an_environment_that_does_not_fit(environment: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError) as mistake:
        read_place(environment)
    assert said in str(mistake.value)


def test_nodes_that_number_themselves_need_no_rank() -> None:
    place = read_place({"NNODES": "2", "RDZV_ENDPOINT": "h", "RDZV_BACKEND": "c10d"})
    assert not any(
        word.startswith("--node-rank") for word in torchrun_arguments(place, 1, 60, "module", [])
    )


@pytest.mark.parametrize(
    ("installed", "selection", "expected"),
    [
        (8, None, 8),
        (0, None, 0),
        (0, "0,1", 0),  # set for all of a cluster, on a node without GPUs
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,3", 2),
        (8, "0,9,1", 1),  # CUDA stops at the first that is not there
        (8, "GPU-8932f937,GPU-1", 2),
        (1, "MIG-1,MIG-2", 2),
    ],
)
def test_visible_gpus(installed: int, selection: str | None, expected: int) -> None:
    assert visible_gpus(installed, selection) == expected


def test_gpus_are_counted_as_the_driver_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf 'GPU 0: A (UUID: GPU-1)\\n  MIG 1g: (UUID: MIG-1)\\nGPU 1: A (UUID: GPU-2)\\n'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert installed_gpus() == 2


def test_settings_for_processes() -> None:
    alone = settings_for_processes(Place(), 2)
    assert alone["OMP_NUM_THREADS"] == str(max(1, available_cores() // 2))
    assert alone["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert settings_for_processes(Place(), 10 * available_cores())["OMP_NUM_THREADS"] == "1"
    assert "GLOO_SOCKET_IFNAME" in settings_for_processes(Place(nodes=2, endpoint="127.0.0.1:1"), 2)
    assert "GLOO_SOCKET_IFNAME" not in settings_for_processes(Place(nodes=2, endpoint="node0:1"), 2)


@pytest.mark.parametrize(
    ("exit_codes", "code", "said"),
    [
        (
            {1: 3, 0: -signal.SIGTERM},
            3,
            "error: rank 1 failed with exit code 3; the message of the first to fail is above",
        ),
        (
            {2: 1, 0: 7},
            1,
            "error: rank 0 failed with exit code 7, rank 2 failed with exit code 1; the message",
        ),
        ({0: -signal.SIGSEGV}, 139, "error: rank 0 was ended by SIGSEGV"),
        ({0: -signal.SIGTERM}, 143, "error: rank 0 was ended by SIGTERM"),
    ],
)
def test_failures_in_one_line(exit_codes: dict[int, int], code: int, said: str) -> None:
    assert exit_code_of_run(exit_codes) == code
    line = describe_failure(exit_codes)
    assert line.startswith(said)
    assert "\n" not in line


def test_exit_codes_and_grace() -> None:
    assert exit_code_of(signal.SIGINT) == 130
    assert grace_seconds("") > 0
    assert grace_seconds("5") == 5
    with pytest.raises(LaunchError, match="SHUTDOWN_SECONDS=1m"):
        grace_seconds("1m")
