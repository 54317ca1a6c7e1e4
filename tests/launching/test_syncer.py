"""The syncer beside an island, as a child of the launcher of its job."""

import signal
from pathlib import Path

import pytest
import tomli_w

from tests.diloco.toy import config
from tests.islands.by_hand import open_run, settings_of
from tests.islands.test_local import is_gone
from tests.launching.running import Running, launcher, start
from tests.launching.test_torchrun import TORCHRUN
from tests.waiting import wait_until
from torchtitan_diloco.base.user import USER_ERROR
from torchtitan_diloco.islands.__main__ import main as islands
from torchtitan_diloco.islands.beside import SyncerBeside
from torchtitan_diloco.islands.rules.decision import PROTOCOL, Decision, encode_decision
from torchtitan_diloco.islands.rules.names import run_name
from torchtitan_diloco.launching.launch import main
from torchtitan_diloco.store import AwayError, RefusedError

LEADS = "leads, in session"


def settings(tmp_path: Path) -> list[str]:
    words = {"join": tmp_path / "store", "name": "a", "sync": "true"}
    return [word for key, value in words.items() for word in (f"--islands.{key}", str(value))]


def syncer_of(run: Running) -> int:
    """Return the process id of the syncer that a launcher has started beside its ranks."""
    tasks = Path(f"/proc/{run.pid}/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    (syncer,) = children - run.ranks()
    return syncer


def begin_run(location: Path) -> None:
    """Store the first decision of a run, whose founder is not here."""
    decision = Decision(
        PROTOCOL, 1, "another", "run-1", settings_of(config(8)), founder="b/1", stopped=True
    )
    with open_run(location) as run:
        assert run.store.create(run_name(1), encode_decision(decision))


def test_a_second_signal_ends_the_syncer(tmp_path: Path) -> None:
    begin_run(tmp_path / "store")
    console = tmp_path / "console"
    with launcher(console, "wait", *settings(tmp_path), workers=1) as run:
        run.wait_for("waiting")
        run.wait_for(LEADS)
        syncer = syncer_of(run)
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("the run in ")
        assert not is_gone(syncer), "other islands may need it"
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        assert is_gone(syncer)
    assert "is stopped: publishes what is merged, and ends" in run.printed()


def test_the_syncer_ends_with_an_island_that_fails_before_there_is_a_run(tmp_path: Path) -> None:
    console = tmp_path / "console"
    with launcher(console, "crash:2:1", *settings(tmp_path), workers=1) as run:
        assert run.wait() == 2
    assert "the run in " not in run.printed()


def test_the_syncer_outlasts_an_island_that_fails_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a run, whose other islands need it."""
    monkeypatch.setattr("torchtitan_diloco.islands.beside.STOP_SIGNALS", ())
    said = list[str]()
    beside = SyncerBeside(str(tmp_path / "store"), said.append)

    def refuse(error: Exception) -> None:
        def open_nothing(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("torchtitan_diloco.islands.beside.open_store", open_nothing)

    refuse(RefusedError("there is no such bucket"))
    beside.outlast(2)
    assert said == []
    refuse(AwayError("it does not answer"))
    beside.outlast(2)
    assert "cannot be read, and may not have ended: its syncer goes on here" in said[0]


def test_the_login_of_a_site_cannot_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line says what runs the syncer, before any process starts."""
    join = tmp_path / "join-lab.toml"
    login = {"access_key_id": "lab", "secret_access_key": "open-sesame", "prefix": "mirror/lab/"}
    join.write_text(tomli_w.dumps({"location": "s3://islands", "name": "lab"} | login))
    line = f"{join}: the login of lab may not decide for a run: "
    words = ["--islands.join", str(join), "--islands.name", "lab", "--islands.sync", "true"]
    assert main(["--config", "debug", "--run.device", "cpu", *words]) == USER_ERROR
    error = capsys.readouterr().err
    assert f"1 thing to do before this run can start:\n  {line}" in error
    assert islands(["sync", str(join), "--scratch", str(tmp_path / "scratch")]) == USER_ERROR
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")
    assert error.endswith("to run one elsewhere, give the join file of the owner")
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("key", ["islands.sync", "islands.local"])
def test_torchrun_starts_no_syncer_and_no_islands(key: str, tmp_path: Path) -> None:
    words = ["--nproc-per-node", "1", "-m", "torchtitan_diloco.train", "--config", "debug"]
    words += ["--run.device", "cpu"]
    words += settings(tmp_path) if key == "islands.sync" else ["--islands.local", "2"]
    run = start(tmp_path / "console", words, main=TORCHRUN)
    assert run.wait() != 0
    error = {
        "islands.sync": "islands.sync = true: torchrun starts no syncer: remove this",
        "islands.local": "islands.local = 2: a process of torchrun starts no islands: run `",
    }
    assert error[key] in run.printed()
    assert not (tmp_path / "store").exists()


def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path) -> None:
    console = tmp_path / "console"
    with launcher(console, "hang", *settings(tmp_path), workers=1) as run:
        run.wait_for(LEADS)
        run.wait_for("hanging")
        syncer = syncer_of(run)
        run.process.kill()
        run.wait_until_ranks_are_gone()
        run.wait()
        wait_until(lambda: is_gone(syncer), "the end of the syncer")
