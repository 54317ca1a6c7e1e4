"""Commands of the server, as a user runs them."""

import dataclasses
import io
import json
import math
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.islands.servers import Listener, free_port, need_server, running_server, wait_until
from tests.islands.written import Log
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.islands import reader
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.config import Join, LoginError
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Hint
from torchtitan_diloco.islands.records import Give, encode
from torchtitan_diloco.islands.server import make_streams, open_folder
from torchtitan_diloco.islands.session import open_session

need_server()

COMMAND = [sys.executable, "-m", "torchtitan_diloco.islands"]
TIMEOUT = 200


class Serving:
    """A running `serve` that has said where its join string is."""

    def __init__(self, *arguments: object) -> None:
        words = [*COMMAND, "serve", "--host", "127.0.0.1", *map(str, arguments)]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        (file,) = re.findall(r"contains a password, is in (\S+)\. Give this file", line)
        self.join = Join.parse(file)
        assert f"Islands connect to {self.join.addresses[0]}." in line
        assert self.join.password not in line, "journals keep what a service prints"

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, errors.strip()


@contextmanager
def serving(*arguments: object) -> Iterator[Serving]:
    found = Serving(*arguments)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.terminate()
            found.wait()


def test_a_server_that_is_started_again_goes_on_with_its_run(tmp_path: Path) -> None:
    folder, port = tmp_path / "server", free_port()
    flags = ["--folder", folder, "--port", port, "--address", "127.0.0.1", "--keep-gb", 0.1]
    with serving(*flags, "--run", "mine") as first:
        with Listener(first.join, "a/1") as listener:
            listener.connection.append(b"1")
            listener.read_to(1)
        secret = [folder / name for name in ("run.json", "nats-server.json", "key.pem")]
        assert [oct(path.stat().st_mode & 0o777) for path in secret] == ["0o600"] * 3
        with pytest.raises(ValueError, match="a server is already running in it"):
            open_folder(folder, port=free_port()).start()
        with pytest.raises(ValueError, match=f"--port {port}: .* address already in use"):
            open_folder(tmp_path / "other", host="127.0.0.1", port=port).start()
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == (0, "")
    with serving("--folder", folder) as again:
        assert again.join == first.join
        assert again.join.run == "mine"
        with Listener(again.join, "a/2") as listener:
            assert listener.wait_connected() == 1
            assert [record[:2] for record in listener.read_to(1)] == [(1, b"1")]
            process = again.process.pid
            children = Path(f"/proc/{process}/task/{process}/children")
            os.kill(int(children.read_text()), signal.SIGKILL)
            listener.wait_disconnected()
            listener.wait_connected()
            listener.connection.append(b"2")
            listener.read_to(2)
        again.process.terminate()
        printed, _ = again.process.communicate(timeout=TIMEOUT)
        assert "nats-server ended with code -9; restarting it in 1 s" in printed


def test_a_terminal_shows_the_join_string(tmp_path: Path) -> None:
    reading, terminal = pty.openpty()
    flags = ["--folder", str(tmp_path / "server"), "--port", str(free_port()), "--keep-gb", "0.1"]
    server = subprocess.Popen([*COMMAND, "serve", *flags], stdout=terminal, cwd=REPOSITORY)
    try:
        with os.fdopen(reading, encoding="utf-8") as shown:
            join = Join.parse(shown.readline())
            assert "Give this line, which contains a password" in shown.readline()
            assert join == Join.parse(str(tmp_path / "server/join.txt"))
            server.terminate()
            server.wait(TIMEOUT)
    finally:
        server.kill()
        server.wait()
        os.close(terminal)


