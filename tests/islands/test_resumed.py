"""Islands that begin with a checkpoint: in their log, in another one, or in an older copy of it."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.islands.running import Island, same, started
from tests.islands.servers import Listener, need_server, running_server, wait_until
from tests.islands.test_coming_and_going import at, die, hold, save_in
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.parts import Parts
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.islands.records import AnotherLogError, Close
from torchtitan_diloco.islands.server import Server

need_server()
pytestmark = pytest.mark.usefixtures("soon_gone")


def state_of(saved: SavedState) -> State:
    return State.decode(saved.facts.island.encode())


def train(join: Join, name: str, saved: SavedState | None = None, **chosen: object) -> Island:
    more: dict[str, Any] = {"slots": 3, "grace": 0.2, **chosen}
    return Island(join, name, begin=1, saved=saved, **more)


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
    first = train(server, "a", steps=100, step_seconds=0.02)
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
    monkeypatch.undo()
    again = train(server, "a", before[0], steps=100)
    with started(again):
        again.finish()


def test_a_checkpoint_that_a_new_log_leaves_behind_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An island with an older checkpoint was started first."""
    saved = list[SavedState]()

    with running_server(tmp_path / "server") as server:
        first = train(server.join, "a", steps=100, step_seconds=0.02)
        first.each_step = lambda one: (
            save_in(saved)(one) if one.step in (20, 60) else None,
            at(60, die)(one),
        )
        with started(first):
            first.join(60)
    with running_server(tmp_path / "new", run="another") as server:
        old, new = (train(server.join, *pair, steps=100) for pair in zip("ab", saved, strict=True))
        old.each_step = hold(10, lambda: new.step)
        with started(old):
            old.wait_for_step(5)
            assert "does not use its model" not in caplog.text
            with started(new):
                assert same(old.finish().shared, new.finish().shared)
    newest = max(state_of(saved[1]).clocks)
    assert f"this island's checkpoint has {newest:,} tokens, and the log starts at" in caplog.text


def copy_folder(server: Server, copy: Path) -> int:
    """Copy the folder while the server is stopped. Return the number of records in the log."""
    with Listener(server.join, "listener/1") as listener:
        server.stop()
        listener.wait_disconnected()
        shutil.copytree(server.path, copy)
        server.start()
        return listener.wait_connected()


def restore_folder(server: Server, copy: Path) -> None:
    server.stop()
    shutil.rmtree(server.path)
    shutil.copytree(copy, server.path)


def refusal(island: Island) -> str:
    with started(island), pytest.raises(AnotherLogError) as error:
        island.finish()
    return str(error.value)


def test_islands_refuse_an_older_log_and_can_begin_another_run(tmp_path: Path) -> None:
    """Else they would train without a word, and starts from their checkpoints would crash."""
    copy, lengths, saved = tmp_path / "copy", list[int](), list[SavedState]()

    def save_beyond_copy(island: Island) -> None:
        if island.step == 40:
            wait_until(lambda: lengths, "the copy")
        if island.step >= 60 and not saved:
            state = SavedState.from_dict(island.outer.state_dict())
            if state_of(state).sequence > lengths[0]:
                saved.append(state)

    with running_server(tmp_path / "server") as server:
        connected = train(server.join, "a", steps=200, step_seconds=0.02)
        connected.each_step = save_beyond_copy
        with started(connected):
            connected.wait_for_step(40)
            lengths.append(copy_folder(server, copy))
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
        known = state_of(saved[0])
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
