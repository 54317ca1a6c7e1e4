"""The folder of a run: which checkpoint it starts from, and one run at a time."""

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components.test_checkpoint import EMPTY, TENSORS, write_checkpoint
from tests.components.test_resume import STEPS, chosen, last, run
from tests.diloco.toy import join
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, curve, records
from torchtitan_diloco.components.checkpoint import (
    MANIFEST,
    complete_checkpoints,
    folder_of_worker,
    read_manifest,
)
from torchtitan_diloco.components.resume import (
    Answer,
    Start,
    claim_run_folder,
    find_start,
    judge,
    lock_folder,
)
from torchtitan_diloco.distributed.world import World

ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "damage", "wrong"),
    [
        (TENSORS, cut_off, r"/rank-0.safetensors has [\d,]+ bytes instead of [\d,]+"),
        (TENSORS, flip_a_bit, "/rank-0.safetensors has other content"),
        (TENSORS, Path.unlink, "/rank-0.safetensors is missing"),
        (MANIFEST, Path.unlink, "/manifest.json is missing"),
        (MANIFEST, flip_a_bit, "/manifest.json cannot be used"),
        (MANIFEST, lambda path: path.write_text("[]"), "/manifest.json cannot be used"),
        (MANIFEST, lambda path: path.write_text("[" * 10_000), "/manifest.json cannot be used"),
    ],
)
def test_the_newest_checkpoint_that_is_not_damaged_is_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], Any],
    wrong: str,
) -> None:
    paths = [write_checkpoint(folder_of_worker(tmp_path, 0), step) for step in (1, 2, 10)]
    damage(paths[2] / file)
    for resume, folder in (("auto", tmp_path), (str(tmp_path), tmp_path / "other")):
        caplog.clear()
        start = find_start(ALONE, resume, str(folder))
        assert (start.goes_on, start.checkpoint) == (resume == "auto", paths[1])
        (line,) = caplog.messages
        assert re.search(f"step-00000010{wrong}.*: going on from step-00000002", line)
    with pytest.raises(ValueError, match=f"no checkpoint can be resumed: .*10{wrong}"):
        find_start(ALONE, str(paths[2]), str(tmp_path / "other"))
    assert find_start(ALONE, str(paths[0]), str(tmp_path / "other")).state.step == 1
    with pytest.raises(ValueError, match=r"is of the run in run\.folder"):
        find_start(ALONE, str(paths[0]), str(tmp_path))
    assert find_start(ALONE, str(tmp_path / "other"), str(tmp_path)).checkpoint == paths[1]
    with pytest.raises(ValueError, match='"/nowhere" is no folder of'):
        find_start(ALONE, "/nowhere", str(tmp_path / "other"))


def saved(workers: int, save: int = 1) -> Answer:
    return Answer(replace(EMPTY, workers=workers, save=save))


@pytest.mark.parametrize(
    ("answers", "holders", "problem"),
    [
        ([saved(2), saved(2)], [0, 1], ""),
        ([saved(2), Answer()], [0], ""),  # worker 1 has lost its disk
        ([Answer(), saved(2)], [1], ""),
        ([saved(3), saved(3)], [0, 1], ""),  # there is no worker 2 any more
        ([saved(2), saved(2), Answer()], [0, 1], ""),  # worker 2 is new
        ([saved(2), saved(2), Answer(problem="gone")], [0, 1], ""),  # or was there before
        ([saved(2), saved(2, save=2)], [0, 1], "several saves"),
        ([saved(2), saved(2), saved(3, save=2)], [0, 1], ""),  # left of a run of three
        ([saved(1), Answer(problem="behind")], [0], ""),  # after data parallelism
        ([saved(2), Answer(problem="behind")], [0], "behind"),
        ([Answer(problem="damaged"), Answer()], [], "damaged"),
    ],
)
def test_workers_that_have_saved_a_step_must_have_it(
    answers: list[Answer], holders: list[int], problem: str
) -> None:
    found = judge(answers, ranks=1)
    assert found[0] == holders
    assert problem in found[1]
    assert bool(problem) == bool(found[1])


def test_a_run_without_a_checkpoint_that_it_can_read_is_not_started_over(tmp_path: Path) -> None:
    own = folder_of_worker(tmp_path, 0)
    paths = [write_checkpoint(own, step) for step in (1, 2)]
    (paths[1] / MANIFEST).write_text(replace(read_manifest(paths[1]), version=1).to_json())
    with pytest.raises(ValueError, match="version 1 of the schema"):
        find_start(ALONE, "auto", str(tmp_path))
    for path in paths:
        (path / MANIFEST).unlink()
    reason = r"no checkpoint can be resumed: .*0002/manifest.json is .*0001/manifest.json is"
    with pytest.raises(ValueError, match=reason):
        find_start(ALONE, "auto", str(tmp_path))
    assert complete_checkpoints(own) == paths


def test_a_folder_has_one_run_at_a_time_which_starts_over_without_a_checkpoint(
    text: Path, tmp_path: Path
) -> None:
    own = folder_of_worker(tmp_path, 0)
    own.mkdir()
    (tmp_path / "config.toml").touch()
    (own / "metrics.jsonl").write_text(before := '{"step": 1, "train/lr": 1.0}\n{"step": 2, "tr')
    reason = r"in use by another run \(process \d+ on [^)]*\): wait"
    with lock_folder(own), pytest.raises(ValueError, match=reason):
        run(chosen(text, tmp_path))
    assert sorted(path.name for path in own.iterdir()) == ["metrics.jsonl", "run.lock"]
    assert (own / "metrics.jsonl").read_text() == before
    run(chosen(text, tmp_path))
    assert len(curve(records(tmp_path), LOSS)) == STEPS


def _claim_beside_a_run(path: Path) -> list[str]:
    """Return what is in the folder after a refused start of two workers beside a run of one."""
    world = join(2)
    with (
        lock_folder(path / "worker-0") if world.rank == 0 else nullcontext(),
        pytest.raises(ValueError, match="worker-0 is in use by another run"),
    ):
        claim_run_folder(world, path, Start(), "other")
    return [(path / "config.toml").read_text()]


def test_a_refused_start_leaves_the_settings_of_the_run_that_holds_the_folder(
    processes: ProcessPool, tmp_path: Path
) -> None:
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "config.toml").write_text("own")
    assert processes.run(_claim_beside_a_run, 2, tmp_path) == [["own"], ["own"]]


def test_a_save_of_another_run_since_this_one_looked_is_not_overwritten(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a job that is queued again while the old one is in its last save."""
    run(chosen(text, tmp_path, **{"training.steps": 10}))

    def lock_late(path: Path) -> Any:
        shutil.copytree(last(tmp_path), path / "step-00000012")
        return lock_folder(path)

    monkeypatch.setattr("torchtitan_diloco.components.resume.lock_folder", lock_late)
    with pytest.raises(ValueError, match="another run has just ended there"):
        run(chosen(text, tmp_path))
