"""A server whose folder was replaced with an older copy."""

import shutil
from pathlib import Path

import pytest
from torch import Tensor

from tests.islands.running import Island, same, started
from tests.islands.servers import Listener, free_port, need_server, running_server, wait_until
from tests.islands.test_coming_and_going import at, hold
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.islands.records import AnotherLogError
from torchtitan_diloco.islands.server import Server, open_folder

need_server()


def copy_folder(server: Server, copy: Path, *connected: Listener) -> None:
    server.stop()
    for listener in connected:
        listener.wait_disconnected()
    shutil.copytree(server.path, copy)
    server.start()
    for listener in connected:
        listener.wait_connected()


def restore_folder(server: Server, copy: Path) -> None:
    server.stop()
    shutil.rmtree(server.path)
    shutil.copytree(copy, server.path)


def append_elsewhere(server: Server, *records: bytes) -> None:
    """Append to the log where no island of the run connects."""
    elsewhere = open_folder(server.path, port=free_port())
    elsewhere.start()
    try:
        with Listener(elsewhere.join, "other/1") as listener:
            last = listener.wait_connected()
            for record in records:
                listener.connection.append(record)
            listener.read_to(last + len(records))
    finally:
        elsewhere.stop()


def wait_for_refusal(listener: Listener, reason: str) -> None:
    with pytest.raises(AnotherLogError, match=reason):
        wait_until(listener.connection.receive, "the refusal")
    with pytest.raises(AnotherLogError):  # it does not wait for a connection
        listener.connection.store(b"x", "parts")


def test_each_connection_compares_the_log_with_what_was_read(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with running_server(tmp_path / "server") as server:
        with Listener(server.join, "a/1") as first, Listener(server.join, "b/1") as second:
            for number, record in enumerate((b"1", b"2"), start=1):
                first.connection.append(record)
                second.read_to(number)
            copy_folder(server, copy, first, second)
            early = second.read_to(2)
            second.connection.close()
            first.connection.append(b"3")
            first.read_to(3)
            restore_folder(server, copy)
            server.start()
            wait_for_refusal(first, "it has 2 records, and the island has read 3")
        assert early == second.records
        with Listener(server.join, "c/1") as third, Listener(server.join, "d/1") as fourth:
            assert third.wait_connected() == 2, "nothing was appended to the older log"
            fourth.read_to(2)
            third.connection.append(b"3")
            third.read_to(3)
            fourth.read_to(3)
            restore_folder(server, copy)
            append_elsewhere(server, b"other 3", b"other 4")
            server.start()
            wait_for_refusal(third, "its record 3 is another one")
            wait_for_refusal(fourth, "its record 3 is another one")


def train(join: Join, name: str, saved: SavedState | None = None, **chosen: object) -> Island:
    return Island(join, name, begin=1, slots=3, grace=0.2, saved=saved, **chosen)  # type: ignore[arg-type]


def log_state(saved: SavedState) -> State:
    return State.decode(saved.facts["island"].encode())


def refusal(island: Island) -> str:
    with started(island), pytest.raises(AnotherLogError) as error:
        island.finish()
    return str(error.value)


@pytest.mark.usefixtures("soon_gone")
def test_islands_refuse_an_older_log_and_can_begin_another_run(tmp_path: Path) -> None:
    """Else they would train without a word, and starts from their checkpoints would crash."""
    copy, lengths, saved = tmp_path / "copy", list[int](), list[SavedState]()

    def save_beyond_copy(island: Island) -> None:
        if island.step == 40:
            wait_until(lambda: lengths, "the copy")
        if island.step >= 60 and not saved:
            state = SavedState(**island.outer.state_dict())
            if log_state(state).sequence > lengths[0]:
                saved.append(state)

    with running_server(tmp_path / "server") as server:
        connected = train(server.join, "a", steps=200, step_seconds=0.02)
        connected.each_step = save_beyond_copy
        with started(connected):
            connected.wait_for_step(40)
            with Listener(server.join, "listener/1") as listener:
                listener.wait_connected()
                copy_folder(server, copy, listener)
                lengths.append(listener.wait_connected())
            wait_until(lambda: saved, "a save after the copy")
            restore_folder(server, copy)
            server.start()
            with pytest.raises(AnotherLogError, match="records, and the island has read"):
                connected.finish()
        again = train(server.join, "a", saved[0])
        assert "records, and the island has read" in refusal(again)
        fresh = train(server.join, "b", steps=200)
        with started(fresh):
            fresh.finish()
        known = log_state(saved[0])
        with open_reader(server.join) as reader:
            assert reader.state.ended
            assert reader.state.sequence > known.sequence
        assert "is another one" in refusal(train(server.join, "a", saved[0]))
    with running_server(tmp_path / "new", run="another") as server:
        begun, copies = train(server.join, "a", saved[0], steps=200), list[dict[str, Tensor]]()
        keep = at(1, lambda island: copies.append(island.outer.global_state_dict()))
        other = train(server.join, "b", steps=200)
        begun.each_step = lambda one: (hold(20, lambda: other.step)(one), keep(one))
        with started(begun):
            begun.wait_for_step(10)
            with started(other):
                assert same(begun.finish().shared, other.finish().shared)
    loaded = train(server.join, "a").outer
    loaded.load_state_dict(saved[0])
    assert same(copies[0], loaded.global_state_dict())
    assert begun.peers.seat.clock == max(known.clocks) > 0
    assert begun.peers.seat.position == known.positions[0]
    assert begun.result is not None
    assert begun.result.steps + 60 < 210, "it goes on with the tokens that the old log has merged"
