"""A folder keeps promises of its own: writers die, and disks fill."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.store.places import PATIENCE
from torchtitan_diloco.base.hardware import end_with_parent
from torchtitan_diloco.store import (
    AwayError,
    FullError,
    LargeObjects,
    RefusedError,
    Store,
    StoreError,
    open_store,
)
from torchtitan_diloco.store import folder as module
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.store import seal

OLD = b"old content" * 100
NEW = b"new content" * 200


def _kill_before_call(number: int) -> None:
    """Kill this process before it calls its `number`-th function in C, such as a system call."""
    left = number

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal left
        if event == "c_call":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def _write_and_die(path: Path, verb: str) -> list[str]:
    """Write an object in one process after another, each of which is killed one call later than the
    one before, until one ends. Return what a reader found after each: old, new or missing."""
    found = list[str]()
    while True:
        folder = Folder(path / str(len(found)))
        if verb == "replace":
            folder.replace("a/b", seal(OLD), large=False, durable=True)
        child = os.fork()
        if child == 0:
            end_with_parent()
            _kill_before_call(len(found) + 1)
            if verb == "create":
                folder.create("a/b", seal(NEW), large=False, durable=True)
            else:
                folder.replace("a/b", seal(NEW), large=False, durable=True)
            sys.setprofile(None)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        raw = folder.get("a/b", large=False)
        contents = {seal(OLD): "old", seal(NEW): "new"}
        found.append(contents.get(raw.sealed, "broken") if raw else "missing")
        assert [one.name for one in folder.list("", "", None)] == ["a/b"] * (raw is not None)
        # Whatever was left is in nobody's way.
        assert folder.create("a/b", seal(NEW), large=False, durable=True) == (found[-1] != "old")
        folder.replace("a/b", seal(NEW), large=False, durable=True)
        if code == 0:
            return found
        assert code == -signal.SIGKILL


@pytest.mark.parametrize(("verb", "before"), [("create", "missing"), ("replace", "old")])
def test_a_writer_that_is_killed_leaves_all_or_nothing(
    tmp_path: Path, verb: str, before: str
) -> None:
    code = "import json, sys; from pathlib import Path; from tests.store.test_folder import "
    code += "_write_and_die; print(json.dumps(_write_and_die(Path(sys.argv[1]), sys.argv[2])))"
    output = subprocess.check_output([sys.executable, "-c", code, str(tmp_path), verb], text=True)
    found = json.loads(output)
    changed = found.index("new")
    assert changed > 10, "there are that many calls before"
    assert found == [before] * changed + ["new"] * (len(found) - changed)
    assert len(found) > changed + 3, "and some after"
    left = [one for one in tmp_path.rglob(".*") if one.suffix == module.TEMPORARY]
    assert left, "temporary files of those killed"
    for path in tmp_path.iterdir():
        for one in path.rglob(f".*{module.TEMPORARY}"):
            os.utime(one, (0, 0))
        Folder(path).tidy(time.time())
    assert not [one for one in tmp_path.rglob(".*") if one.suffix == module.TEMPORARY]


def test_temporary_files_are_kept_for_their_writer(tmp_path: Path) -> None:
    young = tmp_path / ".a.1234.tmp"
    other = tmp_path / ".serve"
    for path in (young, other):
        path.write_text("")
    os.utime(other, (0, 0))
    store = open_store(tmp_path)
    store.tidy()
    assert young.exists()
    assert other.exists()
    assert store.list("") == []


def test_the_clock_of_the_store_says_how_old_a_temporary_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose clock is a year ahead leaves the files of living writers alone."""
    year = 3.15e7
    now = time.time
    monkeypatch.setattr("torchtitan_diloco.store.store.time.time", lambda: now() + year)
    path = tmp_path / ".a.1234.tmp"
    path.write_text("")
    store = open_store(tmp_path)
    store.tidy()
    assert path.exists()
    os.utime(path, (now() - 2 * module.STALE_SECONDS,) * 2)
    store.tidy()
    assert not path.exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EPERM, errno.EACCES])
def test_a_temporary_file_that_cannot_be_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It ends no syncer, prevents no start, and the others are deleted all the same."""
    unlink = Path.unlink
    left = [tmp_path / folder / ".a.1234.tmp" for folder in ("a", "b", "c")]
    for path in left:
        path.parent.mkdir()
        path.write_text("")
        os.utime(path, (0, 0))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == left[1]:
            raise OSError(number, os.strerror(number), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    open_store(tmp_path).tidy()
    assert [path.exists() for path in left] == [False, True, False]


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the descriptors that are flushed."""
    found = list[int]()
    fsync = os.fsync

    def note_and_flush(descriptor: int) -> None:
        found.append(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_and_flush)
    return found


def test_a_note_needs_no_flush(tmp_path: Path, flushed: list[int]) -> None:
    store = open_store(tmp_path)
    store.create("island/a", b"0")
    flushed.clear()
    store.replace("island/a", b"1", durable=False)
    assert flushed == []
    store.replace("island/a", b"2")
    assert len(flushed) == 2, "the file and its folder"
    found = store.get("island/a")
    assert found is not None
    assert found.content == b"2"


def test_a_content_that_need_not_be_durable_is_not_flushed(
    tmp_path: Path, flushed: list[int]
) -> None:
    """Neither its chunks nor the object that names them, but all of them if it must be."""
    store = open_store(tmp_path)
    store.create("part/a", b"")
    with LargeObjects(store, 2, chunk_bytes=1000) as large:
        flushed.clear()
        assert large.create("part/b", bytes(3000), durable=False)
        assert large.create("part/b", bytes(3000), durable=False)
        assert flushed == []
        assert large.create("part/c", bytes(3000))
        assert len(flushed) == 8, "four files, and their folder after each"


