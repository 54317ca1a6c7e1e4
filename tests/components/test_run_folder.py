"""The folder of a run: one run at a time, on a disk that all nodes share."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.components.test_resume import FP32, STEPS, chosen, last, run
from tests.processes import ProcessPool
from tests.test_trainer import curve, records
from torchtitan_diloco.components import run_folder
from torchtitan_diloco.components.run_folder import lock_run_folder

LOSS = "train/loss_nats_per_token_global"


def test_a_folder_has_one_run_at_a_time(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    reason = r"in use by another run \(process \d+ on [^)]*\): wait"
    with lock_run_folder(folder), pytest.raises(ValueError, match=reason):
        run(chosen(text, folder))
    assert [path.name for path in folder.iterdir()] == ["run.lock"]
    run(chosen(text, folder))


def test_a_run_without_a_checkpoint_starts_over(text: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/lr": 1.0}\n{"step": 2, "tr')
    run(chosen(text, tmp_path))
    assert (tmp_path / "metrics-1.jsonl").exists()
    assert len(curve(records(tmp_path), LOSS)) == STEPS


def test_a_save_of_another_run_since_this_one_looked_is_not_overwritten(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a job that is queued again while the old one is in its last save."""
    folder = tmp_path / "run"
    run(chosen(text, folder, **{"training.steps": 10}))
    lock = run_folder.lock_run_folder

    def lock_late(path: Path, token: str = "") -> Any:
        shutil.copytree(last(folder), folder / "checkpoints" / "step-00000012")
        return lock(path, token)

    monkeypatch.setattr(run_folder, "lock_run_folder", lock_late)
    reason = r"another run has just ended .* from .*step-00000010 instead of .*step-00000012"
    with pytest.raises(ValueError, match=reason):
        run(chosen(text, folder))


def _run_on_a_node_of_its_own(wanted: dict[str, str], parent: Path) -> str:
    """Train in a relative folder, as on nodes that share no disk."""
    before, patience = Path.cwd(), run_folder.VISIBLE_WITHIN_SECONDS
    node = parent / f"node-{os.environ['RANK']}"
    node.mkdir(parents=True)
    os.chdir(node)
    run_folder.VISIBLE_WITHIN_SECONDS = 0.5
    try:
        return run(wanted)
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)
        run_folder.VISIBLE_WITHIN_SECONDS = patience


def test_nodes_without_a_shared_disk_are_refused_before_training(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    wanted = chosen(text, "run", **FP32) | {"run.folder": "run", "training.steps": "2"}
    reason = "run.folder = run of rank 0 is not seen by the nodes of ranks 1"
    for error in processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path / "saves"):
        assert reason in error
    wanted |= {"checkpoint.every": "0", "checkpoint.at_end": "false"}
    folders = processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path / "saves nothing")
    assert folders == ["run", "run"]
