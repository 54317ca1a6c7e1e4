"""Run every ```bash block of the README and of docs/, from the root of the repository.

A training run that later commands need, because it names its folder, gets three steps, and so does
the first one of the README; the settings of the others are checked. `./run_tests.sh` only starts
pytest. `$OUT` is an empty folder. What cannot run here (a network, many nodes) is fenced as
```text, what another test runs in its own process as ```shell.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PROVED_ELSEWHERE = ("checkpoint.md",)
"""Pages whose runs are those of tests/components/test_resume.py: their settings are checked."""
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SHORT = (
    "--training.steps 3 --lr_schedule.warmup_steps 1 --validation.sequences 8 "
    "--training.batch_size 2 --metrics.tensorboard false"
)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)


def shortened(block: str, out: Path) -> str:
    lines = []
    for line in block.splitlines():
        command = line.split(" #")[0].rstrip()
        if "./run_tests.sh" in command:
            line = f"{command} --version"
        elif command == "./run_train.sh":
            line = f"{command} {SHORT} --run.folder {out}/run"
        elif "./run_train.sh" in command and "--run.folder" in command:
            line = f"{command} {SHORT}"
        elif "./run_train.sh" in command and "--help" not in command:
            line = f"{command} --print-config"
        lines.append(line)
    return "\n".join(lines)


def test_there_is_something_to_run() -> None:
    assert blocks(REPOSITORY / "README.md")


@pytest.mark.timeout(900)  # a page has several runs
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_blocks_run_as_written(page: Path, tmp_path: Path) -> None:
    """One after the other, as they follow on each other: they share a folder."""
    (tmp_path / "out").mkdir()
    for number, block in enumerate(blocks(page), start=1):
        run_block(
            f"{page.name}, block {number}", block, tmp_path / "out", tmp_path / f"block{number}"
        )


def run_block(name: str, block: str, out: Path, runs: Path) -> None:
    script = "set -euo pipefail\n" + shortened(block, runs)
    if name.startswith(PROVED_ELSEWHERE):
        script = script.replace(SHORT, "--print-config")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hub = {"HF_HOME": f"{out}/hub", "HF_MODULES_CACHE": f"{out}/hub/modules", "HF_HUB_OFFLINE": "1"}
    outcome = subprocess.run(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        env=os.environ | hub | {"OUT": str(out), "OMP_NUM_THREADS": "1", "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert outcome.returncode == 0, f"{name}:\n{script}\n\n{outcome.stdout[-4000:]}"


def test_the_readmes_own_loop_runs_as_written(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    (tmp_path / "own_loop.py").write_text(block)
    start = re.search(r"start it with: (torchrun .*)", block)
    assert start is not None
    outcome = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *start.group(1).split()[1:]],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "1.layers.0, 1.layers.2" in outcome.stdout
    assert re.search(r"worker 1: loss \d+\.\d+, \d+\.\d+ MB sent", outcome.stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_names_is_there(page: Path) -> None:
    named = re.findall(
        r"`((?:torchtitan_diloco|docs|train_configs|scripts|benchmarks|tests)/[\w./-]*)`",
        page.read_text(),
    )
    linked = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    for path in named:
        assert (REPOSITORY / path).exists(), f"{page.name} names {path}"
    for path in linked:
        assert (page.parent / path).exists(), f"{page.name} links to {path}"
