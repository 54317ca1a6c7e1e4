"""scripts/slurm.sh with stand-ins for Slurm's programs and for run_train.sh."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

RUN_TRAIN = """#!/usr/bin/env bash
echo "run: NNODES=$NNODES NODE_RANK=${NODE_RANK:-none} RDZV_ENDPOINT=$RDZV_ENDPOINT RDZV_ID=$RDZV_ID arguments=$*"
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
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job; the script itself is a copy somewhere else, as Slurm makes it."""
    programs, submitted = tmp_path / "programs", tmp_path / "repository"
    for path, text in {
        programs / "srun": SRUN,
        programs / "scontrol": SCONTROL,
        submitted / "run_train.sh": RUN_TRAIN,
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(REPOSITORY / "scripts/slurm.sh", tmp_path / "slurm_script")
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(submitted),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_CPUS_PER_TASK": "64",
    }


def submit(
    job: dict[str, str], folder: Path, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", folder / "slurm_script", *arguments],
        env=job,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_one_launcher_on_each_node(job: dict[str, str], tmp_path: Path) -> None:
    run = submit(job, tmp_path, "--config", "1b", "--run.description", "two words")
    assert (run.returncode, run.stderr) == (0, "")
    common = "RDZV_ENDPOINT=node07:24567 RDZV_ID=1234567 arguments=--config 1b --run.description two words"
    assert [line for line in run.stdout.splitlines() if line.startswith("run:")] == [
        f"run: NNODES=2 NODE_RANK=none {common} --print-config",
        f"run: NNODES=2 NODE_RANK=0 {common}",
        f"run: NNODES=2 NODE_RANK=1 {common}",
    ]
    assert "srun option --ntasks-per-node=1" in run.stdout


def test_a_mistake_in_the_config_ends_the_job_before_it_starts(
    job: dict[str, str], tmp_path: Path
) -> None:
    run = submit(job, tmp_path, "--config", "wrong")
    assert run.returncode == 2
    assert "srun" not in run.stdout


def test_submitted_from_elsewhere(job: dict[str, str], tmp_path: Path) -> None:
    job["SLURM_SUBMIT_DIR"] = str(tmp_path)
    run = submit(job, tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith(
        f"error: {tmp_path} has no run_train.sh; submit from the repository's folder"
    )