def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RefusedError, match=r"no hard links .* use a local file system, NFS"):
        open_store(tmp_path / "run")


def test_a_file_system_on_which_links_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", os.replace)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(RefusedError, match="a second writer could create"):
        open_store(tmp_path / "run")


def _fill_a_disk(folder: str) -> None:
    """Fill a small file system of this process's own, and print the error."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], check=True)
    store = open_store(folder, patience=1.0)
    assert store.create("a", bytes(100_000))
    try:
        store.create("b", bytes(200_000))
    except FullError as error:
        assert store.get("b") is None
        assert not [one for one in os.listdir(folder) if one not in ("a", module.MARKER)]  # noqa: PTH208
        print(error)


def test_a_full_disk(tmp_path: Path) -> None:
    code = "import sys; from tests.store.test_folder import _fill_a_disk; _fill_a_disk(sys.argv[1])"
    command = ["unshare", "--mount", "--map-root-user", sys.executable, "-c", code, str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mounts here: {done.stderr.splitlines()[-1]}")
    assert done.stdout == (
        f"{tmp_path}: No space left on device; free some space on this disk\n"
    ), done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RefusedError, match=r"Permission denied; .*"):
        open_store(tmp_path)


def test_another_folder_in_its_place(tmp_path: Path) -> None:
    """A file system that was mounted is gone: nothing is stored below its empty folder."""
    path = tmp_path / "run"
    aside = tmp_path / "aside"
    store = open_store(path, patience=0.2)
    store.create("a", b"1")
    path.rename(aside)
    path.mkdir()
    for call in (
        lambda: store.create("b", b"1"),
        lambda: store.get("a"),
        lambda: store.list(""),
    ):
        with pytest.raises(AwayError, match="not the same folder as before; is it mounted"):
            call()
    assert not list(path.iterdir())
    path.joinpath(module.MARKER).write_text("that of another store")
    with pytest.raises(AwayError, match="not the same folder as before"):
        store.list("")
    shutil.rmtree(path)
    with pytest.raises(AwayError, match="No such file"):
        store.get("a")
    aside.rename(path)
    assert store.create("b", b"1")


def test_the_same_folder_with_another_number(tmp_path: Path) -> None:
    """Such as one on a server, which was mounted again: calls go on."""
    path = tmp_path / "run"
    store = open_store(path, patience=0.2)
    other = open_store(path, patience=0.2, writes=None)
    store.create("a", b"1")
    path.rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", path)
    assert [one.name for one in store.list("")] == ["a"]
    assert store.create("b", b"1")
    assert other.get("b") is not None
    assert [one.name for one in open_store(path, writes=None).list("")] == ["a", "b"]


def test_two_that_open_a_new_folder_agree_on_its_marker(tmp_path: Path) -> None:
    folders = [Folder(tmp_path / "run") for _ in range(2)]
    marker = (tmp_path / "run" / module.MARKER).read_bytes()
    assert marker
    assert [folder._marker for folder in folders] == [marker] * 2


def test_a_folder_is_made_only_in_one_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"/typo does not exist or cannot be written"):
        open_store(tmp_path / "typo" / "run")
    with pytest.raises(RefusedError) as raised:
        open_store(tmp_path / "run", writes=None)
    assert str(raised.value).startswith(f"{tmp_path}/run does not exist or cannot be written; ")
    open_store(tmp_path / "run")
    assert open_store(tmp_path / "run", writes=None).list("") == []


def test_an_object_has_none_below_its_name(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.create("a", b"")
    store.create("b/c", b"")
    for call in (
        lambda: store.create("a/b", b""),
        lambda: store.create("b", b""),
        lambda: store.get("b"),
        lambda: store.replace("b", b""),
    ):
        with pytest.raises(StoreError, match="cannot be the folder of another"):
            call()


def test_files_of_others_are_no_objects(tmp_path: Path) -> None:
    (tmp_path / "lost + found").mkdir()
    (tmp_path / "lost + found" / "a").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    store = open_store(tmp_path)
    store.create("a", b"")
    assert [one.name for one in store.list("")] == ["a"]


def test_the_age_of_what_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.create("a", b"")
    os.utime(tmp_path / "a", (time.time() - 100,) * 2)
    found = store.get("a")
    assert found is not None
    assert 99 < found.age < 100 + PATIENCE
    [entry] = store.list("")
    assert 99 < entry.age < 100 + PATIENCE


def test_the_clock_of_the_store_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a file system has another clock than this machine."""
    now = time.time
    monkeypatch.setattr("torchtitan_diloco.store.store.time.time", lambda: now() + 1e6)
    store = open_store(tmp_path)
    store.create("a", b"")
    found = store.get("a")
    assert found is not None
    assert found.age < PATIENCE


def test_empty_folders_do_not_pile_up(tmp_path: Path) -> None:
    """Two writers make and delete the folders of each other."""
    store = open_store(tmp_path)
    failures = list[Exception]()

    def write(own: str) -> None:
        try:
            for _ in range(100):
                assert store.create(f"part/a/b/{own}", b"")
                store.delete(f"part/a/b/{own}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(own,)) for own in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list((tmp_path / "part").iterdir()) == []


def test_folders_that_appear_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, what was created is there: each name that leads to it was flushed."""
    store = Store(Folder(tmp_path))
    flushed = list[str]()
    flush = module._flush_folder

    def note_and_flush(path: Path) -> None:
        flushed.append(path.name)
        flush(path)

    monkeypatch.setattr(module, "_flush_folder", note_and_flush)
    store.create("a/b/c", b"")
    assert flushed == [tmp_path.name, "a", "b"]
