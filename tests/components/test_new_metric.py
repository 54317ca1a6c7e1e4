"""The metric that docs/report-and-plan.md adds is in the records and on the boards."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import REPOSITORY, write_text
from tests.test_trainer import streaming, words

PAGE = (REPOSITORY / "docs/report-and-plan.md").read_text()
NAME = "sync/mean_delta_l1"


def add_metric(package: Path) -> None:
    """Insert the lines that the page adds, each after the line before it on the page."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)
    path = None
    before = None
    added = ""
    for line in [*diff.splitlines(keepends=True), " torchtitan_diloco/\n"]:
        if line.startswith("+"):
            added += line[1:]
            continue
        if added:
            assert path is not None
            assert before is not None
            content = path.read_text()
            assert content.count(before) == 1, f"{before} in {path}"
            path.write_text(content.replace(before, before + added))
            added = ""
        if line.startswith(" torchtitan_diloco/"):
            path = package / line.strip()
        before = line[1:]


def test_two_changes_add_a_metric(tmp_path: Path) -> None:
    """A worker trains with them."""
    package = REPOSITORY / "torchtitan_diloco"
    shutil.copytree(package, tmp_path / "torchtitan_diloco")
    add_metric(tmp_path)
    changes = {
        "diloco.workers": 1,
        "diloco.measure_every": 1,
        "metrics.boards": "tensorboard",
        "validation.every": 0,
        "training.steps": 6,
    }
    chosen = streaming(write_text(tmp_path), **changes)
    command = [sys.executable, "-m", "torchtitan_diloco.train", *words(chosen)]
    subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True
    )
    folder = Path(chosen["run.folder"]) / "worker-0"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [line["numbers"][NAME] for line in lines if line.get("kind") == "round"]
    steps = [line[NAME] for line in lines if NAME in line]
    assert rounds
    assert min(rounds) > 0
    assert min(rounds) <= min(steps) <= max(steps) <= max(rounds), "means"
    shown = EventAccumulator(str(folder)).Reload().Scalars(NAME)
    assert [event.value for event in shown] == pytest.approx(steps)
