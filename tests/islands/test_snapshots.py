"""Snapshots that cannot be stored, and questions and answers that are lost."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.islands.running import Island, same, started
from tests.islands.servers import Listener, need_server, running_server
from tests.islands.test_coming_and_going import hold
from tests.islands.test_connection import call
from torchtitan_diloco.islands import bulk as bulk_module
from torchtitan_diloco.islands import joining
from torchtitan_diloco.islands.bulk import ChunkError
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.records import AnyMessage, Snapshot, SnapshotWanted, name_of

need_server()


def test_a_snapshot_that_the_server_does_not_take_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bulk_module.GIVE_UP_SECONDS, "snapshots", 0.5)
    with running_server(tmp_path / "server") as server, Listener(server.join, "a/1") as listener:
        stored = listener.connection.store(b"x", "snapshots")
        call(server.admin, "DELETE.islands-test-snapshots")
        with pytest.raises(ChunkError, match="the server does not take or give a chunk"):
            listener.connection.store(bytes(3_000_000), "snapshots")
        with pytest.raises(ChunkError):
            listener.connection.fetch(stored, "snapshots")
        assert len(listener.connection.store(b"x", "parts")) == 1


def join_late(server: Join) -> None:
    """Let a third island join two others."""
    islands = [Island(server, name, steps=80, slots=3, grace=0.2) for name in "abc"]
    for island in islands:
        island.step_seconds = 0.02
        island.each_step = hold(30, lambda: islands[2].step)
    with started(*islands[:2]):
        for island in islands[:2]:
            island.wait_for_step(20)
        islands[2].start()
        results = [island.finish() for island in islands]
    assert all(same(results[0].shared, result.shared) for result in results)


def test_a_joiner_asks_another_island_when_its_donor_cannot_store(
    server: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, failing = Connection.store, list[str]()

    def fail_or_store(found: Connection, payload: Any, bulk: bulk_module.Bulk) -> Any:
        if bulk == "snapshots":
            failing.append(found._name)
            if found._name == failing[0]:
                raise ChunkError("no space")
        return store(found, payload, bulk)

    monkeypatch.setattr(Connection, "store", fail_or_store)
    join_late(server)
    assert len(set(failing)) == 2
    assert "island c gets no shared copy of fragment 0 from this one: no space" in caplog.text
    assert f"no snapshot of island {name_of(failing[0])}: no space" in caplog.text


def test_a_joiner_asks_again_when_a_question_or_an_answer_is_lost(
    server: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The donor stores each snapshot once."""
    ask, store, stored = Connection.ask, Connection.store, Counter[str]()
    lost = {SnapshotWanted, Snapshot}

    def lose_or_ask(found: Connection, incarnation: str, message: AnyMessage) -> None:
        if type(message) in lost:
            lost.remove(type(message))
        else:
            ask(found, incarnation, message)

    def count_and_store(found: Connection, payload: Any, bulk: bulk_module.Bulk) -> Any:
        stored[bulk] += 1
        return store(found, payload, bulk)

    monkeypatch.setattr(Connection, "ask", lose_or_ask)
    monkeypatch.setattr(Connection, "store", count_and_store)
    monkeypatch.setattr(joining, "ASK_SECONDS", 0.2)
    join_late(server)
    assert not lost
    assert "waiting for the shared copy of fragment 0" in caplog.text
    assert stored["snapshots"] == len(Island(server, "d").outer.fragments)
