"""Connection to a real nats-server: nothing is lost, and errors are clear."""

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.islands.servers import (
    PATIENCE,
    Listener,
    free_port,
    need_server,
    running_server,
    wait_until,
)
from torchtitan_diloco.islands import connection as module
from torchtitan_diloco.islands import server as server_module
from torchtitan_diloco.islands.bulk import ChunkError, ClosedError
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.members import Hint
from torchtitan_diloco.islands.records import AnotherLogError, Leave, SnapshotWanted, digest
from torchtitan_diloco.islands.server import Server
from torchtitan_diloco.islands.session import RequestError, TrimmedError, open_session
from torchtitan_diloco.islands.wire import Message, ServerError, Wire

need_server()

LOG = "islands-test-log"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("nats") / "server") as found:
        yield found


@pytest.fixture
def pair(server: Server) -> Iterator[tuple[Listener, Listener]]:
    with Listener(server.join, "a/1") as first:
        last = first.wait_connected()
        with Listener(server.join, "b.*/>2", after=last) as second:
            second.wait_connected()
            yield first, second


def call(join: Join, request: str, **content: Any) -> None:
    with open_session(join, "test") as session:
        session.call(f"STREAM.{request}", content)


# --- log and messages -----------------------------------------------------------------------------


def test_beats_and_questions_reach_the_others(
    pair: tuple[Listener, Listener], server: Server
) -> None:
    first, second = pair
    with open_session(server.join, "test") as session:
        session.publish("islands.other.beat", b"of another run")
        session.publish("islands.test.beat", b"garbage")
        session.ping()
    hint = Hint("a/1", step=3, tokens=4, step_seconds=0.5, caught_up=True)
    first.connection.beat(hint)
    heard, messages = second.connection.members.heard, second.connection.messages
    wait_until(lambda: heard, "a heartbeat")
    assert [member.hint for member in heard.values()] == [hint]
    wanted = SnapshotWanted(sender="a/1", fragment=3)
    first.connection.ask("a/1", msgspec.structs.replace(wanted, sender="not for the second"))
    first.connection.ask("b.*/>2", wanted)
    first.connection.ask("b.*/>2", Leave(sender="a/1"))
    wait_until(lambda: second.connection.leaving, "the second message")
    assert list(messages) == [wanted]
    second.connection.beat(msgspec.structs.replace(hint, leaving=True))
    wait_until(lambda: first.connection.members.heard, "a heartbeat")
    assert not first.connection.messages, "one's own message"
    with pytest.raises(ValueError, match="accepts at most 1000000"):
        first.connection.append(bytes(1_000_001))


# --- chunks ---------------------------------------------------------------------------------------


def test_payloads_come_back_or_it_is_said_what_is_wrong(
    pair: tuple[Listener, Listener], server: Server
) -> None:
    first, second = (listener.connection for listener in pair)
    payload = os.urandom(2_000_001)
    with ThreadPoolExecutor() as pool:
        stored = list(pool.map(first.store, [payload, memoryview(payload)], ["parts", "snapshots"]))
    for chunks, bulk in zip(stored, ("parts", "snapshots"), strict=True):
        assert [chunk.size for chunk in chunks] == [1_000_000, 1_000_000, 1]
        assert second.fetch(chunks, bulk) == payload  # type: ignore[arg-type]
    assert first.store(b"", "parts") == ()
    whole, other, gone = stored[0]
    wrong = msgspec.structs.replace
    for bad in (wrong(whole, sha256=other.sha256), wrong(whole, size=11)):
        with pytest.raises(ChunkError, match=f"chunk {whole.sequence} of parts"):
            second.fetch([other, bad], "parts")
    with pytest.raises(ChunkError, match="has an invalid size of 1000000000000 bytes"):
        second.fetch([wrong(whole, size=10**12)], "parts")
    call(server.admin, "MSG.DELETE.islands-test-parts", seq=gone.sequence)
    for sequence in (gone.sequence, 10**6):
        with pytest.raises(ChunkError, match="no longer has chunk"):
            second.fetch([other, wrong(gone, sequence=sequence)], "parts")
    assert second.fetch([other, whole], "parts")[-1_000_000:] == payload[:1_000_000]


