"""Checkpoints: their folder, when they are saved, and what a failure leaves."""

import errno
import fcntl
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import chdir, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.components.test_resume import STEPS, chosen, last, run
from tests.diloco.toy import join
from tests.processes import DIED, ProcessPool
from tests.test_trainer import LOSS, around_steps, curve, records
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import checkpoint, checkpoint_folder, resume
from torchtitan_diloco.components.checkpoint import Checkpointer, write_tensors
from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    Manifest,
    begin,
    checkpoint_path,
    complete,
    complete_checkpoints,
    fingerprint,
    folder_of_worker,
    incomplete,
    prune,
    read_manifest,
    step_of,
)
from torchtitan_diloco.components.resume import (
    CheckedStep,
    SavedTensors,
    Start,
    find_start,
    judge,
    restore,
)
from torchtitan_diloco.components.run_folder import claim_run_folder, lock_folder, set_aside
from torchtitan_diloco.config.schema import Checkpoint, Distributed
from torchtitan_diloco.diloco import WorkerLostError
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.distributed.collectives import RanksLostError
from torchtitan_diloco.distributed.world import World, join_world, leave_world
from torchtitan_diloco.trainer import Trainer

TENSORS = "rank-0.safetensors"
EMPTY = Manifest(step=0, tokens=0, workers=1, config="")


def saved_steps(folder: Path) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(folder)]


def write_checkpoint(folder: Path, step: int, ranks: int = 1, **changes: Any) -> Path:
    """Write a checkpoint, in the folder of a worker, of five rows and a number."""
    path, files = checkpoint_path(folder, step), dict[str, tuple[int, int]]()
    begin(path)
    for rank in range(ranks):
        rows = {"rows": torch.arange(10.0).view(5, 2)[2 * rank :][: 2 if ranks > 1 else 5]}
        own = {} if rank else {"number": torch.tensor(45.0)}
        files |= write_tensors(incomplete(path), rows | own, rank)
    complete(path, replace(EMPTY, step=step, files=files, **changes).to_json())
    return path


def test_only_complete_folders_are_checkpoints_and_the_latest_and_every_nth_are_kept(
    tmp_path: Path,
) -> None:
    for step in range(2, 17, 2):
        path = write_checkpoint(tmp_path, step)
        prune(tmp_path, keep_latest=2, keep_every=10)
    assert saved_steps(tmp_path) == [10, 14, 16]
    with pytest.raises(OSError, match="step-00000016 exists already"):
        write_checkpoint(tmp_path, 16)
    for name in ("step-00000016.aside", "step-00000016.aside-2"):
        assert set_aside(path).name == name
        write_checkpoint(tmp_path, 16)
    shutil.copytree(path, tmp_path / "step-00000018.bak")
    for step in (18, 20):
        begin(checkpoint_path(tmp_path, step))
    assert saved_steps(tmp_path) == [10, 14, 16]
    others = {one.name.removeprefix("step-000000") for one in tmp_path.glob("*.*")}
    assert others == {"16.aside", "16.aside-2", "18.bak", "20.incomplete"}


