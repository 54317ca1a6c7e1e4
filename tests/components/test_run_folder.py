"""The folder of a run: it has one run at a time."""

import errno
import fcntl
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from tests.components.checkpoints import saved_steps
from tests.components.test_resume import STEPS, chosen, last, run
from tests.diloco.toy import join
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, curve, records
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import run_folder
from torchtitan_diloco.components.checkpoint_folder import (
    begin,
    checkpoint_path,
    folder_of_worker,
    incomplete,
)
from torchtitan_diloco.components.resume import Start
from torchtitan_diloco.components.run_folder import (
    LOCK,
    claim_run_folder,
    find_compared_run,
    lock_folder,
)
from torchtitan_diloco.config import load_config, to_toml


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


def _claim_without_open_files(path: Path) -> list[str]:
    """Return what the folder of the worker of two ranks has after its start, of whose files the
    second rank sees only those that are closed."""
    world = join(1, ranks=2)
    open_file = Path.open

    def open_closed(file: Path, *arguments: Any, **options: Any) -> Any:
        if world.rank == 1 and file.name == LOCK:
            raise FileNotFoundError(file)
        return open_file(file, *arguments, **options)

    with patch.object(Path, "open", open_closed), patch.object(run_folder, "SHARED_SECONDS", 0.0):
        lock = claim_run_folder(world, path, Start(), "")
    names = sorted(file.name for file in (path / "worker-0").iterdir())
    if lock is not None:
        lock.file.close()
    return names


def test_the_disk_of_a_worker_may_show_only_files_that_are_closed(
    processes: ProcessPool, tmp_path: Path
) -> None:
    """As some mounts of buckets do."""
    assert processes.run(_claim_without_open_files, 2, tmp_path) == [[LOCK], [LOCK]]


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


def test_a_control_finds_the_newest_run_to_compare_with(tmp_path: Path) -> None:
    def write(name: str, age: int, **changes: str) -> None:
        settings = {"diloco.workers": "2"} | {
            key.replace("__", "."): value for key, value in changes.items()
        }
        path = tmp_path / name / "config.toml"
        path.parent.mkdir()
        path.write_text(to_toml(load_config("debug", settings)))
        os.utime(path, (1e9 - age, 1e9 - age))

    control = load_config(
        "debug", {"diloco.workers": "2", "diloco.method": "none", "run.name": "control"}
    )
    folder = tmp_path / "control"
    assert find_compared_run(folder, control) is None
    write("control", 1, diloco__method="none")
    write("its twin", 2, diloco__method="none")
    write("more steps", 3, training__steps="1001")
    write("another seed", 4, run__seed="1")
    write("four workers", 5, diloco__workers="4")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("[run]\nnothing = 1\n")
    assert find_compared_run(folder, control) is None
    write("older", 9, run__name="older")
    write("newer", 8, diloco__sync_every="30", metrics__log_every="7")
    assert find_compared_run(folder, control) == tmp_path / "newer"