def test_a_stream_that_dies_loses_nothing(
    pair: tuple[Listener, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, and it connects again, also after an answer that nobody can read."""
    first, second = (listener.connection for listener in pair)
    payload, streams = os.urandom(60_000_000), first.streams
    streams.grow(3)
    wait_until(lambda: all(one._wire for one in streams._threads), "three streams")
    dying = streams._threads[1]
    wire = dying._wire
    assert wire is not None
    with ThreadPoolExecutor() as pool:
        storing = pool.submit(first.store, payload, "parts")
        wait_until(lambda: dying._under_way, "chunks of this stream")
        wire.close()
        chunks = storing.result(PATIENCE)
    assert second.fetch(chunks, "parts") == payload
    wait_until(lambda: dying._wire not in (None, wire), "another connection")
    damaged, read = [KeyError(7)], Wire.next_answer

    def next_answer(wire: Wire) -> Message:
        if type(wire) is Wire and damaged:  # of chunks
            raise damaged.pop()
        return read(wire)

    monkeypatch.setattr(Wire, "next_answer", next_answer)
    assert first.fetch(chunks[:3], "parts") == payload[:3_000_000]
    assert not damaged


def test_a_server_on_this_machine_needs_one_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        connection = Connection(server.join, "a/1", streams=3)
        connection.connect()
        connection.close()
        return len(connection.streams._threads)

    assert count() == 1
    monkeypatch.setattr(Join, "is_on_this_machine", False)
    assert count() == 3


# --- where to begin to read the log ---------------------------------------------------------------


def test_the_newest_state_is_there_before_the_log_is_followed(server: Server) -> None:
    connection = Connection(server.join, "a/1")
    connection.connect()
    assert connection.newest_state() is None
    for state in (b"first", b"second" * 400_000):  # the second one in several chunks
        connection.store_state(state)
        assert connection.newest_state() == state
    connection.append(b"1")
    last = max(connection.last, 0) + 1
    with Listener(server.join, "b/1", after=last - 1) as listener:
        listener.read_to(last)
        with pytest.raises(AnotherLogError, match=f"its record {last} is another one"):
            connection.follow(last, digest(b"2"))
        connection.follow(last, digest(b"1"))
        listener.connection.append(b"2")
        wait_until(lambda: connection.records, "a record")
    assert connection.records[0][:2] == (last + 1, b"2")
    connection.close()


def test_a_log_that_was_trimmed_names_its_first_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LOG_BYTES", 2000)
    with running_server(tmp_path / "server") as server, Listener(server.join, "a/1") as writer:
        for number in range(10):
            writer.connection.append(b"%d" % number * 500)
            writer.read_to(number + 1)
        connection = Connection(server.join, "b/1")
        connection.connect()
        first = connection.first
        assert 1 < first <= 10 == connection.last
        for after in (0, first - 2):
            with pytest.raises(TrimmedError, match=f"those from {first} on") as error:
                connection.follow(after)
            assert error.value.first == first
        connection.follow(first - 1)
        wait_until(lambda: connection.received == 10, "the log")
        assert [record.sequence for record in connection.records] == list(range(first, 11))
        connection.close()


def test_headers_of_a_record_change_nothing(pair: tuple[Listener, Listener]) -> None:
    first, second = pair
    last = first.wait_connected()
    head = b"NATS/1.0\r\nNats-Sequence: 99\r\nStatus: 204\r\nNats-Last-Sequence: 99\r\n\r\n"
    with open_session(first.join, "test") as session:
        session.send(b"HPUB islands.test.log %d %d\r\n%s1\r\n" % (len(head), len(head) + 1, head))
        session.publish("islands.test.log", b"2")
        session.ping()
    assert [record.raw for record in second.read_to(last + 2)][-2:] == [b"1", b"2"]


# --- faults ---------------------------------------------------------------------------------------


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    stop, payload = threading.Event(), os.urandom(30_000_000)

    def append(connection: Connection) -> None:
        number = 0
        while not stop.wait(0.001):
            connection.append(b"%d" % (number := number + 1))

    with (
        running_server(tmp_path / "server") as server,
        Listener(server.join, "a/1") as writer,
        Listener(server.join, "b/1") as reader,
        ThreadPoolExecutor() as pool,
    ):
        pool.submit(append, writer.connection)
        stored = [pool.submit(writer.connection.store, payload, "parts") for _ in range(2)]
        try:
            reader.read_to(20)
            assert server.process is not None
            server.process.kill()
            for listener in (reader, writer):
                listener.wait_disconnected()
            known = len(reader.records)  # before the writer appends more
            server.start()
            assert reader.wait_connected() >= known
            last = writer.wait_connected()
            reader.read_to(last + 20)
            chunks = [future.result(timeout=PATIENCE) for future in stored]
        finally:
            stop.set()
            writer.connection.close()
        records = [record[:2] for record in reader.records]
        numbers = [int(raw) for _, raw in records]
        assert numbers == sorted(set(numbers))
        assert [sequence for sequence, _ in records] == list(range(1, len(numbers) + 1))
        for one in chunks:
            assert reader.connection.fetch(one, "parts") == payload
        with Listener(server.join, "late/1", after=10) as late:
            late.read_to(len(numbers))
            assert [record[:2] for record in late.records][: len(numbers) - 10] == records[10:]


def test_a_server_that_is_silent_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOG_PATIENCE", 1.0)
    with running_server(tmp_path / "server") as server, Listener(server.join, "a/1") as listener:
        listener.wait_connected()
        listener.connection.append(b"1")
        listener.read_to(1)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor() as pool:
                storing = pool.submit(listener.connection.store, b"x" * 3_000_000, "parts")
                listener.wait_disconnected()
                assert listener.connection.members.is_new(math.inf), "nobody counts as gone"
                server.process.send_signal(signal.SIGCONT)
                assert listener.wait_connected() == 1
                assert len(storing.result()) == 3
        finally:
            server.process.send_signal(signal.SIGCONT)
        listener.connection.append(b"2")
        assert [record[:2] for record in listener.read_to(2)] == [(1, b"1"), (2, b"2")]


def test_whoever_waits_when_the_connection_is_closed_gets_an_error(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server, Listener(server.join, "a/1") as listener:
        chunks = listener.connection.store(b"x", "parts")
        server.stop()
        with ThreadPoolExecutor() as pool:
            waiting: list[Future[Any]] = [
                pool.submit(listener.connection.store, b"x", "parts"),
                pool.submit(listener.connection.fetch, chunks, "parts"),
            ]
            time.sleep(0.1)
            listener.connection.close()
            for future in waiting:
                with pytest.raises(ClosedError):
                    future.result(timeout=PATIENCE)
        with pytest.raises(ClosedError):
            listener.connection.store(b"x", "parts")
        listener.connection.append(b"dropped")


# --- refusals -------------------------------------------------------------------------------------


def refusal(join: Join) -> str:
    connection = Connection(join, "a/1")
    with pytest.raises(ValueError, match=r"islands\.join") as error:
        connection.connect()
    assert join.password not in str(error.value)
    with pytest.raises(ClosedError):
        connection.store(b"x", "parts")
    return str(error.value)


def test_a_login_that_is_not_right_is_refused(server: Server, tmp_path: Path) -> None:
    right = server.join
    assert "refuses the user or the password" in refusal(
        dataclasses.replace(right, password="not-the-password")
    )
    assert "has no run 'other'" in refusal(dataclasses.replace(right, run="other"))
    with running_server(tmp_path / "other") as other:
        assert "is not the one in the join string" in refusal(
            dataclasses.replace(right, certificate=other.join.certificate)
        )
    assert "the join string contains none" in refusal(dataclasses.replace(right, certificate=b""))


def test_no_server_is_an_error_at_first(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(module, "FIRST_CONNECTION_SECONDS", 0.5)
    plain = dataclasses.replace(server.join, tls=False)
    assert "needs a join string that begins with nats+tls://" in refusal(plain)
    address = f"127.0.0.1:{free_port()}"
    missing = dataclasses.replace(server.join, addresses=(address,))
    assert "no connection within 0.5 s" in refusal(missing)
    both = dataclasses.replace(server.join, addresses=(address, *server.join.addresses))
    with Listener(both, "a/1") as listener:
        listener.wait_connected()


def test_an_island_that_has_been_in_the_run_waits_for_its_server(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    connection = Connection(server.join, "a/1")
    with ThreadPoolExecutor() as pool:
        started = pool.submit(connection.connect, known=True)
        wait_until(lambda: "waiting for the server of the islands" in caplog.text, "the warning")
        server.start()
        started.result(PATIENCE)
    connection.close()


def test_an_island_may_neither_delete_nor_make_a_consumer(server: Server) -> None:
    subjects = [f"STREAM.{request}" for request in ("DELETE", "PURGE", "UPDATE", "MSG.DELETE")]
    for subject in (*subjects, "CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE"):
        for name in ("", ".name", ".name.islands.test.log"):
            with (
                open_session(server.join, "test") as session,
                pytest.raises(ServerError, match="Permissions Violation for Publish"),
            ):
                session.call(f"{subject}.{LOG}{name}")
    for request, which in ("PURGE", {}), ("MSG.DELETE", {"seq": 1}):
        with pytest.raises(RequestError, match="not permitted"):
            call(server.admin, f"{request}.{LOG}", **which)
