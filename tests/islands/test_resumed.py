"""Islands that begin with a checkpoint, or with a part of another island's copies."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.islands.running import Island, same, started
from tests.islands.servers import need_server, running_server
from tests.islands.test_coming_and_going import at, die, hold, save_in
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.leader import Leader
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import IslandFailedError
from torchtitan_diloco.islands.parts import Parts
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.islands.records import Close, SnapshotWanted

need_server()
pytestmark = pytest.mark.usefixtures("soon_gone")


def state_of(saved: SavedState) -> State:
    return State.decode(saved.facts["island"].encode())


def test_a_checkpoint_may_be_between_a_part_and_its_close(
    server: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that the next record merges are in the saved state only."""
    fetch = Parts._fetch

    def fetch_slowly(*arguments: Any) -> Any:
        time.sleep(0.1)  # between a part and its close
        return fetch(*arguments)

    monkeypatch.setattr(Parts, "_fetch", fetch_slowly)
    saved, outcomes = list[SavedState](), list[Outcome]()
    first = Island(server, "a", steps=200, begin=1, slots=1, grace=0.2, step_seconds=0.02)
    first.each_step = lambda island: (
        save_in(saved)(island) if 20 < island.step < 60 else None,
        at(60, die)(island),
    )
    with started(first):
        first.join(60)
    with open_reader(server, outcomes.append, whole=True):
        closes = {number for number, one in enumerate(outcomes) if isinstance(one.record, Close)}
    before = [one for one in saved if state_of(one).sequence in closes]
    assert before, "no checkpoint was saved just before a close"
    again = Island(server, "a", steps=200, begin=1, slots=1, grace=0.2, saved=before[0])
    with started(again):
        again.finish()


def test_a_joiner_does_not_begin_with_half_of_a_snapshot(
    server: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its donor dies after it has given some fragments, and no other island is there."""
    first = Island(server, "a", steps=60, begin=1, slots=2, grace=0.2, step_seconds=0.02)
    late = Island(server, "b", steps=60, begin=1, slots=2, grace=0.2)
    give = Leader._give_snapshot

    def give_or_die(found: Leader, wanted: SnapshotWanted) -> None:
        if wanted.fragment == 0:
            give(found, wanted)
        else:
            first.died.set()

    monkeypatch.setattr(Leader, "_give_snapshot", give_or_die)
    first.each_step = hold(40, lambda: False)
    with started(first):
        first.wait_for_step(40)
        with started(late), pytest.raises(IslandFailedError, match="part of a snapshot"):
            late.finish()


def test_an_island_is_heard_before_it_takes_a_slot(
    server: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would warn that it is silent."""
    send, sent = Connection._send, list[str]()

    def note_and_send(found: Connection, subject: str, raw: bytes, **how: Any) -> None:
        sent.append(f"take {subject}" if b'"take"' in raw else subject)
        send(found, subject, raw, **how)

    monkeypatch.setattr(Connection, "_send", note_and_send)
    with started(island := Island(server, "a", steps=10, begin=1, slots=1)):
        island.finish()
    names = [name.rpartition(".")[2] if "take" not in name else "take" for name in sent]
    assert names.index("beat") < names.index("take")


def test_a_checkpoint_that_a_new_log_leaves_behind_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An island with an older checkpoint was started first."""
    saved = list[SavedState]()

    def train(join: Join, name: str, **chosen: Any) -> Island:
        return Island(join, name, steps=100, begin=1, slots=2, grace=0.2, **chosen)

    with running_server(tmp_path / "server") as server:
        first = train(server.join, "a", step_seconds=0.02)
        first.each_step = lambda one: (
            save_in(saved)(one) if one.step in (20, 60) else None,
            at(60, die)(one),
        )
        with started(first):
            first.join(60)
    with running_server(tmp_path / "new", run="another") as server:
        old, new = (
            train(server.join, name, saved=one) for name, one in zip("ab", saved, strict=True)
        )
        old.each_step = hold(10, lambda: new.step)
        with started(old):
            old.wait_for_step(5)
            assert "does not use its model" not in caplog.text
            with started(new):
                assert same(old.finish().shared, new.finish().shared)
    newest = max(state_of(saved[1]).clocks)
    assert f"this island's checkpoint has {newest:,} tokens, and the log begins at" in caplog.text
