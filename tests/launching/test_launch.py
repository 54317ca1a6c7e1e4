"""Decisions of the launcher before it starts anything."""

import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.launching.running import PATIENCE_SECONDS, launcher, start_interpreter
from tests.ports import free_port
from tests.test_trainer import settings, words
from tests.waiting import wait_until
from torchtitan_diloco.base.hardware import available_cores
from torchtitan_diloco.base.user import FENCED, USER_ERROR
from torchtitan_diloco.config import Config, from_command_line, load_config, parse_config
from torchtitan_diloco.launching.launch import (
    EXIT_CODE,
    LAUNCHER,
    MESSAGES,
    describe_failures,
    end_run,
    folder_of_messages,
    main,
)
from torchtitan_diloco.launching.nodes import read_nodes

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
    assert read_nodes(variables)[:3] == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"RDZV_ENDPOINT": "host:1"},
        {"NODE_RANK": "1"},
        {"NNODES": "2", "RDZV_ENDPOINT": "h"},
    ],
)
def test_several_nodes_need_all_variables(variables: dict[str, str]) -> None:
    needed = "several nodes need NNODES .*, NODE_RANK .* and RDZV_ENDPOINT"
    with pytest.raises(ValueError, match=needed):
        read_nodes(variables)
    with pytest.raises(ValueError, match="h:99999 must be host:port"):
        read_nodes(SECOND | {"RDZV_ENDPOINT": "h:99999"})
    with pytest.raises(ValueError, match=r"NODE_RANK=5 is too large for NNODES=2: .* from 0 to 1"):
        read_nodes(SECOND | {"RDZV_ENDPOINT": "h", "NODE_RANK": "5"})


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"NPROC": "x", "NNODES": "-1", "OMP_NUM_THREADS": "x"}
    for key, value in {**wrong, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}.items():
        with patch.dict(os.environ, {key: value}):  # also undoes what the launcher sets
            assert main(["--run.device", "cpu"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {key}={value} must be a whole number")
    assert main(["--diloco.wrkers", "3"]) == 2
    assert "workers" in capsys.readouterr().err
    for processes, error in (
        (3, "3 processes do not divide"),
        (4, "size = 8 is not a multiple of 4"),
    ):
        with patch.dict(os.environ, {"NPROC": str(processes)}):
            assert main(["--run.device", "cpu", "--training.global_batch_size", "8"]) == 2
        assert error in capsys.readouterr().err
    with (
        patch("torch.distributed.launcher.api.elastic_launch", side_effect=OSError("no memory")),
        patch.dict(os.environ),
    ):
        assert main(["--run.device", "cpu"]) == 1
    assert "error: the processes could not be started: no memory\n" in capsys.readouterr().err


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


def test_the_help_needs_neither_torch_nor_numpy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan_diloco", "train", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "diloco" in answer.stdout
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "torchtitan_diloco.config" in imported
    assert not imported & {"torch", "matplotlib", "numpy"}


@pytest.mark.parametrize("word", ["--help", "--print-config"])
def test_the_reader_of_an_answer_may_leave_after_a_line(word: str) -> None:
    piped = f"'{sys.executable}' -u -m torchtitan_diloco train {word} | head -n 1"
    assert subprocess.run(["bash", "-c", piped], capture_output=True).stderr == b""


# --- --print-config -------------------------------------------------------------------------------


def print_config(
    capsys: pytest.CaptureFixture[str], name: str, *words: str
) -> tuple[int, Config, str]:
    """Return the exit code, the printed config, and what was said beside it."""
    code = main(["--config", name, "--print-config", *words])
    printed = capsys.readouterr()
    return code, parse_config(printed.out, "printed"), printed.err


def test_print_config_prints_what_starts_the_same_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_diloco.launching.launch.available_cores", lambda: 2)
    assert print_config(capsys, "demo", "--run.seed", "9") == (
        0,
        load_config("demo", {"run.seed": "9"}),
        "",
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--data.corpus nothere", 'data.corpus = "nothere" does not exist: correct the path'),
        ("--model.kv_heads 2", "kv_heads"),
        (
            "--checkpoint.resume nothere",
            'checkpoint.resume = "nothere": this folder does not exist: give that of a checkpoint,',
        ),
        (
            "--checkpoint.resume nothere/worker-0/step-00000002",
            '/step-00000002": this folder does not exist',
        ),
        (f"--checkpoint.resume {5000 * 'x'}", "this folder cannot be read (File name too long): "),
        ("--checkpoint.resume docs", 'resume = "docs": this folder has no complete checkpoint: g'),
        ("--checkpoint.mirror s3:/a", "checkpoint.mirror: s3:... is no location; give s3://BUCKET"),
        (f"--checkpoint.mirror {5000 * 'x'}", "it cannot be read (File name too long); correct"),
    ],
)
def test_a_printed_config_that_cannot_train_is_an_error(
    capsys: pytest.CaptureFixture[str], words: str, reason: str
) -> None:
    code, config, error = print_config(capsys, "debug", *words.split())
    assert code == USER_ERROR
    assert config == from_command_line(["--config", "debug", *words.split()])
    assert error.startswith("error: 1 thing to do before this run can start:\n  ")
    assert reason in error


ANY = "--run.device auto"
UNEVEN = "--training.batch_size 2 --training.global_batch_size"


@pytest.mark.parametrize(
    ("words", "variables", "gpus", "code", "told"),
    [
        (f"{UNEVEN} 7", {}, 0, 2, "error: training.global_batch_size = 7 is not a multiple of 2"),
        (
            f"{ANY} {UNEVEN} 7",
            {},
            8,
            2,
            "error: training.global_batch_size = 7 is not a multiple of 2",
        ),
        (f"{UNEVEN} 20", {"NNODES": "2"}, 0, 0, ""),
        (f"{ANY} {UNEVEN} 20", {"NPROC": "8"}, 0, 2, "error: training.global_batch_size = 20 is"),
        (f"{ANY} {UNEVEN} 20", {}, 8, 0, "warning: with 8 processes on each node, as on this"),
        ("", {"NPROC": "3"}, 0, 2, "error: 3 processes do not divide into diloco.workers = 2"),
        (ANY, {"NNODES": "3"}, 0, 0, "warning: with "),
        ("", {"NNODES": "3"}, 8, 2, "error: 3 processes do not divide"),
        (
            f"{ANY} --parallel.fsdp 3",
            {"NNODES": "4"},
            0,
            2,
            "x parallel.fsdp = 3 is 6 processes, but 8",
        ),
        ("--islands.local 3", {"NPROC": "2"}, 0, 0, ""),
    ],
)
def test_a_printed_config_has_processes_that_fit(
    words: str,
    variables: dict[str, str],
    gpus: int,
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only those that follow from the GPUs of this machine are a warning, as nodes may differ."""
    with (
        patch("torchtitan_diloco.launching.launch.available_cores", lambda: 8),
        patch("torch.cuda.device_count", lambda: gpus),
        patch.dict(os.environ, variables),
    ):
        ended, _, said = print_config(capsys, "debug", *words.split())
    assert ended == code, said
    assert told in said
    assert bool(said) == bool(told)


def test_warnings_beside_a_printed_config_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--training.steps 10 --lr_schedule.warmup 11"
    code, _, said = print_config(capsys, "debug", *words.split())
    warmup = "warning: lr_schedule.warmup = 11 is longer than the run of 10 steps, so the peak"
    assert code == 0
    assert [line for line in said.splitlines() if line.startswith(warmup)]
    code, _, said = print_config(capsys, "debug", *words.split(), "--data.corpus", "nothere")
    assert code == USER_ERROR
    assert warmup in said


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        ("--diloco.workers 4", {}, ""),
        ("--diloco.workers 200", {}, "diloco.workers = 200: this machine would start 200 pro"),
        ("--diloco.workers 200", {"NNODES": "50"}, ""),
        ("--parallel.fsdp 3", {}, "diloco.workers = 2 x parallel.fsdp = 3: this machine "),
        ("--diloco.workers 4", {"NPROC": "8"}, "NPROC=8: this machine would start 8 processes"),
        ("--islands.local 50", {}, "islands.local = 50: this machine would start 50 processes"),
    ],
)
def test_more_processes_than_cores_are_a_warning(
    words: str, variables: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        patch("torchtitan_diloco.launching.launch.available_cores", lambda: 4),
        patch.dict(os.environ, variables),
    ):
        _, _, said = print_config(capsys, "debug", *words.split())
    warnings = [line for line in said.splitlines() if " processes and has 4 cores, which " in line]
    assert len(warnings) == bool(told)
    assert told in "".join(warnings)


@pytest.mark.parametrize(
    ("given", "level"), [("info", "INFO"), ("", "ERROR"), ("loud", "ERROR"), (" Debug ", "DEBUG")]
)
def test_the_log_level_may_be_written_in_any_way(given: str, level: str) -> None:
    """torch reads it from the environment."""
    agent = logging.getLogger("torch.distributed.elastic")
    before = agent.level
    with patch.dict(os.environ, {"LOGLEVEL": given}):
        assert main(["--diloco.wrkers", "3"]) == USER_ERROR
        assert os.environ["LOGLEVEL"] == level
        chosen = logging.getLevelName(agent.level)
    agent.setLevel(before)
    assert chosen == level


def test_a_start_warns_of_more_processes_than_cores(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch("torchtitan_diloco.launching.launch.available_cores", lambda: 1),
        patch("torch.distributed.launcher.api.elastic_launch", side_effect=OSError("no memory")),
        patch.dict(os.environ),
    ):
        assert main(["--run.device", "cpu", "--diloco.workers", "3"]) == 1
    assert "start 3 processes and has 1 core, which they share" in capsys.readouterr().err


# --- runs of the stand-in program -----------------------------------------------------------------


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
        launcher(tmp_path / "a", "meet", "--data.source", argument) as a,
        launcher(tmp_path / "b", "meet", OMP_NUM_THREADS="7") as b,
    ):
        assert (a.wait(), b.wait()) == (0, 0), a.printed() + b.printed()
    for run, threads in ((a, max(1, available_cores() // 2)), (b, 7)):
        for rank in range(2):
            assert f"rank={rank} threads={threads}" in run.printed()
            assert f"met rank={rank} of 2 sum=1" in run.printed()
        assert a.printed().count(repr(argument)) == 2


def test_a_node_that_no_other_node_meets(tmp_path: Path) -> None:
    """Ctrl-C ends it as well: torch waits in C++ then, where no Python signal handler runs."""
    ends = [f"localhost:{free_port()}" for _ in range(2)]
    first, second = (
        dict[str, Any](NNODES="2", NPROC="1", NODE_RANK=str(rank), RDZV_ENDPOINT=end)
        for rank, end in enumerate(ends)
    )
    timeout = ("--distributed.init_timeout_seconds", "2")
    with (
        launcher(tmp_path / "0", "wait", *timeout, **first) as alone,
        launcher(tmp_path / "1", "wait", **second) as stopped,
        launcher(tmp_path / "2", "wait", *timeout, **second) as late,
    ):
        stopped.wait_for("node 1 of 2: waiting for the others at localhost:")
        assert alone.wait() == 1
        meeting = f"RDZV_ENDPOINT={ends[0]} within 2 s"
        assert f"error: did not meet the other nodes at {meeting}" in alone.printed()
        assert late.wait() == 1
        assert "within 2 s: start all nodes, each with its" in late.printed()
        assert "(nothing listens there: start the" in late.printed()
        assert len(late.printed().splitlines()) == 2, "torch prints no traces of C++"
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.wait() == 130
        assert "Traceback" not in alone.printed() + stopped.printed()


@pytest.mark.parametrize(
    ("workers", "inside", "signals", "code"),
    [
        (1, [], [signal.SIGHUP], 129),
        (2, [], [signal.SIGINT], 130),
        (2, [], [signal.SIGUSR1], 138),  # as job systems send it before a time limit
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
        # torch sends SIGTERM if the signal comes while it starts processes.
        assert len(re.findall(r"finished .* count=1\n", run.printed())) == workers
        assert "Traceback" not in run.printed()
        run.wait_until_ranks_are_gone()


def test_a_third_signal_ends_ranks_that_hang(tmp_path: Path) -> None:
    """torchrun answers the second one with SIGTERM to the ranks."""
    with launcher(tmp_path / "console", "hang", workers=1) as run:
        run.wait_for("hanging")
        for _ in range(3):
            assert run.process.poll() is None
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert run.wait() == 130
        run.wait_until_ranks_are_gone()


def test_a_mistake_after_a_stop_signal_is_not_a_second_one(tmp_path: Path) -> None:
    """Such as a disk that is full in the last save."""
    with launcher(tmp_path / "console", "wait,crash:2:9", workers=1) as run:
        run.wait_for("waiting")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 2, run.printed()
        assert run.printed().endswith("error: stand-in failed on rank 0\n")


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_do_not_stop_are_killed(tmp_path: Path, by: signal.Signals) -> None:
    """After some time, and at once if the launcher itself was killed."""
    if by == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("needs prctl")
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with launcher(tmp_path / "console", "hang", workers=1, **variables) as run:
        run.wait_for("hanging")
        run.process.send_signal(by)
        assert run.wait() == 128 + by
        run.wait_until_ranks_are_gone()


@pytest.mark.parametrize(
    ("does", "workers", "code", "last"),
    [
        ("crash:-9:9", 1, 137, "error: rank 0 was ended by SIGKILL (often by the system, when"),
        ("crash:7:9", 2, 7, "error: rank 1 failed with exit code 7"),
        ("crash:2:9", 2, 2, "error: stand-in failed on rank 1"),  # a mistake of the user
        ("crash:4:9", 2, 4, "error: stand-in failed on rank 1"),  # an island's slot was taken
        ("clean,crash:4:9", 2, 4, "error: stand-in failed on rank 1"),
    ],
)
def test_a_failing_rank_is_named_and_ends_the_others(
    tmp_path: Path, does: str, workers: int, code: int, last: str
) -> None:
    options = ("--run.restarts", "3" if code in (USER_ERROR, FENCED) else "0")
    with launcher(tmp_path / "console", does, *options, workers=workers) as run:
        assert run.wait() == code
        run.wait_until_ranks_are_gone()
    assert run.printed().count("started ") == workers
    lines = run.printed().splitlines()
    assert any(line.startswith(last) for line in lines), run.printed()


def test_the_folder_of_messages_is_locked_against_who_cleans_up() -> None:
    with folder_of_messages() as folder:
        other = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_a_rank_that_outlives_its_launcher_leaves_no_folder_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv(MESSAGES, str(folder := tmp_path / "messages"))
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    with patch("os.kill"):
        end_run(FENCED)
        assert not folder.exists()
        monkeypatch.setenv(LAUNCHER, str(os.getppid()))  # which has lost its folder
        end_run(FENCED)
    assert (folder / EXIT_CODE).read_text() == str(FENCED)


def test_a_crashed_run_keeps_its_id_which_names_its_folder(tmp_path: Path) -> None:
    with launcher(tmp_path / "console", "crash:-9:2,meet") as run:
        assert run.wait() == 0, run.printed()
    assert run.printed().count("of 2 sum=1") == 2
    ids = re.findall(r" run=(20\d{6}-\d{6}-[0-9a-f]{4})\n", run.printed())
    assert len(ids) >= 4, "a rank may be ended before it prints"
    assert len(set(ids)) == 1
    run.wait_until_ranks_are_gone()


def test_a_machine_with_only_the_loopback_interface(tmp_path: Path) -> None:
    """The run is in a network namespace of its own, whose host name nothing resolves."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-nu", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace (root on Linux)")
    inside = [unshare, "-nu", sys.executable, "-c", ONLY_LOOPBACK]
    with launcher(tmp_path / "console", "meet", inside=inside) as run:
        assert run.wait() == 0, run.printed()
    assert run.printed().count("sum=1") == 2


def test_starts_that_complete_no_step_end_the_run(text: Path, tmp_path: Path) -> None:
    chosen = words(settings(text))
    with launcher(tmp_path / "console", "", *chosen, workers=1, module="dies_early") as run:
        assert run.wait() == USER_ERROR, run.printed()
    assert run.printed().count("started again after a crash: restart 1 of 10") == 1
    assert "restart 2" not in run.printed()
    reason = "[rank 0] error: 2 starts in a row ended before their first step, so"
    assert any(line.startswith(reason) for line in run.printed().splitlines()), run.printed()


# --- a run that trains ----------------------------------------------------------------------------


def test_signals_to_the_process_that_was_started(text: Path, tmp_path: Path) -> None:
    """SIGUSR2 writes the stacks of all ranks, and SIGUSR1 stops the run with a save."""
    many = {"training.steps": 10**6, "training.global_batch_size": 24, "diloco.workers": 2}
    chosen = settings(text, **many, diloco__method="streaming", checkpoint__at_end="true")
    program = [sys.executable, "-u", "-m", "torchtitan_diloco", "train", "--run.device", "cpu"]
    run = start_interpreter(tmp_path / "console", [*program, *words(chosen)], folder=tmp_path)
    try:
        run.wait_for("validation after step 4")
        run.process.send_signal(signal.SIGUSR2)
        stacks = [text.parent / f"run/worker-{worker}/stacks-0.txt" for worker in range(2)]
        wait_until(
            lambda: all(path.exists() and "trainer.py" in path.read_text() for path in stacks),
            "stacks of both ranks",
            run.log,
            PATIENCE_SECONDS,
        )
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait() == 128 + signal.SIGUSR1, run.printed()
    finally:
        run.kill()
    assert "signal received: the run stops after step" in run.printed()
    for worker in range(2):
        assert [*(text.parent / f"run/worker-{worker}").glob("step-*")], run.printed()
