"""Three servers, as docs/islands-reference.md describes them: one may be killed."""

import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.conftest import REPOSITORY
from tests.islands.servers import PATIENCE, Listener, free_port, need_server
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.server import make_streams
from torchtitan_diloco.islands.server_folder import find_server
from torchtitan_diloco.islands.session import Session, open_session

need_server()

T = TypeVar("T")
DOCS = (REPOSITORY / "docs/islands-reference.md").read_text()
SERVERS = ("one", "two", "three")


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Join, dict[str, "subprocess.Popen[bytes]"]]]:
    """Run three servers as docs/islands-reference.md configures them, on free ports."""
    command = re.search(r"    (openssl req .*?certificate\.pem)\n", DOCS, re.DOTALL)
    text = re.search(r"```\n(server_name: NAME\n.*?)```", DOCS, re.DOTALL)
    assert command is not None
    assert text is not None
    words = re.sub(r"DNS:HOST-\d", "IP:127.0.0.1", command[1].replace("\\\n", " ")).split()
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    ports = {name: (free_port(), free_port()) for name in SERVERS}
    changed = text[1].replace("0.0.0.0", "127.0.0.1")
    for number, (_, route) in enumerate(ports.values(), 1):
        changed = changed.replace(f"HOST-{number}:6222", f"127.0.0.1:{route}")
    processes = {}
    try:
        for name, (port, route) in ports.items():
            own = changed.replace("NAME", name).replace("FOLDER", str(folder / name))
            own = own.replace(":4222", f":{port}").replace("127.0.0.1:6222", f"127.0.0.1:{route}")
            (folder / f"{name}.conf").write_text(own)
            processes[name] = subprocess.Popen(
                [find_server(), "--config", f"{name}.conf", "--log", f"{name}.log"], cwd=folder
            )
        addresses = tuple(f"127.0.0.1:{port}" for port, _ in ports.values())
        certificate = ssl.PEM_cert_to_DER_cert((folder / "certificate.pem").read_text())
        yield (
            Join(addresses, "test", "admin", "ADMIN-PASSWORD", certificate=certificate),
            processes,
        )
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def repeat(action: Callable[[], T]) -> T:
    """Retry on failure: on a busy machine, servers may take long to elect a leader."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return action()
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def find_leader(admin: Join) -> str:
    with open_session(admin, "test") as session:
        return str(session.call("STREAM.INFO.islands-test-log")["cluster"]["leader"])


def test_messages_of_others_do_not_lengthen_the_wait_for_an_answer(server: Join) -> None:
    with closing(Session(server, server.addresses[0], "a", 0.5)) as session:
        session.subscribe("islands.test.beat")
        ended = threading.Event()

        def beat() -> None:
            with open_session(server, "b") as other:
                while not ended.wait(0.01):
                    other.publish("islands.test.beat", b"x")

        with ThreadPoolExecutor() as pool:
            beating = pool.submit(beat)
            session.publish = lambda *_: None  # type: ignore[method-assign]  # it is lost
            try:
                with pytest.raises(TimeoutError, match=r"does not answer STREAM\.INFO"):
                    session.state_of("log")
            finally:
                ended.set()
            beating.result()


def test_one_of_three_servers_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_diloco.islands.session.LAG_SECONDS", PATIENCE)
    with cluster(tmp_path) as (admin, processes):
        repeat(lambda: make_streams(admin, keep_gb=0.1, replicas=3))
        leader = repeat(lambda: find_leader(admin))
        join = Join(admin.addresses, "test", "island", "PASSWORD", certificate=admin.certificate)
        with Listener(join, "a/1") as first, Listener(join, "b/1") as second:
            first.connection.append(b"before")
            second.read_to(1)
            early = first.connection.store(b"x" * 1_500_000, "parts")
            processes[leader].kill()
            late = first.connection.store(b"y" * 1_500_000, "parts")
            for listener in (first, second):
                assert listener.connection.fetch(late, "parts") == b"y" * 1_500_000
            assert second.connection.fetch(early, "parts") == b"x" * 1_500_000
            _append_until_heard(first, second)
            assert [record.sequence for record in second.records] == list(
                range(1, len(second.records) + 1)
            )


def _append_until_heard(writer: Listener, reader: Listener) -> None:
    """Append repeatedly: records are lost while there is no leader."""
    end = time.monotonic() + PATIENCE
    while not any(record.raw == b"after" for record in reader.records):
        assert time.monotonic() < end, reader.connection.problem
        writer.connection.append(b"after")
        reader.connection.receive(0.2)
