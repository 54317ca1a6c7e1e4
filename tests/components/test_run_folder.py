"""The folder of a run: what it starts from, one run at a time, a disk that all nodes share."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components.test_checkpoint import TENSORS, write_checkpoint
from tests.components.test_resume import FP32, STEPS, assert_same_end, chosen, last, run, tensors
from tests.processes import ProcessPool
from tests.test_trainer import curve, records
from torchtitan_diloco.components import checkpoint_schema, run_folder
from torchtitan_diloco.components.checkpoint_folders import (
    MANIFEST,
    checkpoint_path,
    complete_checkpoints,
)
from torchtitan_diloco.components.checkpoint_schema import read_manifest
from torchtitan_diloco.components.resume import find_start
from torchtitan_diloco.components.run_folder import lock_run_folder
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.export.saved_model import open_saved

LOSS = "loss/train"


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
        (TENSORS, cut_off, r"/shared/rank-0.safetensors has [\d,]+ bytes instead of [\d,]+"),
        (TENSORS, flip_a_bit, "/shared/rank-0.safetensors has other content"),
        (TENSORS, Path.unlink, "/shared/rank-0.safetensors is missing"),
        (MANIFEST, Path.unlink, "/manifest.json is missing"),
        (MANIFEST, flip_a_bit, "/manifest.json cannot be used"),
        (MANIFEST, lambda path: path.write_text("[]"), "/manifest.json cannot be used"),
        (MANIFEST, lambda path: path.write_text("[" * 10_000), "/manifest.json cannot be used"),
    ],
)
def test_the_newest_checkpoint_that_is_not_damaged_is_taken(
    tmp_path: Path, file: str, damage: Callable[[Path], Any], wrong: str
) -> None:
    for step in (1, 2, 10):
        write_checkpoint(tmp_path, step)
    damage(checkpoint_path(tmp_path, 10) / file)
    start = find_start(ALONE, "auto", str(tmp_path))
    assert (start.folder, start.state.step) == (tmp_path, 2)
    ((damaged, reason),) = start.damaged.items()
    assert damaged == checkpoint_path(tmp_path, 10)
    assert re.search(f"step-00000010{wrong}", reason)
    for resume in ("strict", str(tmp_path), str(damaged)):  # what is named must be good
        with pytest.raises(ValueError, match=f'step-00000010{wrong}.* "auto"'):
            find_start(ALONE, resume, str(tmp_path))
    assert find_start(ALONE, str(checkpoint_path(tmp_path, 2)), str(tmp_path)).state.step == 2


def fail_to_read(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Let the first reads of a file fail, as on a network file system that is away."""
    left, original = [times], Path.open

    def open_(self: Path, *given: Any, **more: Any) -> Any:
        if self.name == name and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error", str(self))
        return original(self, *given, **more)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(checkpoint_schema, "RETRY_AFTER_SECONDS", (0.0,) * 3)


@pytest.mark.parametrize("name", [MANIFEST, Path(TENSORS).name])
def test_what_cannot_be_read_is_tried_again_and_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    fail_to_read(monkeypatch, name, times=3)
    start = find_start(ALONE, "auto", str(tmp_path))
    assert (start.state.step, start.damaged) == (2, {})
    fail_to_read(monkeypatch, name, times=4)
    with pytest.raises(ValueError, match=rf"0002.*{name} cannot be read .*not prove .* damaged"):
        find_start(ALONE, "auto", str(tmp_path))


def test_a_run_without_a_checkpoint_that_it_can_read_is_not_started_over(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path, step) for step in (1, 2)]
    (paths[1] / MANIFEST).write_text(replace(read_manifest(paths[1]), version=1).to_json())
    with pytest.raises(ValueError, match="version 1 of the schema"):
        find_start(ALONE, "auto", str(tmp_path))
    for path in paths:
        (path / MANIFEST).unlink()
    reason = r"no checkpoint can be resumed: .*0002/manifest.json is .*0001/manifest.json is"
    with pytest.raises(ValueError, match=reason):
        find_start(ALONE, "auto", str(tmp_path))
    assert complete_checkpoints(tmp_path) == paths


