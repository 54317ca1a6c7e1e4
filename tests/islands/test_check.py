"""Check of the log of a folder: what is missing, damaged or does not fit is named."""

from pathlib import Path

import pytest

from tests.islands.servers import Listener, need_server, running_server
from tests.islands.written import Log
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.session import GapError
from torchtitan_diloco.log import USER_ERROR

need_server()


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return main(["check", str(folder)]), capsys.readouterr().out


def test_check_reads_the_log_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    for number in (10, 30, 50):
        log.part(0, number)
        log.open()
        log.write(log.build(*log.state.fragments[0].waiting))
    records = [*log.raw, b"", b"garbage"]
    with running_server(tmp_path / "server") as server, Listener(server.join, "a") as listener:
        for number, raw in enumerate(records, start=1):
            listener.connection.append(raw)
            listener.read_to(number)
        assert main(["check", str(server.path)]) == USER_ERROR
        assert "a server is running in it already" in capsys.readouterr().err
    settings = (server.path / "run.json").read_bytes()
    code, printed = check(server.path, capsys)
    assert code == 0, printed
    assert "log: 14 records, from 1 to 14" in printed
    assert "to record 14: versions 3, 0; tokens merged: 50 of 100" in printed
    assert "damaged or foreign, and skipped by all islands: 13 to 14\n" in printed
    assert settings == (server.path / "run.json").read_bytes()
    (block,) = server.path.glob("store/jetstream/*/streams/islands-test-log/msgs/1.blk")
    content = block.read_bytes()
    for lost in (7, 14):  # nats-server starts without a word
        at = content.index(records[lost - 1]) + 3
        block.write_bytes(content[:at] + b"x" + content[at + 1 :])
        code, printed = check(server.path, capsys)
        assert code == 1
        assert f"to record {lost - 1}: versions" in printed
        assert f"PROBLEM: records are missing: {lost}\n" in printed
        assert "The run cannot be continued from this log: start `serve` on a newer" in printed
        server.start()
        try:
            gap = pytest.raises(GapError, match=f"record {lost} of the log is missing")
            with Listener(server.join, "b") as reader, gap:
                reader.connection.receive_log()
        finally:
            server.stop()


def test_check_names_a_chain_that_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    for number in (10, 30):
        log.part(0, number)
        log.open()
        log.write(log.build(*log.state.fragments[0].waiting))
    first_close = next(raw for raw in log.raw if b'"kind":"close"' in raw)
    records = [raw for raw in log.raw if raw != first_close]
    with running_server(tmp_path / "server") as server, Listener(server.join, "a") as listener:
        for number, raw in enumerate(records, start=1):
            listener.connection.append(raw)
            listener.read_to(number)
    code, printed = check(server.path, capsys)
    assert code == 1
    assert f"PROBLEM: record {len(records)} continues a version that the log does not" in printed
