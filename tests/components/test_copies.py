"""Copies of checkpoints in a store."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.components.checkpoints import flip_a_bit, saved_steps, write_checkpoint
from torchtitan_diloco.components.checkpoint_folder import (
    Manifest,
    checkpoint_path,
    fingerprint,
    folder_of_worker,
    prune,
    read_manifest,
)
from torchtitan_diloco.components.copies import Copies, Copy, TakenOverError
from torchtitan_diloco.store import DamagedObjectError, Store, StoreError, open_store

TOKEN = "this start"


def copies_in(folder: Path, **options: Any) -> Copies:
    copies = Copies(open_store(folder, quiet=True, patience=0.0), **options)
    copies.take_over(TOKEN)
    return copies


def same_files(one: Path, other: Path) -> bool:
    files = [
        sorted((path.name, fingerprint(path)) for path in folder.iterdir())
        for folder in (one, other)
    ]
    return files[0] == files[1]


def test_a_copy_comes_back_with_the_same_bytes(tmp_path: Path) -> None:
    """Also if its parts are much smaller than its files."""
    path = write_checkpoint(tmp_path / "here", 4, ranks=2, save=7)
    copies = copies_in(tmp_path / "mirror", part_bytes=10)
    assert copies.save(path, 0, TOKEN) > 0
    assert copies.save(path, 0, TOKEN) == 0, "it is there"
    assert copies.whole() == [Copy(step=4, save=7, workers=1)]
    copies.fetch(copies.whole()[0], 0, checkpoint_path(tmp_path / "there", 4))
    assert same_files(path, checkpoint_path(tmp_path / "there", 4))


@given(broken_after=st.integers(0, 12), workers=st.integers(1, 2))
def test_a_copy_that_is_broken_off_anywhere_is_whole_or_not_there(
    tmp_path_factory: pytest.TempPathFactory, broken_after: int, workers: int
) -> None:
    """And the next attempt completes it."""
    folder = tmp_path_factory.mktemp("run")
    paths = [
        write_checkpoint(folder_of_worker(folder, worker), 8, save=7, workers=workers)
        for worker in range(workers)
    ]
    copies = copies_in(folder / "mirror", part_bytes=60)
    left = iter(range(broken_after))
    create = Store.create

    def create_some(self: Store, *arguments: Any, **options: Any) -> bool:
        if next(left, None) is None:
            raise StoreError("cut off")
        return create(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "create", create_some)
        try:
            for worker, path in enumerate(paths):
                copies.save(path, worker, TOKEN)
            is_cut = False
        except StoreError:
            is_cut = True
    assert bool(copies.whole()) == (not is_cut)
    for worker, path in enumerate(paths):
        copies.save(path, worker, TOKEN)
        (copy,) = copies.whole() if worker == workers - 1 else [Copy.of(read_manifest(path))]
        target = checkpoint_path(folder / f"back-{worker}", 8)
        copies.fetch(copy, worker, target)
        assert same_files(path, target)


def test_the_same_step_with_other_bits_is_another_copy(tmp_path: Path) -> None:
    copies = copies_in(tmp_path / "mirror")
    for save in (7, 8):
        path = write_checkpoint(tmp_path / str(save), 4, save=save, config=f"{save}")
        copies.save(path, 0, TOKEN)
    assert [copy.save for copy in copies.whole()] == [7, 8]
    path = write_checkpoint(tmp_path / "again", 4, save=8, config="changed")
    copies.save(path, 0, TOKEN)  # the same tensors, resumed with other settings
    copies.fetch(copies.whole()[1], 0, checkpoint_path(tmp_path / "back", 4))
    assert same_files(path, checkpoint_path(tmp_path / "back", 4))


def test_old_copies_are_deleted_as_local_ones_are(tmp_path: Path) -> None:
    copies = copies_in(tmp_path / "mirror")
    for step in range(2, 17, 2):
        path = write_checkpoint(tmp_path / "here", step, save=step)
        copies.save(path, 0, TOKEN)
        copies.prune(0, step, keep_latest=2, keep_every=10)
        prune(tmp_path / "here", keep_latest=2, keep_every=10)
    assert [copy.step for copy in copies.whole()] == saved_steps(tmp_path / "here") == [10, 14, 16]
    left = {
        path.parent.name for path in (tmp_path / "mirror/worker-0").rglob("*") if path.is_file()
    }
    assert left == {copy.name for copy in copies.whole()}, "nothing is left of the others"


def test_copies_of_workers_that_the_run_no_longer_has_are_deleted(tmp_path: Path) -> None:
    copies = copies_in(tmp_path / "mirror")
    for step, workers in ((2, 3), (4, 3), (6, 1), (8, 1)):
        for worker in range(workers):
            folder = folder_of_worker(tmp_path, worker)
            path = write_checkpoint(folder, step, save=step, workers=workers)
            copies.save(path, worker, TOKEN)
        for worker in range(workers):
            copies.prune(worker, step, keep_latest=2, keep_every=0, workers=workers)
        there = {file.parent.name for file in (tmp_path / "mirror").rglob("rank-0*")}
        assert there == {copy.name for copy in copies.whole()[-2:]}
    assert {file.parent.parent.name for file in (tmp_path / "mirror").rglob("rank-0*")} == {
        "worker-0"
    }


def test_a_copy_that_lacks_a_worker_neither_counts_nor_pushes_others_out(tmp_path: Path) -> None:
    copies = copies_in(tmp_path / "mirror")
    for step in (2, 4, 6, 8):
        for worker in range(2):
            own = folder_of_worker(tmp_path, worker)
            path = write_checkpoint(own, step, save=step, workers=2)
            if worker == 0 or step in (2, 8):
                copies.save(path, worker, TOKEN)
                copies.prune(worker, step, keep_latest=1, keep_every=0)
        assert [copy.step for copy in copies.whole()] == ([2] if step < 8 else [8])
    copies.prune(0, 8, keep_latest=1, keep_every=0)
    there = {
        path.parent.name for path in (tmp_path / "mirror/worker-0").rglob("*") if path.is_file()
    }
    assert there == {copies.whole()[0].name}


@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_part_that_was_altered_or_is_gone_is_named(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    copies = copies_in(tmp_path / "mirror")
    copies.save(write_checkpoint(tmp_path / "here", 4), 0, TOKEN)
    damage(next((tmp_path / "mirror/worker-0").rglob("rank-0*")))
    target = checkpoint_path(tmp_path / "back", 4)
    with pytest.raises(DamagedObjectError, match=r"rank-0\.safetensors"):
        copies.fetch(copies.whole()[0], 0, target)
    assert list(target.parent.iterdir()) == []


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    copies = copies_in(tmp_path / "mirror")
    path = write_checkpoint(tmp_path / "here", 4)
    manifest = read_manifest(path)
    copies.save(path, 0, TOKEN)
    (file,) = (tmp_path / "mirror/copy").rglob("worker-0")
    file.unlink()
    evil = replace(manifest, files={"../../evil": (1, 1)})
    copies._large.create(f"copy/{copies_name(manifest)}/worker-0", evil.to_json().encode())
    with pytest.raises(DamagedObjectError, match="manifest of another one"):
        copies.fetch(Copy.of(manifest), 0, checkpoint_path(tmp_path / "back", 4))


def copies_name(manifest: Manifest) -> str:
    return Copy.of(manifest).name


def test_a_later_start_of_the_run_takes_the_mirror_over(tmp_path: Path) -> None:
    copies = copies_in(tmp_path / "mirror")
    path = write_checkpoint(tmp_path / "here", 4)
    later = Copies(open_store(tmp_path / "mirror"))
    later.take_over("another start")
    later.take_over("another start")  # each of its processes does so
    assert len(list((tmp_path / "mirror/start").iterdir())) == 1
    with pytest.raises(TakenOverError, match="a later start of this run has taken it over"):
        copies.save(path, 0, TOKEN)
    assert copies.whole() == []
    later.save(path, 0, "another start")
    assert len(copies.whole()) == 1


def test_a_token_that_has_expired_is_written_again(tmp_path: Path) -> None:
    """It is the oldest object, so that a rule of a bucket deletes it first."""
    copies = copies_in(tmp_path / "mirror")
    for step in (4, 8):
        (token,) = (tmp_path / "mirror/start").iterdir()
        token.unlink()
        copies.save(write_checkpoint(tmp_path / "here", step, save=step), 0, TOKEN)
    assert [copy.step for copy in copies.whole()] == [4, 8]
    assert copies.is_newest(TOKEN)


def test_copies_read_only_what_they_have_written(tmp_path: Path) -> None:
    (tmp_path / "mirror/copy/notes").mkdir(parents=True)
    (tmp_path / "mirror/copy/notes/worker-0").write_text("mine")
    copies = copies_in(tmp_path / "mirror")
    copies.save(write_checkpoint(tmp_path / "here", 4), 0, TOKEN)
    copies.prune(0, 4, keep_latest=1, keep_every=0)
    assert [copy.step for copy in copies.whole()] == [4]
    assert (tmp_path / "mirror/copy/notes/worker-0").read_text() == "mine"
