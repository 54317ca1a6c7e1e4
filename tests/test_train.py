"""Mistakes of a user are a line; errors of the program keep their traceback."""

import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import torchtitan_diloco.trainer
from tests.processes import ProcessPool
from tests.test_trainer import settings, words
from torchtitan_diloco.config import load_config
from torchtitan_diloco.distributed.collectives import RanksLostError
from torchtitan_diloco.islands import IslandFencedError
from torchtitan_diloco.launch import folder_of_run
from torchtitan_diloco.log import FENCED, clock
from torchtitan_diloco.train import join, main
from torchtitan_diloco.trainer import Trainer


def test_an_island_whose_slot_is_taken_has_an_exit_code_of_its_own(text: Path) -> None:
    with patch.object(Trainer, "run", side_effect=IslandFencedError("its slot was taken")):
        assert main(words(settings(text))) == FENCED


def test_an_error_of_the_program_keeps_its_traceback(text: Path) -> None:
    with (
        patch.object(torchtitan_diloco.trainer, "find_start", lambda *_: clock(math.nan)),
        pytest.raises(ValueError, match="cannot convert float NaN") as caught,
    ):
        main(words(settings(text)))
    assert caught.traceback[-1].name == "clock"


def test_the_id_of_torchrun_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    config, own = load_config("debug"), load_config("debug", {"run.folder": "runs/a"})
    alone = [folder_of_run(config) for _ in range(2)]  # a process without torchrun
    assert len(set(alone)) == 2
    monkeypatch.setenv("RANK", "0")
    for run_id in ("none", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        assert folder_of_run(own) == "runs/a"
        with pytest.raises(ValueError, match=r"give --run\.folder FOLDER, or .* --rdzv-id ID"):
            folder_of_run(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert folder_of_run(config) == "outputs/debug-job-7"


def _join_alone() -> str:
    if os.environ["RANK"] == "1":
        return "never came"
    wanted = {"diloco.workers": "2", "distributed.init_timeout_seconds": "1"}
    with pytest.raises(RanksLostError) as lost:
        join(load_config("debug", {**wanted, "run.device": "cpu"}))
    return str(lost.value)


def test_a_process_that_others_do_not_reach_says_over_which_interface(
    processes: ProcessPool,
) -> None:
    reason, _ = processes.run(_join_alone, 2)
    assert "could not connect to all other processes over the lo" in reason
    assert "distributed.init_timeout_seconds = 1): " in reason


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [("return 0", 0, "goodbye"), ("return 3", 3, ""), ("raise OSError('odd')", 1, "OSError: odd")],
)
def test_only_a_process_that_ends_in_order_says_goodbye(body: str, code: int, says: str) -> None:
    """Exit handlers run only then: they tell the other ranks that this one has ended in order."""
    program = (
        "import atexit\nfrom torchtitan_diloco.log import run_and_exit\n"
        f"atexit.register(print, 'goodbye')\ndef main(_):\n    {body}\nrun_and_exit(main, [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert says in done.stdout + done.stderr
    assert ("goodbye" in done.stdout) == (code == 0)