def test_what_cannot_be_served_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, used, broken, new = (tmp_path / name for name in ("known", "used", "broken", "new"))
    with running_server(known):
        pass
    for path in (used / "file", broken / "run.json"):
        path.parent.mkdir()
        path.touch()
    away: dict[str, Any] = {"host": "2001:db8::1", "port": free_port()}
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (new, {"port": 99999}, "^--port 99999: expected"),
        (new, {"keep_gb": math.nan}, "^--keep-gb nan: expected"),
        (new, {"address": ""}, "^--address '': give a name"),
        (new, {"host": "[::]"}, r"^--host '\[::\]': give an address of this machine"),
        (new, {"run": "a.b"}, r"^--run 'a\.b': give at most 64 characters"),
        (used, {}, "it contains files, but no run"),
        (used / "file/x", {}, f"^--folder {used}/file/x: "),
        (broken, {}, r"run\.json is damaged"),
        (known, {"run": "other"}, "belongs to the run test"),
        (tmp_path / "away", away, "--host 2001:db8::1 .*; give a free port, and an address"),
        (tmp_path / "large", {"keep_gb": 1e6}, "GB left, and the server needs 2000"),
    ]
    for folder, chosen, problem in wrong:
        with pytest.raises(UserError, match=problem):
            open_folder(folder, **chosen).start()
    assert main(["serve", "--folder", "/proc/x"]) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --folder /proc/x: ")
    assert main(["serve", "--folder", str(new), "--http", "x"]) == USER_ERROR
    assert "--http x: give a port, HOST:PORT or " in capsys.readouterr().err
    assert not new.exists()
    again = open_folder(tmp_path / "away").settings
    assert (again.host, again.port) == ("0.0.0.0", 4222), "what failed is not kept"
    (known / "store").rename(known / "lost")
    with pytest.raises(ValueError, match="the log of the run test is missing"):
        open_folder(known).start()
    (known / "key.pem").write_text("damaged")
    with pytest.raises(ValueError, match=r"nats-server did not start: .*key"):
        open_folder(known).start()
    (known / "certificate.pem").unlink()
    with pytest.raises(ValueError, match=r"--folder .*/known: .*certificate\.pem: No such file"):
        open_folder(known)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_has_an_ipv6_address(tmp_path: Path, host: str) -> None:
    port = free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6")
    flags = ["--folder", tmp_path / "server", "--port", port, "--keep-gb", 0.1, "--host", host]
    with serving(*flags) as server:
        (address,) = server.join.addresses
        assert address == f"[::1]:{port}" or host == "::"
        join = dataclasses.replace(server.join, addresses=(f"[::1]:{port}",))
        with Listener(Join.parse(str(join)), "a/1") as listener:
            listener.connection.append(b"1")
            listener.read_to(1)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    server = open_folder(tmp_path / "server", port=free_port(), say=said.append)
    where = "[7] 2026/01/01 10:00:00.0 [ERR]"
    full = f"{where} JetStream failed to store a msg: write 1.blk: no space left on device\n"
    server._pass_on(io.StringIO(full + full + f"{where} another\n[INF] nothing\n" + full))
    assert len(said) == 2
    assert "the disk is full, and nothing more is stored: free some space" in said[0]
    assert said[1] == "[ERR] another"


def test_help_does_not_import_torch() -> None:
    code = "import sys; from torchtitan_diloco.islands.__main__ import main\n"
    code += "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True).returncode == 0


def test_keep_gb_changes_the_streams_of_a_folder(tmp_path: Path) -> None:
    port = free_port()
    for keep_gb in (0.1, 0.3, 0.2, None):
        server = open_folder(tmp_path / "server", run="test", port=port, keep_gb=keep_gb)
        server.start()
        try:
            with open_session(server.admin, "test") as session:
                found = session.call("STREAM.INFO.islands-test-parts")["config"]["max_bytes"]
        finally:
            server.stop()
        assert found == int(1e9 * (keep_gb or 0.2))


