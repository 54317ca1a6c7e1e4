"""Check of the log of a folder: what is missing, damaged or does not fit is named."""

from pathlib import Path

import msgspec
import pytest

from tests.islands.servers import Listener, need_server, running_server
from tests.islands.written import Log
from torchtitan_diloco.base.user import USER_ERROR
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.records import Close, decode, encode
from torchtitan_diloco.islands.server import Server

need_server()


def write_folder(folder: Path, records: list[bytes]) -> Server:
    with running_server(folder) as server, Listener(server.join, "a") as listener:
        for number, raw in enumerate(records, start=1):
            listener.connection.append(raw)
            listener.read_to(number)
        assert main(["check", str(folder)]) == USER_ERROR, "it is running"
    return server


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return main(["check", str(folder)]), capsys.readouterr().out


@pytest.fixture
def log() -> Log:
    found = Log()
    for number in (10, 30, 50):
        found.round(number)
    return found


def test_check_names_the_record_that_a_disk_has_lost(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    close = decode(log.raw[-1])
    assert isinstance(close, Close)
    garbage = b"", b"garbage", encode(msgspec.structs.replace(close, fragment=7))
    records = [*log.raw, *garbage]
    server = write_folder(tmp_path / "server", records)
    settings = (server.path / "run.json").read_bytes()
    code, printed = check(server.path, capsys)
    assert code == 0, printed
    assert "log: 15 records, read from 1 to 15" in printed
    assert "versions 3, 0; tokens merged: 50 of 100" in printed
    assert "islands skip 2 damaged or foreign records, such as record 13" in printed
    assert settings == (server.path / "run.json").read_bytes()
    (block,) = server.path.glob("store/jetstream/*/streams/islands-test-log/msgs/1.blk")
    content = block.read_bytes()
    for lost in (7, 15):  # nats-server starts without a word
        at = content.index(records[lost - 1]) + 3
        block.write_bytes(content[:at] + b"x" + content[at + 1 :])
        code, printed = check(server.path, capsys)
        assert code == 1
        assert f"read from 1 to {lost - 1}\n" in printed
        assert f"PROBLEM: record {lost} of the log is missing" in printed
        assert "cannot be continued from this log: start `serve` on a newer copy" in printed


def test_check_names_a_chain_that_is_broken(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_close = next(raw for raw in log.raw if b'"kind":"close"' in raw)
    records = [raw for raw in log.raw[:9] if raw != first_close]
    server = write_folder(tmp_path / "server", records)
    code, printed = check(server.path, capsys)
    assert code == 1
    assert f"PROBLEM: record {len(records)} continues a version that no record creates" in printed
