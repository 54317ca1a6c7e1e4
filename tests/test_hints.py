"""Hints name the program that the user started: run_train.sh, torchtitan-diloco or torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco.log import STARTED_BY, command_line, installed

PYTHON = f"{sys.executable} -m"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
}
NODES = "--nnodes 3 --rdzv-backend c10d --rdzv-endpoint node0:29500"
RUN = f"{PYTHON} torch.distributed.run"


@pytest.fixture(autouse=True)
def in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STARTED_BY, "")
    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("environment", "train"),
    [
        (TORCHRUN, f"{RUN} --standalone --nproc-per-node 2 -m torchtitan_diloco.train"),
        (
            TORCHRUN | {"GROUP_WORLD_SIZE": "3"},
            f"{RUN} {NODES} --nproc-per-node 2 -m torchtitan_diloco.train",
        ),
        ({}, f"{PYTHON} torchtitan_diloco train"),
    ],
)
def test_how_to_start_a_command(
    environment: dict[str, str], train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert command_line("train") == train
    assert command_line("report") == f"{PYTHON} torchtitan_diloco report"


def test_after_run_train_sh_the_installed_command_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, scripts = tmp_path / "re po", tmp_path / "re po/.venv/bin"
    scripts.mkdir(parents=True)
    monkeypatch.setenv(STARTED_BY, f"{root}/run_train.sh")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(scripts))
    without = f"PYTHONPATH={REPOSITORY} {PYTHON} torchtitan_diloco report"
    assert command_line("report") == without, "PYTHON is one that lacks the package"
    Path(installed("torchtitan-diloco")).touch()
    assert command_line("report") == "'re po/.venv/bin/torchtitan-diloco' report"
    monkeypatch.chdir(root)
    assert command_line("train") == "./run_train.sh"
    assert command_line("report") == ".venv/bin/torchtitan-diloco report"
    monkeypatch.chdir(scripts)
    assert command_line("train") == f"'{root}/run_train.sh'"


@pytest.mark.parametrize(
    ("started", "told"),
    [
        ("torchtitan_diloco train", "torchtitan_diloco train"),
        (
            "torch.distributed.run --standalone -m torchtitan_diloco.train",
            "torch.distributed.run --standalone --nproc-per-node 1 -m torchtitan_diloco.train",
        ),
    ],
)
def test_a_real_start_names_itself(started: str, told: str) -> None:
    """`torchtitan-diloco train` is in test_wheel.py, `./run_train.sh` in test_docs.py."""
    outcome = subprocess.run(
        [sys.executable, "-m", *started.split(), "--help"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    program = sys.executable.removeprefix(f"{REPOSITORY}/")
    assert f"usage: {program} -m {told} [--config" in outcome.stdout, outcome.stderr
