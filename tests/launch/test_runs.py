"""Whole runs of a stand-in training program under the launcher."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.running import launcher, run_launcher, wait_until_gone

ONLY_LOOPBACK = """
import fcntl, os, socket, struct, sys
socket.sethostname("a-name-that-nothing-resolves")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
    fcntl.ioctl(handle, 0x8914, struct.pack("16sh", b"lo", 0x1))  # SIOCSIFFLAGS: up
os.execv(sys.argv[1], sys.argv[1:])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_workers_are_two_processes_that_meet(tmp_path: Path) -> None:
    code, output = run_launcher(tmp_path / "console", "started,meet")
    assert code == 0
    assert "started rank=0 world=2" in output
    assert "started rank=1 world=2" in output
    assert "met rank=0 sum=1" in output
    assert "Warning" not in output, "torchrun's and torch's warnings stay away"
    assert len(output.splitlines()) == 4, output


def test_one_worker_is_this_very_process(tmp_path: Path) -> None:
    with launcher(tmp_path / "console", "started", workers=1) as running:
        assert running.wait() == 0
        assert f"started rank=0 world=1 pid={running.process.pid}" in running.output


def test_arguments_reach_every_rank_as_they_were_given(tmp_path: Path) -> None:
    code, output = run_launcher(
        tmp_path / "console", "arguments", "--data.corpus", "a b/$HOME/${local_rank}/$$.txt"
    )
    assert code == 0
    assert output.count("'a b/$HOME/${local_rank}/$$.txt'") == 2


def test_threads_are_shared_out_unless_the_user_has_decided(tmp_path: Path) -> None:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    code, output = run_launcher(tmp_path / "shared", "started")
    assert code == 0
    assert output.count(f"threads={max(1, cores // 2)}") == 2
    code, output = run_launcher(
        tmp_path / "decided", "started", environment={"OMP_NUM_THREADS": "7"}
    )
    assert code == 0
    assert output.count("threads=7") == 2


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    with (
        launcher(tmp_path / "a", "started,meet") as a,
        launcher(tmp_path / "b", "started,meet") as b,
    ):
        assert (a.wait(), b.wait()) == (0, 0)
        for output in (a.output, b.output):
            assert output.count("sum=1") == 2, output


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_launchers_are_two_nodes_of_one_run(tmp_path: Path, backend: str) -> None:
    both = {
        "NNODES": "2",
        "NPROC": "1",
        "RDZV_ENDPOINT": f"localhost:{free_port()}",
        "RDZV_BACKEND": backend,
    }
    zero, one = ({**both, "NODE_RANK": str(rank)} for rank in range(2))
    with (
        launcher(tmp_path / "one", "started,meet", environment=one) as second,
        launcher(tmp_path / "zero", "started,meet", environment=zero) as first,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
        outputs = [first.output, second.output]
    assert all("world=2" in output and "sum=1" in output for output in outputs), outputs
    if backend == "static":
        assert "rank=0" in outputs[0]
        assert "rank=1" in outputs[1]


def test_a_node_that_nobody_meets_says_so(tmp_path: Path) -> None:
    alone = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC": "1",
        "RDZV_ENDPOINT": f"localhost:{free_port()}",
    }
    timeout = ("--distributed.init_timeout_seconds", "2")
    code, output = run_launcher(tmp_path / "console", "started", *timeout, environment=alone)
    assert code == 1
    assert (
        f"error: node 1 of 2 did not meet the others at RDZV_ENDPOINT={alone['RDZV_ENDPOINT']} within 2 s"
        in output
    )
    assert "Traceback" not in output


def test_ctrl_c_while_waiting_for_other_nodes_ends_at_once(tmp_path: Path) -> None:
    alone = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC": "1",
        "RDZV_ENDPOINT": f"localhost:{free_port()}",
    }
    with launcher(tmp_path / "console", "started", environment=alone) as running:
        time.sleep(
            4
        )  # by now it is inside torch, which does not listen to Python's signal handlers
        running.process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        assert running.wait() == 130
        assert time.monotonic() - asked < 3
        assert "stopped by SIGINT; no training was running\n" in running.output


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("stop_signal", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_stop_signal_lets_every_rank_finish(
    tmp_path: Path, workers: int, stop_signal: signal.Signals, code: int
) -> None:
    with launcher(tmp_path / "console", "started,wait", workers=workers) as running:
        running.wait_for("waiting", times=workers)
        os.killpg(running.process.pid, stop_signal)  # as a terminal does
        assert running.wait() == code
        assert running.output.count(f"signal={stop_signal.name} count=1") == workers
        assert "Traceback" not in running.output
        wait_until_gone(running.training_pids())


def test_a_second_signal_kills_what_does_not_stop(tmp_path: Path) -> None:
    with launcher(tmp_path / "console", "started,hang") as running:
        running.wait_for("hanging", times=2)
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGINT)  # an immediate repetition is the same one
        running.wait_for("once more kills them")
        time.sleep(1)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 130
        assert running.output.endswith("killed, as SIGINT came again\n")
        wait_until_gone(running.training_pids())


