"""scripts/slurm.sh with stand-ins for Slurm's programs and for run_train.sh."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

RUN_TRAIN = """#!/usr/bin/env bash
echo "run: $NNODES ${NODE_RANK:-none} $RDZV_ENDPOINT $*"
case "$*" in *wrong*--print-config) exit 2 ;; esac
"""
# srun starts the command once for each task, with the number of the task's node.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do echo "srun option $1"; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[07-08]" ] && printf 'node07\\nnode08\\n'
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the script's copy in a folder of its own, as Slurm makes it."""
    stand_ins = {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "repository/run_train.sh": RUN_TRAIN}
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return Path(shutil.copy(REPOSITORY / "scripts/slurm.sh", tmp_path / "slurm_script"))


def submit(job: Path, folder: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        "PATH": f"{job.parent / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(job.parent / folder),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[07-08]",
    }
    return subprocess.run(
        ["bash", job, *arguments], env=environment, capture_output=True, text=True
    )


def test_one_launcher_on_each_node(job: Path) -> None:
    run = submit(job, "repository", "--config", "1b", "--run.description", "two words")
    assert (run.returncode, run.stderr) == (0, "")
    common = (
        "node07:24567 --run.folder outputs/slurm-1234567 --config 1b --run.description two words"
    )
    assert [line for line in run.stdout.splitlines() if line.startswith("run:")] == [
        f"run: 2 none {common} --print-config",
        f"run: 2 0 {common}",
        f"run: 2 1 {common}",
    ]
    assert "srun option --ntasks-per-node=1" in run.stdout


@pytest.mark.parametrize(
    ("folder", "config", "code", "message"),
    [
        ("repository", "wrong", 2, ""),
        ("bin", "1b", 1, "has no run_train.sh; submit from the repository's folder"),
    ],
)
def test_a_mistake_ends_the_job_before_it_starts(
    job: Path, folder: str, config: str, code: int, message: str
) -> None:
    run = submit(job, folder, "--config", config)
    assert run.returncode == code
    assert "srun" not in run.stdout
    assert message in run.stderr
