"""Runs of a stand-in training program under the launcher."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.running import launcher, two_nodes
from torchtitan_diloco.utils import available_cores

ONLY_LOOPBACK = """
import fcntl, os, socket, struct, sys
socket.sethostname("a-name-that-nothing-resolves")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
    fcntl.ioctl(handle, 0x8914, struct.pack("16sh", b"lo", 0x1))  # SIOCSIFFLAGS: up
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_two_runs_at_once(tmp_path: Path) -> None:
    argument = "a b/$HOME/${local_rank}/$$.txt"
    with (
        launcher(tmp_path / "a", "meet", "--data.corpus", argument) as a,
        launcher(tmp_path / "b", "meet", environment={"OMP_NUM_THREADS": "7"}) as b,
    ):
        assert (a.wait(), b.wait()) == (0, 0), a.output + b.output
    for run, threads in ((a, max(1, available_cores() // 2)), (b, 7)):
        for rank in range(2):
            assert f"started rank={rank} threads={threads}" in run.output
            assert f"met rank={rank} of 2 sum=1" in run.output
        assert len(run.output.splitlines()) == 7, run.output
    assert a.output.count(repr(argument)) == 2


@pytest.mark.parametrize(
    ("rank", "missing", "reason"),
    [(0, "node 1", ""), (1, "the first node", " (Connection refused)")],
)
def test_a_node_that_no_other_node_meets(
    tmp_path: Path, rank: int, missing: str, reason: str
) -> None:
    variables = {**two_nodes(), "NODE_RANK": str(rank)}
    timeout = ("--distributed.init_timeout_seconds", "2")
    with launcher(tmp_path / "console", "wait", *timeout, environment=variables) as run:
        assert run.wait() == 1
    endpoint = variables["RDZV_ENDPOINT"]
    waiting, error = run.output.splitlines()
    assert waiting.startswith(f"node {rank} of 2: waiting for {missing} at {endpoint}")
    meeting = f"did not meet the others at RDZV_ENDPOINT={endpoint} within 2 s"
    assert error.startswith(f"error: node {rank} of 2 {meeting}")
    assert error.endswith(f"(no answer from {missing} at {endpoint}{reason})")


def test_ctrl_c_while_waiting_for_other_nodes(tmp_path: Path) -> None:
    """torch waits in C++ then, where no Python signal handler runs."""
    variables = {**two_nodes(), "NODE_RANK": "1"}
    with launcher(tmp_path / "console", "wait", environment=variables) as run:
        run.wait_for("node 1 of 2: waiting for the first node at localhost:")
        time.sleep(0.5)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert "stopped by SIGINT; no training was running\n" in run.output


@pytest.mark.parametrize(
    ("workers", "inside", "signals", "code"),
    [
        (1, [], [signal.SIGHUP], 129),
        (2, [], [signal.SIGINT], 130),
        (1, ["nohup"], [signal.SIGHUP, signal.SIGTERM], 143),  # the first one is ignored
    ],
)
def test_a_stop_signal_lets_every_rank_finish(
    tmp_path: Path, workers: int, inside: list[str], signals: list[signal.Signals], code: int
) -> None:
    with launcher(tmp_path / "console", "wait", workers=workers, inside=inside) as run:
        run.wait_for("waiting", times=workers)
        for number in signals:
            os.killpg(run.process.pid, number)  # as a terminal does
        assert run.wait() == code
        assert run.output.count("signal=SIGTERM count=1") == workers
        assert "Traceback" not in run.output
        run.wait_until_ranks_are_gone()


def test_a_second_signal_kills(tmp_path: Path) -> None:
    with launcher(tmp_path / "console", "hang", workers=1) as run:
        run.wait_for("hanging")
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)  # an immediate repetition is the same one
        run.wait_for("a second signal kills it")
        time.sleep(1)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.output.endswith("killed, as SIGINT came again\n")
        run.wait_until_ranks_are_gone()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_do_not_stop_are_killed(tmp_path: Path, by: signal.Signals) -> None:
    """After some time, and at once if the launcher itself was killed."""
    if by == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("needs prctl")
    variables = {"SHUTDOWN_SECONDS": "1"}
    with launcher(tmp_path / "console", "hang", workers=1, environment=variables) as run:
        run.wait_for("hanging")
        run.process.send_signal(by)
        assert run.wait() == 128 + by
        run.wait_until_ranks_are_gone()
    late = "still training 1 s after SIGTERM; killed\n"
    assert run.output.endswith(late) == (by == signal.SIGTERM)


def test_a_stop_signal_while_ranks_import(tmp_path: Path) -> None:
    variables = {"IMPORT_SECONDS": "60"}
    with launcher(tmp_path / "console", "wait", workers=1, environment=variables) as run:
        run.wait_for("importing")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert "error:" not in run.output
        assert "Traceback" not in run.output
        run.wait_until_ranks_are_gone()


@pytest.mark.parametrize(
    ("does", "workers", "code", "message", "ending"),
    [
        ("raise:0", 1, 1, "RuntimeError: stand-in: the loss exploded\n", "failed with exit code 1"),
        ("kill:0", 1, 137, "error: rank 0 was killed by SIGKILL", "was killed by SIGKILL"),
        ("fail:1:7,hang", 2, 7, "error: stand-in failed on rank 1\n", "failed with exit code 7"),
    ],
)
def test_a_failing_rank_is_named_and_ends_the_others_also_if_they_hang(
    tmp_path: Path, does: str, workers: int, code: int, message: str, ending: str
) -> None:
    options = ("--run.restarts", "0")
    with launcher(tmp_path / "console", does, *options, workers=workers) as run:
        assert run.wait() == code
        run.wait_until_ranks_are_gone()
    assert run.output.count(message) == 1
    last = run.output.splitlines()[-1]
    assert last.startswith(f"error: rank {workers - 1} {ending}"), run.output


def test_a_machine_with_only_the_loopback_interface(tmp_path: Path) -> None:
    """The run is in a network namespace of its own, whose host name nothing resolves."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-nu", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace (root on Linux)")
    inside = [unshare, "-nu", sys.executable, "-c", ONLY_LOOPBACK]
    with launcher(tmp_path / "console", "meet", inside=inside) as run:
        assert run.wait() == 0, run.output
    assert run.output.count("sum=1") == 2
