"""Read a run from its store, and show it with commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.islands.rules.desk import A
from tests.islands.written_run import STEPS, WrittenRun, damage, reading
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.islands import reader
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.rules import history
from torchtitan_diloco.islands.rules.names import run_name
from torchtitan_diloco.islands.rules.note import Note
from torchtitan_diloco.report.run_history import read_history
from torchtitan_diloco.store import AwayError, open_store

SOON = 20.0


def test_a_reader_sees_what_was_before_the_syncer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BIN_SECONDS", SOON)
    run = WrittenRun()
    for number in range(12):
        run.rounds(5, validated=(10 * number, 4.0 - number / 10))
    assert len(run.history) >= 2
    run.write(tmp_path)
    with reading(tmp_path) as opened:
        assert len(opened.view().past.losses) == 12
        assert len(opened.view().past.intervals["a"]) == len(run.history) + 1
    monkeypatch.setattr(reader, "NEWEST_BINS", 1)
    with reading(tmp_path, whole=False) as opened:
        assert len(opened.view().past.intervals["a"]) == 2
    (tmp_path / "history" / "000000").write_bytes(b"damaged")
    with reading(tmp_path) as opened:
        assert len(opened.view().past.intervals["a"]) == len(run.history), "the others"


def test_status_prints_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = WrittenRun()
    run.rounds(2)
    run.write(tmp_path)
    assert main(["status", "--join", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["location"] == str(tmp_path)
    assert found["tokens_merged"] == 4 * STEPS
    assert main(["status", "--join", str(tmp_path)]) == 0
    assert "run r: running; store: ok" in capsys.readouterr().out


def test_watch_goes_on_without_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = WrittenRun()
    run.rounds(1)
    run.write(tmp_path / "store")
    refreshed = list[float]()

    def sleep(seconds: float) -> None:
        refreshed.append(seconds)
        if len(refreshed) == 1:
            (tmp_path / "store").rename(tmp_path / "away")
            (tmp_path / "store").mkdir()
        if len(refreshed) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(reader, "COMMAND_PATIENCE", 0.0)
    monkeypatch.setattr("torchtitan_diloco.islands.reader.time.sleep", sleep)
    assert main(["watch", "--join", str(tmp_path / "store")]) == 128 + signal.SIGINT
    shown = capsys.readouterr().out.split("run r: ")[1:]
    assert ["store: ok" in text for text in shown] == [True, False, False]
    assert all("40 of" in text or "20 of" in text for text in shown), "what was read before"


@pytest.mark.parametrize("ahead", [10.0, 1800.0])
def test_status_says_that_no_syncer_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Also if the last decision seems to come from the future, as this machine's clock is wrong."""
    passed = [0.0]
    monotonic = time.monotonic
    monkeypatch.setattr(time, "sleep", passed.append)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(passed))
    run = WrittenRun()
    run.rounds(1)
    run.write(tmp_path)
    at = time.time() + ahead
    os.utime(tmp_path / run_name(run.state.number), (at, at))
    with reader.open_reader(str(tmp_path)) as opened:
        found = opened.overview()
    assert found["phase"].startswith("no syncer decides since")
    assert found["eta_seconds"] is None


