"""The doctor names the hop that fails, and its remedy."""

import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import REPOSITORY
from tests.diloco.toy import fused
from tests.ports import free_port
from torchtitan_diloco.base import hardware
from torchtitan_diloco.base.hardware import describe_machine
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diloco import arithmetic
from torchtitan_diloco.diloco.codecs import base
from torchtitan_diloco.machines import doctor, link

MACHINE = ["versions", "processor", "GPU", "interfaces", "arithmetic"]
ADDRESS = ["name", "route", "port"]
ENDPOINT = [*ADDRESS, "rendezvous", "packets", "rate", "arithmetic of both"]

Examine = Callable[..., str]
"""Calls the doctor with hops that are reached, and arguments, and returns the line of a failure."""


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Examine:
    monkeypatch.setattr(link, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr(link, "SHORT_SECONDS", 0.0)  # measure rates

    def run(hops: list[str], *arguments: str) -> str:
        measures = {"--endpoint", "--join"}.intersection(arguments)
        code = doctor.main([*(["--streams", "2"] if measures else []), *arguments])
        lines = capsys.readouterr().out.splitlines()
        for line, hop in zip(lines, MACHINE + hops, strict=True):
            assert line[8:].startswith(hop)
        failed = [line for line in lines if not line.startswith("ok      ")]
        assert all(line.startswith("FAILED  ") for line in failed)
        assert code == len(failed) <= 1
        return "".join(failed)

    return run


def refuse(*_: object) -> None:
    raise UserError("an average: use another GPU")


def test_this_machine(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not examine([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arithmetic, "check_device", refuse)
    assert "arithmetic: an average: use another GPU" in examine([])


def test_versions_say_if_torch_is_newer_than_those_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "NEWEST_TORCH", "999.0")
    assert "tested" not in doctor._versions()
    monkeypatch.setattr(hardware, "NEWEST_TORCH", "2.0")
    assert f"; torch {torch.__version__} is newer than 2.0" in doctor._versions()


def test_a_corpus(examine: Examine, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    folder = tmp_path / "shards"
    bytes_ = build_tokenizer("bytes")
    text.write_text("a line of some words\n" * 9000)
    with redirect_stdout(StringIO()):
        prepare(open_corpus(str(text)), bytes_, folder, validation_fraction=0.2, shard_tokens=9000)
    assert not examine(["corpus"], "--corpus", str(folder))
    files = sorted(folder.glob("train-*"))
    for file in files[1:3]:
        file.write_bytes(b"#" * file.stat().st_size)
    named = [f"{file.name}: its checksum is wrong" for file in files[1:3]]
    failure = examine(["corpus"], "--corpus", str(folder))
    assert f"are damaged: {'; '.join(named)}: copy these files again, or prepare" in failure
    assert "does not exist: give the folder" in examine(["corpus"], "--corpus", f"{folder}/none")


# --- an address -----------------------------------------------------------------------------------


def test_a_name_that_nobody_knows(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    failure = examine(ADDRESS[:1], "--endpoint", "nobody:29500")
    assert "name nobody: Name or service not known: give the IP address" in failure


def test_a_closed_port(examine: Examine) -> None:
    port = free_port()
    failure = examine(ADDRESS, "--endpoint", f"127.0.0.1:{port}")
    assert "nothing listens there: start the first node" in failure
    assert f"doctor --endpoint :{port} --listen` there" in failure


@pytest.mark.parametrize("address", ["host", "host:http", ":0"])
def test_what_is_no_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--endpoint", address]) == 2
    assert f"--endpoint {address}: give HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--streams 4", "--streams 4: there is no link to measure: give --endpoint or --join"),
        ("--endpoint a:1 --streams 0", "--streams 0: give a number from 1 to 32"),
        ("--endpoint a:1 --streams 33", "--streams 33: give a number from 1 to 32"),
        ("--endpoint 192.0.2.1:29500 --listen", "29500: .*: give an address of this machine"),
    ],
)
def test_wrong_options_name_the_remedy(
    words: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(remedy, line), line


# --- torchrun's endpoint --------------------------------------------------------------------------


def test_a_store_of_torchrun(examine: Examine) -> None:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "PATIENCE", 0.5)
        assert not examine(ENDPOINT[:4], "--endpoint", f"127.0.0.1:{store.port}")


def test_two_doctors_measure_the_link(examine: Examine) -> None:
    port = free_port()
    words = [sys.executable, "-m", "torchtitan_diloco", "doctor", "--endpoint", f"127.0.0.1:{port}"]
    other = subprocess.Popen(
        [*words, "--listen"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert f":{port}`" in other.stdout.readline()
        assert not examine(ENDPOINT, "--endpoint", f"127.0.0.1:{port}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "add_to_mean", fused)
            arithmetic.compute.cache_clear()
            failure = examine(ENDPOINT, "--endpoint", f"127.0.0.1:{port}")
            arithmetic.compute.cache_clear()
        assert "arithmetic of both: the machines compute different bits" in failure
        usual = arithmetic.compute("int8")["average of int8"]
        assert f"average of int8: {usual} there ({describe_machine()}), " in failure
        other.send_signal(signal.SIGINT)
        assert other.wait() == 0
    finally:
        other.kill()
        other.wait()


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Answer single bytes, and nothing to larger packets."""

    def serve() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            clients.append(client)
            with suppress(ConnectionError):
                while client.recv(9, socket.MSG_WAITALL)[:8] == struct.pack("!Q", 1):
                    client.sendall(answer)

    clients = list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    for client in clients:
        client.close()


def test_another_program_has_the_port(examine: Examine) -> None:
    with answering(b"SSH-2.0-OpenSSH_9.2") as address:
        assert "another program uses port" in examine(ENDPOINT[:4], "--endpoint", address)


def test_large_packets_that_are_lost(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.5)
    with answering(b".") as address:
        assert "lower the MTU" in examine(ENDPOINT[:5], "--endpoint", address)