def test_a_folder_has_one_run_at_a_time(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    reason = r"in use by another run \(process \d+ on [^)]*\): wait"
    with lock_run_folder(folder), pytest.raises(ValueError, match=reason):
        run(chosen(text, folder))
    assert [path.name for path in folder.iterdir()] == ["run.lock"]
    run(chosen(text, folder))


def test_a_run_without_a_checkpoint_starts_over(text: Path, tmp_path: Path) -> None:
    own = tmp_path / "worker-0"
    own.mkdir()
    (own / "metrics-before.jsonl").touch()  # of a start before
    (own / "metrics.jsonl").write_text('{"step": 1, "train/lr": 1.0}\n{"step": 2, "tr')
    run(chosen(text, tmp_path))
    assert (own / "metrics-before.jsonl").read_text().startswith('{"step": 1')
    assert len(curve(records(tmp_path), LOSS)) == STEPS


def test_a_save_of_another_run_since_this_one_looked_is_not_overwritten(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a job that is queued again while the old one is in its last save."""
    folder = tmp_path / "run"
    run(chosen(text, folder, **{"training.steps": 10}))
    lock = run_folder.lock_run_folder

    def lock_late(path: Path) -> Any:
        shutil.copytree(last(folder), folder / "checkpoints" / "step-00000012")
        return lock(path)

    monkeypatch.setattr(run_folder, "lock_run_folder", lock_late)
    reason = r"another run has just ended .* from .*step-00000010 instead of .*step-00000012"
    with pytest.raises(ValueError, match=reason):
        run(chosen(text, folder))


def _run_on_a_node_of_its_own(wanted: dict[str, str], parent: Path) -> str:
    """Train in a relative folder, as on nodes that share no disk."""
    before = Path.cwd()
    node = parent / f"node-{os.environ['RANK']}"
    node.mkdir(parents=True, exist_ok=True)
    os.chdir(node)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, "VISIBLE_WITHIN_SECONDS", 0.2)
            return run(wanted)
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)


def own_disks(text: Path, base: dict[str, Any], **more: Any) -> dict[str, str]:
    return chosen(text, "run", **(base | more)) | {"run.folder": "run"}


def test_workers_without_a_shared_disk_resume_from_the_newest_step_that_all_have(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    def train(steps: int, **more: Any) -> list[str]:
        wanted = own_disks(text, FP32, **{"training.stop_after": steps}, **more)
        return processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path)

    processes.run(run, 2, chosen(text, tmp_path / "whole", **FP32))
    nodes = [tmp_path / f"node-{rank}" / "run" for rank in range(2)]
    assert train(12) == ["run", "run"]
    shutil.rmtree(last(nodes[1]))  # the second node was lost before its part was complete
    for error in train(0, **{"checkpoint.resume": "strict"}):
        assert "step-00000012 is not in all places (rank 1 lacks it): set checkpoint" in error
    assert train(0) == ["run", "run"]
    expected, found = tensors(last(tmp_path / "whole")), [tensors(last(node)) for node in nodes]
    together = found[0] | found[1]
    assert together.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(together[name], expected[name])] == []
    both = found[0].keys() & found[1].keys()
    assert both == {name for name in expected if name.startswith("shared/")}
    assert (nodes[0] / "checkpoints/step-00000012.damaged").is_dir()
    models = [open_saved(node).model.state_dict() for node in nodes]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    with pytest.raises(ValueError, match="no such parameters; it has shared, worker-1"):
        open_saved(nodes[1], weights="worker-0")

    shutil.rmtree(nodes[1])  # a new disk
    longer = {"training.steps": STEPS + 1}
    for error in train(0, **longer):
        assert "step-00000016 is not in all places (rank 1 lacks it); step-00000012 is" in error
        assert "Copy the folder of one to the places that lack it" in error
    shutil.copytree(last(nodes[0]), nodes[1] / "checkpoints" / last(nodes[0]).name)
    assert train(0, **longer) == ["run", "run"]
    assert [(last(nodes[1]) / f"worker-{worker}").exists() for worker in range(2)] == [False, True]


def test_data_parallel_workers_without_a_shared_disk_save_all_in_each_place(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    for steps in (4, STEPS):
        wanted = own_disks(text, {"diloco.workers": 2, "training.steps": steps})
        assert processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path) == ["run", "run"]
    assert_same_end(tmp_path / "node-0/run", tmp_path / "node-1/run")


def test_data_parallelism_goes_on_from_a_run_that_has_worker_0_in_one_place_only(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    """As if all places had its model and the moments of its optimizer."""
    for more in ({"training.stop_after": 8}, {"diloco.method": "none"}):
        wanted = own_disks(text, FP32 | {"optimizer.name": "muon"}, **more)
        assert processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path) == ["run", "run"]
        processes.run(run, 2, wanted | {"run.folder": str(tmp_path / "common")})
    for node in ("node-0", "node-1"):
        assert_same_end(tmp_path / "common", tmp_path / node / "run")


def test_nodes_of_one_worker_have_to_share_a_disk(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    wanted = own_disks(text, {"training.steps": 2})
    reason = "run.folder = run of the first rank of a worker is not seen by its ranks 1"
    for error in processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path / "saves"):
        assert reason in error
    wanted |= {"checkpoint.every": "0", "checkpoint.at_end": "false"}
    folders = processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path / "saves nothing")
    assert folders == ["run", "run"]