@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=3),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_checksum_of_a_save_is_that_of_its_file(
    shapes: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    """It is made of what is in memory, and not of what the disk says."""
    rows = {
        name: torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        for name, (dtype, shape) in shapes.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        ((name, known),) = write_tensors(Path(folder), rows, rank=0).items()
        file = Path(folder) / name
        assert fingerprint(file) == known
        flip_a_bit(file)
        if any(value.numel() for value in rows.values()):
            assert fingerprint(file) != known


class StoppedError(BaseException):
    """The process has ended here."""


def save_and_stop(run: Path, step: int, after: int = 99) -> bool:
    """Save as a run does. Return whether it has ended before, after so many changes of the disk."""
    changes = [(Path, "mkdir"), (Path, "open"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    left, path = iter(range(after)), checkpoint_path(run, step)

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_change(*given: Any, **more: Any) -> Any:
            if next(left, None) is None:
                raise StoppedError
            return change(*given, **more)

        return count_and_change

    with pytest.MonkeyPatch.context() as patch, suppress(StoppedError):
        for owner, name in changes:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        begin(path)
        complete(path, "{}")
        prune(run, keep_latest=1, keep_every=0)
        return False
    return True


def test_a_save_that_ends_anywhere_leaves_the_newest_checkpoint(tmp_path: Path) -> None:
    newest, stopped = list[int](), True
    while stopped:
        run = tmp_path / str(len(newest))
        save_and_stop(run, 1)
        stopped = save_and_stop(run, 2, after=len(newest))
        found = complete_checkpoints(run)
        assert all((path / MANIFEST).exists() for path in found)
        newest.append(step_of(found[-1]))
        assert not save_and_stop(run, 3), "the next one is not in its way"
        assert saved_steps(run) == [3]
    assert newest == sorted(newest)
    assert len(newest) > 8


def test_rows_of_several_ranks_are_put_together_and_no_other_files_are_read(tmp_path: Path) -> None:
    """Nothing is unpickled. The last ranks may have fewer rows than the others, or none."""
    path = write_checkpoint(tmp_path, 1, ranks=4)
    found, manifest = {"rows": torch.zeros(5, 2), "number": torch.zeros(())}, read_manifest(path)
    SavedTensors(path, manifest).fill(found)
    assert torch.equal(found["rows"], torch.arange(10.0).view(5, 2))
    assert found["number"] == 45
    with pytest.raises(ValueError, match=r"step-00000001 has no rows of shape \(5, 2\)"):
        SavedTensors(path, replace(manifest, files={})).fill(found)
    torch.save(found, path / TENSORS)
    with pytest.raises(ValueError, match=f"{TENSORS} does not hold tensors"):
        SavedTensors(path, manifest)


# --- saves ----------------------------------------------------------------------------------------


def test_a_full_disk_leaves_training_and_other_checkpoints(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = iter(range(100))

    def save(rows: Any, file: Path) -> None:
        if next(saves) in (1, 3):
            file.mkdir()  # what safetensors says of it does not name the file
        save_file(rows, file)

    monkeypatch.setattr(checkpoint, "save_file", save)
    file = "run/worker-0/step-00000016.incomplete/rank-0.safetensors"
    reason = f"the last checkpoint could not be saved: .*{file} .*Is a directory"
    with pytest.raises(ValueError, match=reason):
        run(chosen(text, tmp_path / "run"))
    assert saved_steps(tmp_path / "run/worker-0") == [4, 12]
    run(chosen(text, tmp_path / "run"))
    assert step_of(last(tmp_path / "run")) == STEPS


def test_a_late_save_holds_its_own_step_and_is_finished_although_the_run_fails(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_late(path: Path, manifest: str) -> None:
        time.sleep(0.3)
        complete(path, manifest)

    def fail(trainer: Trainer) -> None:
        if trainer.step == 8:  # a save has begun after it
            raise ValueError("no further")

    monkeypatch.setattr(checkpoint, "complete", finish_late)
    with around_steps(before=fail), pytest.raises(ValueError, match="no further"):
        run(chosen(text, tmp_path / "run"))
    assert saved_steps(tmp_path / "run/worker-0") == [4, 8]
    for path in complete_checkpoints(tmp_path / "run/worker-0"):
        assert read_manifest(path).step == step_of(path)


def alone(
    folder: Path, weight: float = 0.0, about: Manifest = EMPTY, **settings: Any
) -> Checkpointer:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, weight)
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    parts = model, torch.optim.AdamW(model.parameters()), DataParallel(model)
    return Checkpointer(Checkpoint(**settings), folder, world, *parts, about=about)


def test_a_loss_ends_a_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose machine is gone never answers, and a save waits long for a slow disk."""
    found = threading.Event()

    def lost(*_: Any) -> None:
        found.set()
        raise WorkerLostError([1], "connection closed by peer")

    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(found.wait(60)))
    monkeypatch.setattr(Liveness, "check", lost)
    saver = alone(tmp_path)
    saver.save(step=1, tokens=2)
    with pytest.raises(WorkerLostError, match="worker 1 left"):
        saver.wait()
    saver.close()


def _run_out_of_memory_in_a_save(folder: Path) -> str:
    """Return what the other rank says when rank 1 runs out of memory in a save."""
    world = join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=0)
    model = torch.nn.Linear(2, 2)
    parts = model, torch.optim.AdamW(model.parameters()), DataParallel(model)
    saver = Checkpointer(Checkpoint(), folder, world, *parts, about=EMPTY)
    if world.rank == 0:
        saver.save(step=1, tokens=2)
        with pytest.raises(RanksLostError) as lost:
            saver.wait()
        return str(lost.value)
    with pytest.MonkeyPatch.context() as patch:
        full = torch.OutOfMemoryError("full")
        patch.setattr(checkpoint, "write_tensors", Mock(side_effect=full))
        saver.save(step=1, tokens=2)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            saver.wait()
        assert raised.value is full
        os._exit(1)


def test_a_full_memory_in_a_save_is_no_lost_rank_where_it_is_full(
    processes: ProcessPool, tmp_path: Path
) -> None:
    lost, died = processes.run(_run_out_of_memory_in_a_save, 2, tmp_path, dying={1})
    assert died == DIED
    assert re.search(r"^(rank|worker) 1 .* left or did not answer in time .*in a save", lost), lost


def test_a_save_by_time_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other ranks agree some steps later."""
    now = [1000.0]
    monkeypatch.setattr("torchtitan_diloco.components.checkpoint.time.monotonic", lambda: now[0])
    saver = alone(tmp_path, every_minutes=2)
    due = []
    for _ in range(8):
        now[0] += 30
        due.append(saver.due_by_time())
    assert due == [False, False, False, True, False, False, False, True]

    written = threading.Event()
    monkeypatch.setattr(Checkpointer, "_write", lambda *_: str(written.wait(60)))
    saver.save(step=1, tokens=2)
    now[0] += 500
    assert not saver.due_by_time()  # training would wait for the save under way
    written.set()
    saver.wait()
    assert saver.due_by_time()


# --- the folder of a run --------------------------------------------------------------------------


ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_a_folder(path: Path) -> None:
    """Let reads fail, as on a bad disk, also for root."""
    path.unlink()
    path.mkdir()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "damage", "wrong"),
    [
        (TENSORS, cut_off, r"/rank-0.safetensors has [\d,]+ bytes instead of [\d,]+"),
        (TENSORS, flip_a_bit, "/rank-0.safetensors has different content"),
        (TENSORS, Path.unlink, "/rank-0.safetensors is missing"),
        (TENSORS, make_a_folder, r"/rank-0.safetensors cannot be read \(.*directory"),
        (MANIFEST, Path.unlink, "/manifest.json is missing"),
        (MANIFEST, make_a_folder, r"/manifest.json cannot be read \(.*directory"),
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
    for source, folder in (("auto", tmp_path), (str(tmp_path), tmp_path / "other")):
        caplog.clear()
        start = find_start(ALONE, source, str(folder))
        assert (start.goes_on, start.checkpoint) == (source == "auto", paths[1])
        (line,) = caplog.messages
        assert re.search(f"step-00000010{wrong}.*: continuing from step-00000002", line)
    with pytest.raises(ValueError, match=f"no checkpoint can be resumed: .*10{wrong}"):
        find_start(ALONE, str(paths[2]), str(tmp_path / "other"))
    assert find_start(ALONE, str(paths[0]), str(tmp_path / "other")).step == 1
    with chdir(paths[0].parent):  # "auto" is no folder in it, and a step has a relative path
        assert find_start(ALONE, "auto", str(tmp_path)).checkpoint == paths[1]
        assert find_start(ALONE, paths[0].name, str(tmp_path / "other")).checkpoint == paths[0]
    with pytest.raises(ValueError, match=r"is of the run in run\.folder"):
        find_start(ALONE, str(paths[0]), str(tmp_path))
    assert find_start(ALONE, str(tmp_path / "other"), str(tmp_path)).checkpoint == paths[1]
    with pytest.raises(ValueError, match='"/nowhere" is not the folder of'):
        find_start(ALONE, "/nowhere", str(tmp_path / "other"))


def _start_from_a_slow_disk(folder: Path) -> bool:
    """Return whether this worker gets the parameters of worker 1, the only one with a checkpoint,
    whose disk takes longer than workers wait for each other on a link."""
    world = join_world(
        Distributed(), Link(timeout_seconds=2), device="cpu", workers=2, fsdp=0, outer_loop=True
    )
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    check = checkpoint_folder.check_files
    fill = SavedTensors.fill

    def check_slowly(*given: Any) -> None:
        time.sleep(2.5)
        check(*given)

    def fill_slowly(*given: Any) -> None:
        time.sleep(2.5)
        fill(*given)

    with pytest.MonkeyPatch.context() as patch:
        if world.worker == 1:
            patch.setattr(resume, "check_files", check_slowly)
            patch.setattr(SavedTensors, "fill", fill_slowly)
        start = find_start(world, "auto", str(folder))
        restore(start, world, model, optimizer, DataParallel(model))
    leave_world(world)
    return bool((model.weight == 45).all())


def test_a_disk_that_is_slower_than_the_limit_of_a_link_is_waited_for(
    processes: ProcessPool, tmp_path: Path
) -> None:
    about = replace(EMPTY, workers=2)
    saver = alone(folder_of_worker(tmp_path, 1), weight=45.0, about=about)
    saver.save(step=1, tokens=2)
    saver.wait()
    saver.close()
    assert processes.run(_start_from_a_slow_disk, 2, tmp_path) == [True, True]


def saved(workers: int, save: int = 1) -> CheckedStep:
    return CheckedStep(replace(EMPTY, workers=workers, save=save))


@pytest.mark.parametrize(
    ("answers", "holders", "problem"),
    [
        ([saved(2), saved(2)], [0, 1], ""),
        ([saved(2), CheckedStep()], [0], ""),  # worker 1 has lost its disk
        ([CheckedStep(), saved(2)], [1], ""),
        ([saved(3), saved(3)], [0, 1], ""),  # there is no worker 2 any more
        ([saved(2), saved(2), CheckedStep()], [0, 1], ""),  # worker 2 is new
        ([saved(2), saved(2), CheckedStep(problem="gone")], [0, 1], ""),  # or was there before
        ([saved(2), saved(2, save=2)], [0, 1], "several saves"),
        ([saved(2), saved(2), saved(3, save=2)], [0, 1], ""),  # left of a run of three
        ([saved(1), CheckedStep(problem="behind")], [0], ""),  # after data parallelism
        ([saved(2), CheckedStep(problem="behind")], [0], "behind"),
        ([CheckedStep(problem="damaged"), CheckedStep()], [], "damaged"),
    ],
)
def test_workers_that_have_saved_a_step_must_have_it(
    answers: list[CheckedStep], holders: list[int], problem: str
) -> None:
    found = judge(answers, ranks=1)
    assert found[0] == holders
    assert problem in found[1]
    assert bool(problem) == bool(found[1])


def test_a_run_without_a_checkpoint_that_it_can_read_is_not_started_over(tmp_path: Path) -> None:
    own = folder_of_worker(tmp_path, 0)
    paths = [write_checkpoint(own, step) for step in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError))
        with pytest.raises(ValueError, match=f"^{paths[1] / MANIFEST} cannot be read"):
            find_start(ALONE, "auto", str(tmp_path))
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


def test_without_locks_a_start_deletes_only_what_it_has_begun(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As another run may be in the folder, such as on some network file systems."""
    own = folder_of_worker(tmp_path / "run", 0)
    few = {"checkpoint.keep_latest": 1}
    run(chosen(text, tmp_path / "run", **few, **{"training.stop_after": 8}))
    assert saved_steps(own) == [8]
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    begin(checkpoint_path(own, 14))  # the save of another run
    run(chosen(text, tmp_path / "run", **few))
    assert saved_steps(own) == [8, 16]
    assert incomplete(checkpoint_path(own, 14)).is_dir()
    (warning,) = [line for line in caplog.messages if "cannot be locked" in line]
    assert "a second run in run.folder would not be refused" in warning
    assert "no locks ([Errno" in warning

    begin(checkpoint_path(own, 20))
    reason = r"step-00000020\.incomplete may be of another run in this folder: delete it"
    with pytest.raises(UserError, match=reason):
        run(chosen(text, tmp_path / "run", **few, **{"training.steps": 20}))
    assert incomplete(checkpoint_path(own, 20)).is_dir()


def test_nothing_is_fetched_into_the_folder_of_another_run(text: Path, tmp_path: Path) -> None:
    mirror = {"checkpoint.mirror": tmp_path / "mirror"}
    run(chosen(text, tmp_path / "one", **mirror, **{"training.stop_after": 4}))
    own = folder_of_worker(tmp_path / "two", 0)
    begin(checkpoint_path(own, 4))
    with lock_folder(own), pytest.raises(UserError, match="two/worker-0 is in use by another run"):
        run(chosen(text, tmp_path / "two", **mirror))
    assert incomplete(checkpoint_path(own, 4)).is_dir(), "the save of the other run"


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

    monkeypatch.setattr("torchtitan_diloco.components.run_folder.lock_folder", lock_late)
    with pytest.raises(ValueError, match="another run has just ended there"):
        run(chosen(text, tmp_path))