def test_a_damaged_decision_does_not_hide_that_no_syncer_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The syncer may have died as it wrote that one."""
    run = WrittenRun()
    run.rounds(1)
    run.write(tmp_path)
    with reading(tmp_path) as opened:
        assert opened.overview()["phase"] == "running"
        run.rounds(1)
        run.write(tmp_path)
        damage(tmp_path, run.state.number)
        later = time.monotonic() + 20.0
        monkeypatch.setattr(time, "monotonic", lambda: later)
        opened.read()
        found = opened.overview()
    assert found["connection"].startswith("a decision could not be read (run/")
    assert found["phase"].startswith("no syncer decides since 2")
    assert found["eta_seconds"] is None


def test_a_command_waits_for_the_decision_after_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one within a second if a syncer decides. If none does, a report says why."""
    run = WrittenRun()
    run.rounds(1)
    run.write(tmp_path)
    damage(tmp_path, run.state.number)
    monkeypatch.setattr(reader, "LISTEN_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"a decision could not be read \(run/\d+ was altered"):
        read_history(str(tmp_path))

    def decide(_: float) -> None:
        run.pass_time(1.0)
        run.write(tmp_path)

    monkeypatch.setattr(reader, "LISTEN_SECONDS", 60.0)
    monkeypatch.setattr("torchtitan_diloco.islands.reader.time.sleep", decide)
    with reader.open_reader(str(tmp_path)) as opened:
        found = opened.overview()
    assert (found["phase"], found["connection"]) == ("running", "ok")


def test_a_store_that_goes_away_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    run = WrittenRun()
    run.rounds(1)
    run.write(folder)
    with reading(folder) as opened:
        folder.rename(tmp_path / "away")
        folder.mkdir()
        for _ in range(2):
            with pytest.raises(AwayError):
                opened.read()
        found = opened.overview()
        assert found["connection"].startswith("cannot be reached since")
        assert found["tokens_merged"] == 2 * STEPS, "what was read before"
        folder.rmdir()
        (tmp_path / "away").rename(folder)
        opened.read()
        assert opened.overview()["connection"] == "ok"


def test_notes_of_strangers_do_no_harm(tmp_path: Path) -> None:
    run = WrittenRun()
    run.rounds(1)
    run.notes["stranger/0000"] = b"\xff"
    run.notes |= {f"x{number}/0000": b'[1,"join"]' for number in range(200)}
    run.notes[A] = run.notes[A].replace(b"2.5", b"1e999")
    run.write(tmp_path)
    with reading(tmp_path) as opened:
        found = opened.overview()
    assert len(found["islands"]) <= 2 + reader.MOST_JOINING
    assert isinstance(opened.view().notes[A], Note)


@pytest.mark.parametrize("place", ["missing", "file.toml", "ftp://host/x"])
def test_a_wrong_location_is_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.toml").write_text("location = 3\n")
    for words in (["status"], ["watch"], ["leave", "a"], ["evict", "a"], ["change", "x", "1"]):
        assert main([*words, "--join", place]) == USER_ERROR
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1


def test_a_folder_of_other_files_is_no_run_that_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location = str(tmp_path)
    words = (["status"], ["watch"], ["leave", "a"], ["evict", "a"], ["change", "slots", "9"])
    for name in ("lost+found", ".store-id.0.tmp"):
        assert main(["status", "--join", location]) == 0, "an empty folder may be its place"
        (tmp_path / name).mkdir()
    assert main(["status", "--join", location]) == 0, "and so may an empty disk"
    (tmp_path / "a thesis.tex").touch()
    for remedy in ("give the islands.join of its islands", f"give {tmp_path / 'store'}"):
        for command in words:
            capsys.readouterr()
            assert main([*command, "--join", location]) == USER_ERROR
            what = f"{location} is not the store of a run, and has other files"
            assert capsys.readouterr().err == f"error: {what}: {remedy}\n"
        open_store(tmp_path / "store").close()
    assert main(["status", "--join", str(tmp_path / "store")]) == 0, "no island has come yet"
    assert "no run yet" in capsys.readouterr().out
    run = WrittenRun()
    run.rounds(1)
    run.write(tmp_path / "store")
    (tmp_path / "store" / ".store-id").unlink()
    assert main(["status", "--join", str(tmp_path / "store")]) == 0, "a copy without the marker"


def test_the_commands_do_not_import_torch(tmp_path: Path) -> None:
    run = WrittenRun()
    run.rounds(1)
    run.write(tmp_path)
    program = (
        "import sys; from torchtitan_diloco.islands.__main__ import main\n"
        f"assert main(['status', '--json', '--join', {str(tmp_path)!r}]) == 0\n"
        "import torchtitan_diloco.islands.page\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, timeout=60)
