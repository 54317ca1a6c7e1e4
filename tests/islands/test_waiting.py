"""An island waits, and says for what; disks and servers are full or gone."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.diloco.toy import config
from tests.islands.by_hand import newest, syncer
from tests.islands.rules.desk import A, B, founded
from tests.islands.trainees import TOKENS, Trainee, trained
from torchtitan_diloco.base.user import LOCAL_ISLANDS
from torchtitan_diloco.islands import waiting
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.founding import Founding
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.presence import SILENT
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.islands.waiting import (
    Waiting,
    at_boundary,
    awaited_by_syncer,
    before_start,
    obstacle,
    say_end,
)
from torchtitan_diloco.store import AwayError, FullError, Store, open_store
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.store import Sealed

PATIENCE = 60.0


def test_a_long_wait_is_said_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waits = Waiting("island a")
    for _ in range(400):
        waits.say(0.0, "the others")
        now[0] += 1.0
    seconds = [message.split()[4] for message in caplog.messages]
    assert seconds == ["11", "23", "47", "95", "156", "217", "278", "339"]
    caplog.clear()
    for _ in range(15):
        waits.say(400.0, "the others")
        now[0] += 1.0
    assert caplog.messages == ["island a: waiting since 11 s for the others"]


def test_a_server_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = list[str]()

    def open_later(location: str, **options: Any) -> Store:
        attempts.append(location)
        if len(attempts) < 4:
            raise AwayError("s3://run at host:8333: could not list (Connection refused)")
        if len(attempts) < 6:
            raise FullError(f"{location}: No space left on device; free some space there")
        return open_store(location, **options)

    monkeypatch.setattr(waiting, "open_store", open_later)
    monkeypatch.setattr(waiting, "STILL_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "LATE_SECONDS", 0.01)
    store = Waiting("island a").open(str(tmp_path / "store"), writes="part/a/")
    store.close()
    assert len(attempts) == 6, "it also waits for room"
    line = "island a: waiting since 0 s for the store: s3://run at host:8333: could not list"
    assert caplog.messages[0].startswith(line)


def island(state: Decision | None, *, founds: Founding | None = None) -> Island:
    one = Island(A, facts={}, shapes=[], founds=founds)
    one.decision = state
    one.slot = None if state is None else state.slot_of(A)
    return one


def test_what_an_island_waits_for_before_it_trains() -> None:
    assert before_start(island(None)).startswith("an island that may begin the run")
    unfounded = founded(())
    unfounded.fragments = []
    unfounded.founder = B
    assert before_start(island(unfounded)) == "the first copies to be stored, those of island b"
    unfounded.founder = A
    assert before_start(island(unfounded)) == "the first copies to be stored, its own"
    waits = founded((A,), start_with=3, slots=4)
    waits.begun = False
    text = "more islands: 1 of the 3 that start together (islands.begin of the run) are there"
    assert before_start(island(waits)) == text
    assert before_start(island(founded((B,)))) == "the newest copies"
    full = founded((B,), slots=1)
    assert before_start(island(full)) == "a slot: 1 slot (islands.slots) have owners"
    full = founded((B, "c/3333"), slots=2)
    full.slots[1].corpus = "bb"
    machine = island(full)
    machine.corpus = "aa"
    assert before_start(machine) == "a slot of its corpus: 1 of 2 (islands.slots) are of it"


def test_what_training_waits_for() -> None:
    state = founded((A, B))
    state.ready = [A, B]
    expected = "versions with its last parts, to which b contribute"
    assert at_boundary(island(state)) == expected


def link(machine: Island, away: float, heard: float) -> Link:
    machine.heard_at = time.monotonic() - heard
    run = SimpleNamespace(location="/shared/run")
    found = SimpleNamespace(machine=machine, away_seconds=away, run=run)
    return cast("Link", found)


def test_the_store_and_the_syncer_come_first() -> None:
    machine = island(founded((A,)))
    assert obstacle(link(machine, away=0.1, heard=0.1), "it") == "it"
    away = obstacle(link(machine, away=70.0, heard=80.0), "it")
    assert away == "the store /shared/run, which cannot be reached since 70 s"
    command = obstacle(link(machine, away=0.1, heard=80.0), "it")
    assert command.startswith("a syncer: start `")
    assert command.endswith("islands sync /shared/run`, if none is running")
    alone = island(None)
    assert obstacle(link(alone, away=0.1, heard=1e9), "it") == "it", "nobody has begun the run"


def test_what_a_syncer_waits_for() -> None:
    def awaited(state: Decision | None, listened: float = 0.0) -> str:
        machine = Syncer(None, "session", 0.0, 0.0)
        machine.state = state
        machine.presence.listened = listened
        return awaited_by_syncer(machine, "/shared/run")

    assert awaited(None) == "islands in /shared/run"
    unfounded = founded(())
    unfounded.fragments = []
    unfounded.founder = B
    assert awaited(unfounded) == "the first copies of island b in /shared/run"
    waits = founded((A,), start_with=3, slots=4)
    waits.begun = False
    assert awaited(waits).startswith("more islands: 1 of the 3 that start together")
    trains = founded((A, B))
    assert awaited(trains) == ""
    assert awaited(trains, listened=SILENT + 1.0) == "islands in /shared/run"
    trains.ended = True
    assert awaited(trains, listened=SILENT + 1.0) == ""


def test_a_syncer_that_is_alone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "STILL_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "LATE_SECONDS", 0.01)
    store = tmp_path / "store"
    with syncer(store, tmp_path / "scratch"):
        until = time.monotonic() + PATIENCE
        while not caplog.messages:
            assert time.monotonic() < until
            time.sleep(0.05)
    line = rf"the syncer: waiting since \d+ s for islands in {re.escape(str(store))}"
    assert re.fullmatch(line, caplog.messages[0])


def test_a_run_that_is_over_says_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Island(A, facts={}, shapes=[])
    machine.decision = founded((A,))
    caplog.set_level("INFO")
    say_end(machine, "join.toml")
    remedy = (
        "change total_tokens TOKENS --join join.toml` makes it longer, and another islands.join"
    )
    assert remedy in caplog.text
    monkeypatch.setenv(LOCAL_ISLANDS, "runs")
    say_end(machine, "runs/store")
    assert "another run.folder begins a new run" in caplog.text


# --- a store that is full or gone -----------------------------------------------------------------


def test_a_full_disk_delays_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Islands train on, and what they have trained is merged once there is room."""
    full = threading.Event()
    create = Folder.create
    replace_ = Folder.replace

    def refuse(place: Folder) -> None:
        if full.is_set():
            raise FullError(f"{place.location}: No space left on device; free some space")

    def create_if_room(self: Folder, name: str, content: Sealed, **options: bool) -> bool:
        refuse(self)
        return create(self, name, content, **options)

    def replace_if_room(self: Folder, name: str, content: Sealed, **options: bool) -> None:
        refuse(self)
        replace_(self, name, content, **options)

    monkeypatch.setattr(Folder, "create", create_if_room)
    monkeypatch.setattr(Folder, "replace", replace_if_room)
    store = tmp_path / "store"
    pair = [
        Trainee(store, name, config(8, delay=1), total_tokens=80 * 2 * TOKENS, step_seconds=0.02)
        for name in "ab"
    ]

    def fill(step: int) -> None:
        if step == 30:
            full.set()
            threading.Timer(3.0, full.clear).start()

    pair[0].on_step = fill
    with syncer(store, tmp_path / "scratch"), trained(*pair):
        pass
    decision = newest(store)
    assert decision.ended
    assert not any(ledger.lost for slot in decision.slots for ledger in slot.ledgers)
    assert "free some space: until then, islands train on, and nothing is merged" in caplog.text


def test_an_island_at_the_end_says_that_its_store_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits, and ends once the store is there again."""
    monkeypatch.setattr(waiting, "LATE_SECONDS", 0.5)
    store = tmp_path / "store"
    aside = tmp_path / "aside"
    settings = replace(config(8, delay=1))
    one = Trainee(store, "a", settings, total_tokens=40 * TOKENS, begin=1, slots=1)

    def take_away(step: int) -> None:
        if step == 38:
            store.rename(aside)

    one.on_step = take_away
    with syncer(store, tmp_path / "scratch"), trained(one):
        text = f"the store {store}, which cannot be reached since"
        until = time.monotonic() + PATIENCE
        while text not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.05)
        aside.rename(store)
    assert newest(store).ended
