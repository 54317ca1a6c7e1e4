"""Mirrors: starts from copies of checkpoints in a store, and what they cannot disturb."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from tests.components.checkpoints import flip_a_bit, saved_steps, write_checkpoint
from tests.components.test_copies import TOKEN, copies_in
from tests.components.test_resume import (
    FP32,
    STEPS,
    Train,
    assert_same,
    assert_same_end,
    chosen,
    last,
    run,
    tensors,
    text,  # noqa: F401 - fixtures
    train,  # noqa: F401
    whole,  # noqa: F401
)
from tests.diloco.toy import join
from tests.processes import ProcessPool
from tests.store.places import BucketServer, Place
from tests.test_trainer import around_steps
from tests.waiting import wait_until
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import mirror, resume
from torchtitan_diloco.components.checkpoint_folder import (
    checkpoint_path,
    complete_checkpoints,
    folder_of_worker,
    read_manifest,
    step_of,
)
from torchtitan_diloco.components.copies import Copies
from torchtitan_diloco.components.mirror import other_settings
from torchtitan_diloco.config import load_config, to_toml
from torchtitan_diloco.config.schema import Checkpoint, portable
from torchtitan_diloco.store import open_store
from torchtitan_diloco.trainer import Trainer


def steps_in(location: Path | str) -> list[int]:
    return [copy.step for copy in Copies(open_store(location)).whole()]


def mirrored(text: Path, folder: Path, location: object, **changes: Any) -> dict[str, str]:  # noqa: F811
    return chosen(text, folder, **({"checkpoint.mirror": location} | changes))


def test_a_run_that_has_lost_its_folder_goes_on_bit_for_bit(
    text: Path,  # noqa: F811
    tmp_path: Path,
    place: Place,
) -> None:
    run(chosen(text, tmp_path / "whole"))
    location = place.location
    run(mirrored(text, tmp_path / "lost", location, **{"training.stop_after": 8}))
    shutil.rmtree(tmp_path / "lost")
    run(mirrored(text, tmp_path / "found", location))
    assert saved_steps(tmp_path / "found/worker-0") == [8, 12, 16]
    assert_same_end(tmp_path / "whole", tmp_path / "found")
    assert "checkpoint.mirror" not in read_manifest(last(tmp_path / "found")).config
    assert location not in read_manifest(last(tmp_path / "found")).config


def test_a_mirror_without_checkpoints_is_named_if_the_folder_has_none_either(
    text: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as the mount point of a disk that is not mounted."""
    caplog.set_level("INFO")
    location = tmp_path / "mirror"
    others = tmp_path / "full"
    others.mkdir()
    (others / "photo.png").touch()
    wanted = mirrored(text, tmp_path / "run", location, **{"checkpoint.at_end": "false"})
    for place, new in (
        (others, ", which had only other files,"),
        (location, ", which was just made or was empty,"),
        (location, ""),
    ):
        caplog.clear()
        run(wanted | {"checkpoint.mirror": str(place), "training.steps": "2"})
        (line,) = [one for one in caplog.records if one.message.startswith("mirror: ")]
        assert line.message.startswith(f"mirror: {place}{new} has no checkpoints, and run.fold")
        assert line.levelname == "INFO"
    run(wanted)
    caplog.clear()
    run(wanted)
    assert "has no checkpoints" not in caplog.text
    resume = {"checkpoint.resume": tmp_path / "run"}
    run(mirrored(text, tmp_path / "other", tmp_path / "its mirror", **resume))
    assert "has no checkpoints" not in caplog.text, "it does not begin anew"


