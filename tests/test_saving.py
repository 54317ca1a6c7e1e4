"""Saving: when, into which folder, what is kept, and what a failure leaves."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.processes import ProcessPool
from tests.test_checkpoint import FP32, STEPS, chosen, last, run
from torchtitan_diloco.components import run_claim
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_folder import (
    Manifest,
    begin,
    complete_checkpoints,
    prune,
    step_of,
)
from torchtitan_diloco.components.run_folder import hold_run_folder
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco.outer_loop import DataParallel
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.trainer import Trainer


def test_a_save_that_fails_leaves_the_others(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle of a save: training goes on, the error says what happened, what was saved loads."""
    original, saves = FileSystemWriter.write_data, iter(range(100))

    def write_data(*arguments: Any) -> Any:
        if next(saves) in (2, 4):
            raise OSError(28, "No space left on device", "/full/disk")
        return original(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    with pytest.raises(
        ValueError,
        match=r"the last checkpoint could not be saved: No space left on device: /full/disk",
    ):
        run(chosen(text, "run"))
    assert [step_of(path) for path in complete_checkpoints(text.parent / "run")] == [5, 10, 20]
    run(chosen(text, "run"))
    assert step_of(last(text.parent / "run")) == STEPS


def test_what_is_kept(text: Path) -> None:
    run(
        chosen(
            text, "run", checkpoint__every=2, checkpoint__keep_latest=2, checkpoint__keep_every=10
        )
    )
    assert [step_of(path) for path in complete_checkpoints(text.parent / "run")] == [10, 20, 22, 24]


def alone(folder: Path, **settings: Any) -> Checkpointer:
    model = torch.nn.Linear(2, 2)
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    return Checkpointer(
        Checkpoint(**settings),
        folder,
        world,
        model,
        torch.optim.AdamW(model.parameters()),
        DataParallel(),
    )


def test_what_ends_a_run_is_told_and_not_what_ends_its_save_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> str:
        raise RuntimeError("connection closed by peer")

    def save_and_fail() -> None:
        with alone(tmp_path) as saver:
            saver.save(
                Manifest(
                    step=1,
                    tokens=1,
                    position=0,
                    workers=1,
                    ranks_per_worker=1,
                    data={},
                    run={},
                    settings={},
                )
            )
            raise ValueError("a worker is lost")

    monkeypatch.setattr(Checkpointer, "_write", lost)
    with pytest.raises(ValueError, match="a worker is lost"):
        save_and_fail()


def test_a_worker_that_is_lost_ends_the_wait_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose machine is gone never says so: the save would be patient with its disk."""
    found = threading.Event()

    def lost(_: DataParallel) -> None:
        found.set()
        raise WorkerLostError([1], "nothing came")

    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(found.wait(60)))
    monkeypatch.setattr(DataParallel, "check", lost)
    saver = alone(tmp_path)
    saver.save(
        Manifest(
            step=1,
            tokens=1,
            position=0,
            workers=1,
            ranks_per_worker=1,
            data={},
            run={},
            settings={},
        )
    )
    with pytest.raises(WorkerLostError, match="worker 1 left"):
        saver.wait()


def test_minutes_are_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer comes some steps after the question, and must not be asked for again meanwhile."""
    now = [1000.0]
    monkeypatch.setattr("torchtitan_diloco.components.checkpoint.time.monotonic", lambda: now[0])
    saver = alone(tmp_path, every_minutes=2)
    asked = []
    for _ in range(10):
        now[0] += 30
        asked.append(saver.minutes_have_passed())
    assert asked == [False, False, False, True, False, False, False, True, False, False]


def test_a_folder_has_one_run_at_a_time(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        hold_run_folder(tmp_path / "run"),
        pytest.raises(ValueError, match=r"in use by another run \(process \d+ on [^)]*\): wait"),
    ):
        run(chosen(text, "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"], (
        "nothing of the first is touched"
    )
    run(chosen(text, "run"))


def test_a_run_that_ended_after_this_one_looked_is_not_overwritten(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a job that is queued again while the old one is in its last save."""
    run(chosen(text, "run", training__steps=10))
    original = run_claim.claim_run_folder

    def claim(*given: Any, **more: Any) -> Any:
        shutil.copytree(
            last(text.parent / "run"), text.parent / "run" / "checkpoints" / "step-00000012"
        )
        return original(*given, **more)

    monkeypatch.setattr("torchtitan_diloco.trainer.claim_run_folder", claim)
    with pytest.raises(
        ValueError,
        match=r"another run has just ended .* from .*step-00000010 instead of .*step-00000012",
    ):
        run(chosen(text, "run"))


def _run_in_folders_of_their_own(wanted: dict[str, str], parent: Path) -> str:
    """Relative folders of nodes that share no disk."""
    before, patience, own = (
        Path.cwd(),
        run_claim.SEEN_WITHIN_SECONDS,
        parent / f"node-{os.environ['RANK']}",
    )
    own.mkdir()
    os.chdir(own)
    run_claim.SEEN_WITHIN_SECONDS = 0.5
    try:
        return run(wanted)
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)
        run_claim.SEEN_WITHIN_SECONDS = patience


def test_nodes_without_a_common_disk_are_told_before_anything_is_trained(
    text: Path, processes: ProcessPool
) -> None:
    wanted = chosen(text, "run", **FP32) | {"run.folder": "run", "training.steps": "2"}
    (text.parent / "saves").mkdir()
    for told in processes.run(_run_in_folders_of_their_own, 2, wanted, text.parent / "saves"):
        assert (
            "run.folder = run of rank 0 is not seen by the nodes of ranks 1, so no checkpoint could be saved"
            in told
        )
    saves_nothing = wanted | {
        "checkpoint.every": "0",
        "checkpoint.every_minutes": "0",
        "checkpoint.at_end": "false",
    }
    (text.parent / "does-not").mkdir()
    assert processes.run(
        _run_in_folders_of_their_own, 2, saves_nothing, text.parent / "does-not"
    ) == ["run", "run"]


def test_a_save_under_way_is_finished_though_the_run_ends_with_an_error(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, finish, failed = Trainer.train_step, Checkpointer._finish, threading.Event()

    def train_step(self: Trainer, batches: Any) -> Any:
        if self.step == 5:  # a checkpoint was begun after it
            failed.set()
            raise ValueError("no further")
        return original(self, batches)

    def finish_later(self: Checkpointer, *arguments: Any) -> None:
        assert failed.wait(60)
        time.sleep(0.2)  # the run is being left
        finish(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(Checkpointer, "_finish", finish_later)
    with pytest.raises(ValueError, match="no further"):
        run(chosen(text, "run"))
    assert step_of(last(text.parent / "run")) == 5


def test_prune_takes_what_was_never_finished(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002", "step-00000003.incomplete"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text(json.dumps({}))
    begin(tmp_path / "checkpoints" / "step-00000004")
    newest = tmp_path / "checkpoints" / "step-00000001"  # a run that was taken back
    prune(tmp_path, newest, keep_latest=1, keep_every=0)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-00000001", "step-00000002", "step-00000004.incomplete"]