def test_ranks_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    with launcher(
        tmp_path / "console", "started,hang", environment={"SHUTDOWN_SECONDS": "1"}
    ) as running:
        running.wait_for("hanging", times=2)
        running.process.terminate()
        assert running.wait() == 143
        assert "still training 1 s after SIGTERM; killed\n" in running.output
        wait_until_gone(running.training_pids())


def test_a_run_that_has_stopped_by_itself_may_take_its_time_to_close(tmp_path: Path) -> None:
    """In this very process, which has its own handlers back by then."""
    settings = {"SHUTDOWN_SECONDS": "1"}
    with launcher(
        tmp_path / "console", "started,wait,close", workers=1, environment=settings
    ) as running:
        running.wait_for("waiting")
        running.process.terminate()
        assert running.wait() == 143
        assert running.output.endswith("closed\n")


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher(tmp_path / "console", "started,hang") as running:
        running.wait_for("hanging", times=2)
        assert len(running.training_pids()) == 2
        running.process.kill()
        running.wait()
        wait_until_gone(running.training_pids())


def test_a_stop_signal_before_training_starts_leaves_nothing(tmp_path: Path) -> None:
    """While the launcher imports torch, and while its processes import their program."""
    for delay in (0.3, 1.0, 4.0):
        with launcher(
            tmp_path / f"console-{delay}", "started,wait", environment={"IMPORT_SECONDS": "9"}
        ) as running:
            time.sleep(delay)
            running.process.terminate()
            assert running.wait() == 143
            assert "error:" not in running.output
            assert "Traceback" not in running.output
            wait_until_gone(running.training_pids())


@pytest.mark.parametrize(
    ("does", "code", "own_words", "last_words"),
    [
        (
            "fail:1:3",
            3,
            "error: stand-in failed on rank 1\n",
            "error: rank 1 failed with exit code 3;",
        ),
        (
            "fail:0:2",
            2,
            "error: stand-in failed on rank 0\n",
            "error: rank 0 failed with exit code 2;",
        ),
        (
            "raise:1",
            1,
            "RuntimeError: stand-in: the loss exploded\n",
            "error: rank 1 failed with exit code 1;",
        ),
        ("kill:1", 137, "", "error: rank 1 was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_is_heard_and_ends_the_others(
    tmp_path: Path, does: str, code: int, own_words: str, last_words: str
) -> None:
    with launcher(tmp_path / "console", f"started,{does}") as running:
        assert running.wait() == code
        wait_until_gone(running.training_pids())
        assert running.output.count(own_words or last_words) == 1
        assert running.output.splitlines()[-1].startswith(last_words), running.output
        assert "ChildFailedError" not in running.output


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {"NPROC": "two"}, "error: NPROC=two is not a whole number"),
        ((), {"NNODES": "2"}, "error: NNODES=2 but RDZV_ENDPOINT is not set"),
        (("--diloco.workers", "3"), {"NPROC": "4"}, "cannot be divided among diloco.workers=3"),
        ((), {"SHUTDOWN_SECONDS": "soon"}, "error: SHUTDOWN_SECONDS=soon"),
        (("--diloco.wrkers", "3"), {}, "wrkers"),
    ],
)
def test_mistakes_are_said_at_once_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    code, output = run_launcher(
        tmp_path / "console", "started", *arguments, environment=environment
    )
    assert code == 2
    assert said in output
    assert "Traceback" not in output
    assert "started" not in output


@pytest.mark.parametrize("word", ["--help", "--print-config"])
def test_questions_are_answered_without_torch(word: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan_diloco.launch", word]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0
    assert "diloco" in answer.stdout
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines()
    }
    assert "torchtitan_diloco" in imported
    assert not imported & {"torch", "numpy"}


def test_an_answer_whose_reader_leaves_is_no_error() -> None:
    command = f"'{sys.executable}' -u -m torchtitan_diloco.launch --help | head -n 1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert answer.stderr == ""


def test_a_machine_with_only_the_loopback_interface_is_enough(tmp_path: Path) -> None:
    """In a network namespace of its own, whose host name nothing resolves."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-nu", "true"], stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("needs the right to make a network namespace (root on Linux)")
    into_it = ["unshare", "-nu", sys.executable, "-c", ONLY_LOOPBACK]
    with launcher(tmp_path / "console", "started,meet", inside=into_it) as running:
        assert running.wait() == 0, running.output
        assert running.output.count("sum=1") == 2