def test_the_checksums_of_what_was_just_fetched_are_not_compared_again(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = mirrored(text, tmp_path / "run", tmp_path / "mirror", **{"training.stop_after": 8})
    run(wanted)
    shutil.rmtree(tmp_path / "run")
    compared = list[Path]()
    monkeypatch.setattr(resume, "check_files", lambda path, *_: compared.append(path))
    run(wanted)
    assert compared == []
    run(wanted)
    assert compared == [checkpoint_path(folder_of_worker(tmp_path / "run", 0), 8)]


def test_workers_that_have_lost_their_folders_go_on_bit_for_bit(
    tmp_path: Path,
    whole: Path,  # noqa: F811
    train: Train,  # noqa: F811
) -> None:
    mirror = {"checkpoint.mirror": tmp_path / "mirror", "checkpoint.keep_latest": 1}
    lost = train(2, "lost", **FP32, **mirror, **{"training.stop_after": 12})
    assert steps_in(tmp_path / "mirror") == [12]
    shutil.rmtree(lost)
    found = train(2, "found", **FP32, **mirror)
    assert_same_end(whole, found)
    shutil.rmtree(found / "worker-1")  # which has lost its disk, and the other one has not
    train(2, "found", **FP32, **mirror)
    assert_same_end(whole, found)


def test_of_the_folder_and_the_mirror_the_newer_one_is_taken(
    text: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    location = tmp_path / "mirror"
    folder = tmp_path / "run"
    run(mirrored(text, folder, location))
    end = tensors(last(folder))
    for path in complete_checkpoints(folder / "worker-0")[1:]:
        shutil.rmtree(path)
    caplog.clear()
    run(mirrored(text, folder, location))
    assert f"step 16 was taken from {location}" in caplog.text
    assert_same(tensors(last(folder)), end)
    caplog.clear()
    run(mirrored(text, folder, location))
    assert "was taken from" not in caplog.text


def test_a_step_that_only_the_folder_has_is_copied_at_the_next_start(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Such as the one whose copy was broken off by the end of the machine."""
    run(chosen(text, tmp_path / "run", **{"training.stop_after": 8}))
    run(mirrored(text, tmp_path / "run", tmp_path / "mirror", **{"checkpoint.every": 0}))
    assert steps_in(tmp_path / "mirror") == [8, 16]


def test_a_damaged_copy_gives_way_to_an_older_one(
    text: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    location = tmp_path / "mirror"
    run(mirrored(text, tmp_path / "lost", location))
    newest = max((location / "worker-0").iterdir())
    flip_a_bit(next(newest.glob("rank-0*")))
    run(mirrored(text, tmp_path / "found", location))
    assert "was altered" in caplog.text
    assert "continuing from an older step" in caplog.text
    assert saved_steps(tmp_path / "found/worker-0") == [12, 16]
    for part in (location / "worker-0").rglob("rank-0*"):
        part.unlink()
    with pytest.raises(UserError, match=f"no copy in {location} can be used: give another mirror"):
        run(mirrored(text, tmp_path / "other", location))


def test_the_mirror_of_another_run_is_refused(text: Path, tmp_path: Path) -> None:  # noqa: F811
    location = tmp_path / "mirror"
    run(mirrored(text, tmp_path / "one", location))
    run(chosen(text, tmp_path / "two", **{"training.stop_after": 4}))
    before = sorted(location.rglob("*"))
    with pytest.raises(UserError, match=r"has the checkpoints of another run \([0-9a-f]{16}\)"):
        run(mirrored(text, tmp_path / "two", location))
    assert sorted(location.rglob("*")) == before


def test_a_run_that_may_be_another_one_takes_nothing_from_a_mirror(
    text: Path,  # noqa: F811
    tmp_path: Path,
    place: Place,
) -> None:
    """Such as one with a copied config. It fetches nothing, and the mirror stays as it was."""
    location = place.location
    run(mirrored(text, tmp_path / "one", location, **{"training.stop_after": 8}))
    before = steps_in(location)
    other = {"run.name": "copied", "optimizer.lr": 0.02, "training.batch_size": 4}
    reason = (
        r'checkpoint\.mirror: .* has step 8 of the run "debug" \([0-9a-f]{16}\), and the settings '
        r'of this run "copied" in .*/two differ: optimizer\.lr was [\d.]+, is 0\.02; run\.name was '
        r"debug, is copied\. Give .* or set checkpoint\.adopt = true"
    )
    with pytest.raises(UserError, match=reason) as caught:
        run(mirrored(text, tmp_path / "two", location, **other))
    assert not (tmp_path / "two").exists()
    assert steps_in(location) == before
    assert "secret" not in str(caught.value)
    run(mirrored(text, tmp_path / "one", location, **{"training.stop_after": 12}))
    assert steps_in(location) == [4, 8, 12], "the first run goes on"
    run(mirrored(text, tmp_path / "two", location, **other, **{"checkpoint.adopt": "true"}))
    assert saved_steps(tmp_path / "two/worker-0") == [12, 16]


@pytest.mark.parametrize(
    ("now", "differences"),
    [
        ({"training.steps": "9", "training.stop_after": "3"}, []),
        ({"training.tokens": "999"}, []),
        ({"training.batch_size": "2", "training.global_batch_size": "8"}, []),
        ({"diloco.workers": "4", "parallel.fsdp": "2", "diloco.link.timeout_seconds": "9"}, []),
        ({"metrics.log_every": "3", "checkpoint.every": "5", "checkpoint.adopt": "true"}, []),
        ({"run.folder": "elsewhere", "data.cache_folder": "there", "run.preemption": "aws"}, []),
        ({"diloco.sync_every": "7"}, ["diloco.sync_every was 10, is 7"]),
        ({"data.corpus": "README.md"}, ["data.corpus was stdlib, is README.md"]),
        ({"run.seed": "1", "run.name": "b"}, ["run.name was debug, is b", "run.seed was 0, is 1"]),
        ({"checkpoint.resume": "a"}, ["checkpoint.resume was auto, is a"]),
    ],
)
def test_the_settings_that_make_another_run(now: dict[str, str], differences: list[str]) -> None:
    mirror = {"checkpoint.mirror": "s3://bucket/a"}
    before = load_config("debug", mirror)
    after = load_config("debug", mirror | now)
    changed = other_settings(
        to_toml(portable(before)), to_toml(portable(after)), resume=after.checkpoint.resume
    )
    assert changed == differences


def test_a_mirror_with_no_whole_copy_is_taken_over(text: Path, tmp_path: Path) -> None:  # noqa: F811
    """As after a crash before the first save, or with a notebook that starts anew."""
    location = tmp_path / "mirror"
    part = write_checkpoint(tmp_path / "part", 4, save=7, workers=2, run="another")
    copies_in(location).save(part, 0, TOKEN)
    run(mirrored(text, tmp_path / "run", location, **{"training.stop_after": 8}))
    assert steps_in(location) == [4, 8]
    run(chosen(text, tmp_path / "two", **{"training.stop_after": 4}))
    copies_in(tmp_path / "other").save(part, 0, TOKEN)
    run(mirrored(text, tmp_path / "two", tmp_path / "other"))
    assert steps_in(tmp_path / "other") == [4, 8, 12, 16], "also by a run with checkpoints"


def test_a_start_from_another_run_has_a_mirror_of_its_own(
    text: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It goes on from there once its own folder and the other run are lost, and never from the
    mirror of another run."""
    caplog.set_level("INFO")
    first = tmp_path / "first"
    run(mirrored(text, first, tmp_path / "mirror", **{"training.stop_after": 8}))
    resume = {"checkpoint.resume": checkpoint_path(folder_of_worker(first, 0), 4)}
    with pytest.raises(UserError, match=r"differ: checkpoint\.resume was auto, is .*step-00000004"):
        run(mirrored(text, tmp_path / "run", tmp_path / "mirror", **resume))
    assert not (tmp_path / "run").exists()
    more = {"training.stop_after": 12} | resume
    run(mirrored(text, tmp_path / "run", tmp_path / "own", **more))
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(first)
    caplog.clear()
    run(mirrored(text, tmp_path / "run", tmp_path / "own", **resume))
    assert "step 12 was taken from" in caplog.text


def test_a_run_with_another_model_cannot_be_adopted(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    location = tmp_path / "mirror"
    run(mirrored(text, tmp_path / "one", location, **{"training.stop_after": 4}))
    other = {"model.feed_forward": 64, "checkpoint.adopt": "true"}
    reason = r"checkpoint\.mirror = (.*) belongs to a run with another model: .*gate\.weight is "
    with pytest.raises(UserError, match=reason):
        run(mirrored(text, tmp_path / "two", location, **other))
    assert saved_steps(tmp_path / "two/worker-0") == []
    manifest = read_manifest(last(tmp_path / "one"))
    with pytest.MonkeyPatch.context() as patch:
        another = replace(manifest, tokenizer="another", run="another")
        patch.setattr(Copies, "newest_manifest", lambda _: another)
        with pytest.raises(UserError, match="was trained with another tokenizer"):
            run(mirrored(text, tmp_path / "three", location))
    assert not (tmp_path / "three").exists()


class Away:
    """A mirror that is away while steps of a set are trained."""

    def __init__(self, location: Path, first: int, last: int) -> None:
        self._here = location
        self._there = location.with_name("elsewhere")
        self._first = first
        self._last = last

    def __call__(self, trainer: Trainer) -> None:
        if trainer.step == self._first:
            self._here.rename(self._there)
        if trainer.step == self._last:
            self._there.rename(self._here)


def wait_for_copies(trainer: Trainer) -> None:
    """Train as slowly as the saves, each in a thread of its own, and their copies need."""
    copier = trainer.mirror
    assert isinstance(copier, mirror.Mirror)
    every = trainer.config.checkpoint.every

    def is_offered() -> bool:
        saved = trainer.step // every * every
        return saved == 0 or (copier._offered is not None and step_of(copier._offered) == saved)

    wait_until(is_offered, f"the save before step {trainer.step + 1}")
    for copying in [*copier._under_way.values()]:
        copying.exception()


def test_a_start_that_is_refused_leaves_the_mirror_to_the_run_that_trains(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    wanted = mirrored(text, tmp_path / "run", tmp_path / "mirror")
    refused = list[str]()

    def before(trainer: Trainer) -> None:
        wait_for_copies(trainer)
        if trainer.step != 6 or refused:
            return
        for more in ({}, {"training.steps": "3"}):
            with pytest.raises(UserError) as caught:
                run(wanted | more)
            refused.append(str(caught.value))

    with around_steps(before=before):
        run(wanted)
    assert "is in use by another run" in refused[0]
    assert steps_in(tmp_path / "mirror") == [4, 8, 12, 16]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_mirror_that_is_away_is_named_once_and_at_the_end(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    comes_back: bool,
) -> None:
    monkeypatch.setattr(mirror, "PATIENCE_SECONDS", 0.0)
    location = tmp_path / "mirror"
    away = Away(location, 2, 14 if comes_back else 99)

    def before(trainer: Trainer) -> None:
        wait_for_copies(trainer)
        away(trainer)

    with around_steps(before=before):
        run(mirrored(text, tmp_path / "run", location, **{"checkpoint.every": 3}))
    assert saved_steps(tmp_path / "run/worker-0") == [3, 6, 9, 12, 15, 16]
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "step 3 of worker 0 was not copied: " in warnings[0]
    assert "training continues, and the next save tries again" in warnings[0]
    if comes_back:
        assert len(warnings) == 1
        assert steps_in(location) == [15, 16]
    else:
        assert "the last checkpoint of worker 0 is only in run.folder: step 16" in warnings[1]
        assert len(warnings) == 2


def test_a_run_goes_on_from_its_folder_without_its_mirror_but_does_not_begin_without(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mirror, "PATIENCE_SECONDS", 0.0)
    nowhere = mirrored(text, tmp_path / "run", tmp_path / "not/there")
    with pytest.raises(
        UserError, match=r"checkpoint.mirror cannot be used: .*does not exist or cannot be"
    ):
        run(nowhere)
    run(chosen(text, tmp_path / "run", **{"training.stop_after": 4}))
    run(nowhere)
    assert saved_steps(tmp_path / "run/worker-0") == [4, 8, 12, 16]
    assert caplog.text.count("training continues, and the next save tries again") == 1


@pytest.mark.parametrize(
    ("bucket_name", "message"),
    [
        ("wrong", "the credentials were refused .* set AWS_ACCESS_KEY_ID"),
        ("readonly", "these credentials have no permission to create "),
        ("missing", "there is no such bucket"),
        ("plain", "a second writer could create an object that already exists"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_an_error_at_the_start(
    text: Path,  # noqa: F811
    tmp_path: Path,
    bucket_server: BucketServer,
    monkeypatch: pytest.MonkeyPatch,
    bucket_name: str,
    message: str,
) -> None:
    for key, value in bucket_server.environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=f"checkpoint.mirror cannot be used: .*{message}"):
        run(mirrored(text, tmp_path / "run", f"s3://{bucket_name}/a"))


def test_a_slow_copy_is_waited_for_at_the_end_for_a_bounded_time(
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps that would wait behind another one are skipped, and the last one is not."""
    caplog.set_level("INFO")
    released = threading.Event()
    save = Copies.save

    def slow(self: Copies, *arguments: Any) -> int:
        assert released.wait(60)
        return save(self, *arguments)

    monkeypatch.setattr(Copies, "save", slow)
    few = {"checkpoint.every": 3, "checkpoint.keep_latest": 1, "checkpoint.mirror_wait_seconds": 0}
    run(mirrored(text, tmp_path / "run", tmp_path / "mirror", **few))
    assert "waiting up to 0 s for the last checkpoint to reach the mirror" in caplog.text
    assert "the last checkpoint was not copied within 0 s" in caplog.text
    assert saved_steps(tmp_path / "run/worker-0") == [3, 6, 16], "none that is to be copied"
    assert steps_in(tmp_path / "mirror") == []
    released.set()
    few["checkpoint.mirror_wait_seconds"] = 60
    run(mirrored(text, tmp_path / "run", tmp_path / "mirror", **few))
    assert steps_in(tmp_path / "mirror") == [STEPS]


def _seconds_of_a_wait(location: Path, seconds: list[float]) -> list[float]:
    """Return the seconds for which this rank waits for a mirror, if each may wait so many. The
    first rank comes a second later than the other."""
    world = join(2)
    end = time.monotonic() + seconds[world.rank]
    settings: dict[str, Any] = {"island": "", "writes": True, "toml": "", "check": print}
    config = Checkpoint(mirror=str(location))
    copier = mirror.Mirror(config, world, Mock(), location, **settings)
    with patch.object(mirror, "wait") as waits:
        waits.return_value.not_done = set()
        time.sleep(1 - world.rank)
        copier.finish(lambda: end - time.monotonic())
    return [call.args[1] for call in waits.call_args_list]


def test_the_machine_that_goes_away_first_decides_how_long_all_wait(
    tmp_path: Path, processes: ProcessPool
) -> None:
    one, other = processes.run(_seconds_of_a_wait, 2, tmp_path, [300.0, 90.0])
    assert one == other
    assert 60 < one[0] < 89.5, "less the time until all have met"
