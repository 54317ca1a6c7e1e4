"""Islands that join late: what may go wrong on the way."""

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.islands.running import Island, same, started
from tests.islands.servers import PATIENCE, Listener, need_server, running_server, wait_until
from tests.islands.test_coming_and_going import hold
from tests.islands.test_connection import call
from tests.processes import ProcessPool
from torchtitan_diloco.islands import bulk as bulk_module
from torchtitan_diloco.islands import connection, joining
from torchtitan_diloco.islands.bulk import Bulk, ChunkError
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.joining import Giver, Joiner
from torchtitan_diloco.islands.leader import Leader
from torchtitan_diloco.islands.ledger import Fragment
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import IslandFailedError
from torchtitan_diloco.islands.records import AnyMessage, Snapshot, SnapshotWanted, name_of

need_server()
pytestmark = pytest.mark.usefixtures("soon_gone")


def two_and_a_joiner(server: Join) -> dict[str, Island]:
    """Return two islands, which wait for a third one, and that one."""
    islands = {
        name: Island(server, name, steps=100, slots=3, grace=0.2, step_seconds=0.02)
        for name in "abc"
    }
    for name in "ab":
        islands[name].each_step = hold(30, lambda: islands["c"].step)
    return islands


def join_late(islands: dict[str, Island]) -> None:
    """Let the third island join. All that do not die end with the same copy."""
    with started(islands["a"], islands["b"]):
        for name in "ab":
            islands[name].wait_for_step(20)
        islands["c"].start()
        joined = islands["c"].finish()
        for other in (islands["a"], islands["b"]):
            assert other.died.is_set() or same(other.finish().shared, joined.shared)


STATES = [
    (Connection, "receive_log"),
    (Joiner, "_ask"),
    (Joiner, "_take_snapshot"),  # it has the first of its copies
    (Connection, "append"),  # to take a slot
    (Leader, "join"),
    (Connection, "store"),  # of a part that is not in the log
]


def _die_after(server: Join, owner: type, method: str) -> None:
    """Join, and die after the first return of this method."""
    original = getattr(owner, method)

    def die(*arguments: Any, **named: Any) -> None:
        original(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, method, die)
    connection.EXPIRY, connection.FIRST_CONNECTION_SECONDS = 3.0, PATIENCE
    Island(server, "c", steps=100, slots=3, grace=0.2)._train()


def test_a_joiner_may_die_at_any_time(processes: ProcessPool, server: Join) -> None:
    islands = two_and_a_joiner(server)
    with started(islands["a"], islands["b"]):
        islands["a"].wait_for_step(20)
        for owner, method in STATES:
            processes.run(_die_after, 1, server, owner, method, dying={0})
        islands["c"].start()
        first, *others = (island.finish() for island in islands.values())
    assert all(same(first.shared, other.shared) for other in others)


@pytest.mark.parametrize("fault", ["dies", "cannot store", "claims too much"])
def test_a_joiner_asks_another_island_when_its_donor_fails(
    fault: str, server: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    islands, failed = two_and_a_joiner(server), list[str]()
    give, store, fetch = Giver.give, Connection.store, Connection.fetch

    def die_or_give(found: Giver, wanted: SnapshotWanted, state: State) -> None:
        name = name_of(found._incarnation)
        failed.append(name)
        if fault == "dies" and name == failed[0]:
            islands[name].died.set()
        else:
            give(found, wanted, state)

    def fail_or_store(found: Connection, payload: Any, bulk: Bulk) -> Any:
        if fault == "cannot store" and bulk == "snapshots" and name_of(found._name) == failed[0]:
            raise ChunkError("no space")
        is_more = fault == "claims too much" and bulk == "snapshots"
        times = 100 if is_more and name_of(found._name) == failed[0] else 1
        return store(found, payload, bulk) * times

    def fetch_little(found: Connection, chunks: Any, bulk: Bulk) -> Any:
        assert len(chunks) < 100, "there may be no room for so much"
        return fetch(found, chunks, bulk)

    monkeypatch.setattr(Connection, "fetch", fetch_little)
    monkeypatch.setattr(Giver, "give", die_or_give)
    monkeypatch.setattr(Connection, "store", fail_or_store)
    join_late(islands)
    assert {*failed} == {"a", "b"}
    if fault == "cannot store":
        assert (
            "this island cannot send its shared copy of fragment 0 to island c: no space"
            in caplog.text
        )
        assert f"no snapshot of island {failed[0]}: no space" in caplog.text
    if fault == "claims too much":
        assert f"no snapshot of island {failed[0]}: it has" in caplog.text


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

    def count_and_store(found: Connection, payload: Any, bulk: Bulk) -> Any:
        stored[bulk] += 1
        return store(found, payload, bulk)

    monkeypatch.setattr(Connection, "ask", lose_or_ask)
    monkeypatch.setattr(Connection, "store", count_and_store)
    monkeypatch.setattr(joining, "ASK_SECONDS", 0.2)
    join_late(two_and_a_joiner(server))
    assert not lost
    assert "waiting for the shared copy of fragment 0" in caplog.text
    assert stored["snapshots"] == len(Island(server, "d").outer.fragments)


def test_a_joiner_does_not_begin_with_half_of_a_snapshot(
    server: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its donor dies after it has given some fragments, and no other island is there."""
    first = Island(server, "a", steps=60, begin=1, slots=2, grace=0.2, step_seconds=0.02)
    late = Island(server, "b", steps=60, begin=1, slots=2, grace=0.2)
    give = Giver.give

    def give_or_die(found: Giver, wanted: SnapshotWanted, state: State) -> None:
        if wanted.fragment == 0:
            give(found, wanted, state)
        else:
            first.died.set()

    monkeypatch.setattr(Giver, "give", give_or_die)
    first.each_step = hold(40, lambda: False)
    with started(first):
        first.wait_for_step(40)
        with started(late), pytest.raises(IslandFailedError, match="in a snapshot"):
            late.finish()


def test_a_snapshot_that_the_server_does_not_take_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bulk_module.GIVE_UP_SECONDS, "snapshots", 0.5)
    with running_server(tmp_path / "server") as server, Listener(server.join, "a/1") as listener:
        stored = listener.connection.store(b"x", "snapshots")
        call(server.admin, "DELETE.islands-test-snapshots")
        with pytest.raises(ChunkError, match="the server cannot store or return a chunk"):
            listener.connection.store(bytes(3_000_000), "snapshots")
        with pytest.raises(ChunkError):
            listener.connection.fetch(stored, "snapshots")
        assert len(listener.connection.store(b"x", "parts")) == 1


def test_a_snapshot_is_stored_once_while_two_joiners_ask_again() -> None:
    """They send no heartbeats before they have it."""
    connection, copies, released = mock.Mock(), mock.Mock(), threading.Event()
    connection.members.is_silent.return_value = True
    connection.store.side_effect = lambda *_: released.wait(PATIENCE) and ()
    copies.fragments, copies.run.return_value = [mock.Mock(newest=0)], torch.zeros(2)
    giver, state = Giver(connection, copies, "donor/1"), State(fragments=[Fragment("head", {})])
    for _ in range(3):
        for name in "ab":
            giver.give(SnapshotWanted(sender=f"{name}/1", fragment=0), state)
    released.set()
    wait_until(lambda: connection.ask.call_count == 2, "the answers")
    giver.close()
    assert copies.run.call_count == connection.store.call_count == 2