def test_streams_that_cannot_be_made_are_said(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server:
        away = dataclasses.replace(server.admin, addresses=(f"127.0.0.1:{free_port()}",))
        for admin in (server.admin, away, server.join):
            with pytest.raises(ValueError, match="the streams of the run test cannot be created"):
                make_streams(admin, 0.1, replicas=3)


# --- sites ----------------------------------------------------------------------------------------


def test_each_site_has_a_login_that_can_be_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "server"
    flags = ["--folder", folder, "--port", free_port(), "--keep-gb", 0.1]
    own, file = ["--folder", str(folder)], folder / "join-lab.txt"

    def change(*words: str) -> Join:
        assert main(["site", "lab", *own, *words]) == 0
        return Join.parse(capsys.readouterr().out.splitlines()[0])

    def connect(join: Join) -> Listener:
        """Connect once the server has taken up the change."""
        while True:
            try:
                return Listener(join, "lab/1")
            except LoginError:
                time.sleep(0.1)

    with serving(*flags) as server, Listener(server.join, "a/1") as other:
        with connect(change()) as lab:
            assert lab.join == Join.parse(str(file)) != server.join
            assert oct(file.stat().st_mode & 0o777) == "0o600"
            renewed = change("--renew")
            with pytest.raises(LoginError, match="refuses the user or the password"):
                wait_until(lab.connection.receive, "the refusal")
            with pytest.raises(LoginError):  # it does not try again
                lab.connection.store(b"x", "parts")
        with connect(renewed) as lab:
            assert main(["site", "lab", *own, "--revoke"]) == 0
            with pytest.raises(LoginError):
                wait_until(lab.connection.receive, "the refusal")
        assert not file.exists()
        other.connection.append(b"1")
        other.read_to(1)
        assert not other.connection.problem
    capsys.readouterr()
    for name, words in (("lab", ["--revoke"]), ("island", []), ("admin", []), ("a b", [])):
        assert main(["site", name, *own, *words]) == USER_ERROR
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first == "error: there is no site lab; there are: island"
    assert "join.txt; --renew gives it a new password" in second
    assert all("give a name other than admin" in line for line in others)
    assert main(["site", "a", "--folder", str(tmp_path)]) == USER_ERROR
    error = f"there is no run in {tmp_path}: it has no run.json; give the --folder of `serve`"
    assert error in capsys.readouterr().err


def test_a_site_that_is_added_while_the_server_starts_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_a_site(*chosen: Any) -> None:
        make_streams(*chosen)
        open_folder(tmp_path / "server").change_site("lab", "add")

    monkeypatch.setattr("torchtitan_diloco.islands.server.make_streams", add_a_site)
    with running_server(tmp_path / "server") as found:
        join = Join.parse(str(found.join_file("lab")))
        wait_until(lambda: can_connect(join), "the new login")


def can_connect(join: Join) -> bool:
    try:
        with open_session(join, "test") as session:
            return bool(session.state_of("log"))
    except LoginError:
        return False


# --- status and leave -----------------------------------------------------------------------------


@pytest.fixture
def island(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """An island, with the log of a run."""
    monkeypatch.setattr(reader, "LISTEN_SECONDS", 2.0)
    log = Log()
    log.round(10)
    log.part(1, 30)
    with running_server(tmp_path / "server") as server, Listener(server.join, "a") as listener:
        for raw in log.raw:
            listener.connection.append(raw)
        listener.read_to(len(log.raw))
        yield listener


def test_status_and_leave(island: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    join = ["--join", str(island.join)]

    def live() -> None:
        """Beat until asked to leave, then give the slot back."""
        while not island.connection.leaving:
            island.connection.beat(Hint("a", 5, 500, 0.25, caught_up=True))
            time.sleep(0.1)
        island.connection.append(encode(Give(run="r", slot=0, incarnation="a")))

    thread = threading.Thread(target=live)
    thread.start()
    assert main(["status", *join, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["leave", "a", *join]) == 0
    thread.join()
    assert "a has left" in capsys.readouterr().out
    assert main(["leave", "a", *join]) == USER_ERROR
    assert "the run has no island 'a'; it has: b" in capsys.readouterr().err
    assert main(["status", *join]) == 0
    assert "tokens merged: 10 of 100 (10.0%)" in capsys.readouterr().out
    assert (found["run"], found["phase"], found["tokens_merged"]) == ("test", "running", 10)
    first, second = found["islands"]
    assert (first["incarnation"], first["slot"], first["step"]) == ("a", 0, 5)
    assert first["tokens_per_second"] == 400
    assert (second["incarnation"], second["heard_seconds_ago"]) == ("b", None)
    fragment, (slot, other) = found["fragments"][0], found["slots"]
    assert fragment.pop("merged_seconds_ago") < TIMEOUT
    assert fragment == {"fragment": 0, "version": 1, "open": False, "waiting": 1} | {
        "open_seconds": None,
        "waits_for": [],
    }
    means = {"merged": 5, "lost": 0, "waiting": 0, "read_twice": 0}  # over two fragments
    share = {"part_in_rounds": 1.0, "rounds_since_last_part": 0}
    assert slot == {"slot": 0, "owner": "a"} | means | share
    assert (other["waiting"], other["rounds_since_last_part"]) == (15, 1)


def test_nobody_leaves_a_run_that_has_ended(
    island: Listener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, "ended", property(lambda _: True, lambda *_: None))
    assert main(["leave", "a", "--join", str(island.join)]) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: island a cannot leave: the run r has ended"
