"""Syncers as processes, which are killed, paused and replaced."""

import errno
import logging
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.diloco.toy import config
from tests.islands.by_hand import HandIsland, newest, open_run, syncer, train
from tests.islands.written_run import damage
from tests.programs import Program
from tests.waiting import wait_until
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands import syncing
from torchtitan_diloco.islands.rules.decision import PROTOCOL, Decision, Fate
from torchtitan_diloco.islands.rules.founding import Founding
from torchtitan_diloco.islands.rules.jobs import Adopt, Fetch, Load
from torchtitan_diloco.islands.rules.names import founding_name
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.presence import Presence
from torchtitan_diloco.islands.runs import Decisions
from torchtitan_diloco.islands.scratch import (
    folder_of,
    lock_folder,
    read_session,
    write_session,
)
from torchtitan_diloco.islands.syncing import SyncerProcess
from torchtitan_diloco.islands.tasks import FragmentTasks, TransferTasks
from torchtitan_diloco.islands.transfers import UNREADABLE_SECONDS
from torchtitan_diloco.store import AwayError, FullError, LargeObjects

TOKENS = [100, 170]
PATIENCE = 120.0


def sync(store: Path, scratch: Path, *options: str) -> Program:
    """Start the command of a syncer. It is killed at the end of its context."""
    words = ["islands", "sync", store, "--scratch", scratch, *options]
    return Program(scratch.with_suffix(".txt"), words)


def equal_versions(pair: list[HandIsland]) -> None:
    first, second = (one.versions for one in pair)
    for key in first.keys() & second.keys():
        assert torch.equal(first[key], second[key]), key
    for one, other in zip(pair[0].states, pair[1].states, strict=True):
        assert torch.equal(one.outer, other.outer)


def test_a_run_ends_although_its_syncer_is_killed(tmp_path: Path) -> None:
    """Islands train on without it. The command ends with the run."""
    store = tmp_path / "store"
    chosen = config(0, delay=1)
    total = 96 * sum(TOKENS)
    with open_run(store) as run:
        pair = [HandIsland(run, name, chosen, total_tokens=total) for name in ("a", "b")]
        with sync(store, tmp_path / "scratch") as process:
            train(pair, 45, TOKENS)
            process.kill()
        before = newest(store)
        assert not before.stopped
        with sync(store, tmp_path / "scratch") as process:
            train(pair, 1000, TOKENS)
            assert [one.machine.ending for one in pair] == ["ended", "ended"]
            last_line = process.end().splitlines()[-1]
            assert last_line == f"the run in {store} has ended, and all islands have read it"
        (files,) = (tmp_path / "scratch").iterdir()
        assert [path.name for path in files.iterdir()] == ["lock"]
        after = newest(store)
        assert after.ended
        assert after.stopped
        assert after.session != before.session
        assert after.fragments[0].clock >= total
        equal_versions(pair)
        ledgers = [slot.ledgers[0] for slot in after.slots]
        assert [one.lost for one in ledgers] == [0, 0]
        weights = sum(one.taken // 2 * TOKENS[slot] for slot, one in enumerate(ledgers))
        assert weights == after.fragments[0].clock, "all samples once"


def test_a_part_is_fetched_before_its_fragment_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new syncer reads parts that have waited for it while it still loads the fragments."""
    store = tmp_path / "store"
    is_fetched = threading.Event()
    load = FragmentTasks._load
    keep_part = FragmentTasks.keep_part

    def load_late(tasks: FragmentTasks, job: Load) -> None:
        assert is_fetched.wait(PATIENCE)
        load(tasks, job)

    def keep(tasks: FragmentTasks, incarnation: str, part: Part, content: memoryview) -> None:
        keep_part(tasks, incarnation, part, content)
        is_fetched.set()

    with open_run(store) as run:
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        with syncer(store, tmp_path / "scratch"):
            train(pair, 12, TOKENS)
        monkeypatch.setattr(FragmentTasks, "_load", load_late)
        monkeypatch.setattr(FragmentTasks, "keep_part", keep)
        with syncer(store, tmp_path / "scratch"):
            train(pair, 20, TOKENS)
        equal_versions(pair)


def test_a_syncer_on_another_machine_makes_the_same_copies(tmp_path: Path) -> None:
    """It has no files of the first one. The momentum may be older, and the residual is lost."""
    store = tmp_path / "store"
    chosen = config(8, delay=1)
    with open_run(store) as run:
        pair = [HandIsland(run, name, chosen, codec="fp4_e3m0") for name in ("a", "b")]
        for number in range(2):
            with syncer(store, tmp_path / f"scratch-{number}"):
                train(pair, 40 * (number + 1), TOKENS)
        joins = HandIsland(run, "c", chosen, codec="fp4_e3m0")
        joins.look()
        assert len(joins.held) > 2, "two copies, and the versions after them"
        equal_versions(pair)
    decision = newest(store)
    assert min(shared.version for shared in decision.fragments) >= 8
    assert all(shared.outer is not None for shared in decision.fragments)


def test_a_paused_syncer_that_wakes_up_stands_by(tmp_path: Path) -> None:
    store = tmp_path / "store"
    chosen = config(0, delay=1)
    with open_run(store) as run:
        pair = [HandIsland(run, name, chosen) for name in ("a", "b")]
        with sync(store, tmp_path / "one") as first:
            train(pair, 30, TOKENS)
            os.kill(first.pid, signal.SIGSTOP)
            before = newest(store)
            with sync(store, tmp_path / "two") as second:
                train(pair, 50, TOKENS)
                os.kill(first.pid, signal.SIGCONT)
                train(pair, 90, TOKENS)
                after = newest(store)
                assert after.session != before.session
                second.terminate()
                assert second.wait(PATIENCE) == 128 + signal.SIGTERM
                sessions = before.session, after.session
                wait_until(lambda: newest(store).session not in sessions, "another session")
                train(pair, 100, TOKENS)
            first.terminate()
            output = first.end(128 + signal.SIGTERM)
            assert "another syncer decides: standing by" in output
        equal_versions(pair)
        assert [slot.ledgers[0].lost for slot in newest(store).slots] == [0, 0]


def test_a_syncer_takes_the_place_of_one_that_died_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when the decisions have stood still for some time."""
    store = tmp_path / "store"
    scratch = tmp_path / "scratch"
    monkeypatch.setattr("torchtitan_diloco.islands.rules.commit.STANDSTILL", math.inf)
    chosen = config(0, delay=1)
    with open_run(store) as run:
        pair = [HandIsland(run, name, chosen) for name in ("a", "b")]
        with sync(store, scratch) as process:
            train(pair, 10, TOKENS)
            process.kill()
        before = newest(store)
        assert not before.stopped
        (files,) = scratch.iterdir()
        with syncer(store, files):
            train(pair, 20, TOKENS)
        assert newest(store).session != before.session
        equal_versions(pair)


def test_files_of_others_among_the_decisions_end_no_run(tmp_path: Path) -> None:
    """File managers, and people who copy a folder, leave some."""
    store = tmp_path / "store"
    with open_run(store) as run, syncer(store, tmp_path / "scratch"):
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        train(pair, 12, TOKENS)
        before = newest(store)
        (store / "run/desktop.ini").write_bytes(b"[.ShellClassInfo]")
        (store / f"run/{before.number + 10**6:012d}.bak").write_bytes(b"")
        train(pair, 40, TOKENS)
        after = newest(store)
    assert after.fragments[0].version > before.fragments[0].version
    assert after.session == before.session, "it leads all the time"


def test_a_syncer_with_other_files_stands_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that the one that led is dead."""
    monkeypatch.setattr("torchtitan_diloco.islands.rules.commit.STANDSTILL", 1.0)
    said = list[str]()
    store = tmp_path / "store"
    with open_run(store) as run:
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        with sync(store, tmp_path / "scratch") as process:
            train(pair, 10, TOKENS)
            process.kill()
        other = SyncerProcess(run, tmp_path / "other", say=said.append)
        thread = threading.Thread(target=other.run)
        thread.start()
        train(pair, 20, TOKENS)
        other.stop()
        thread.join()
    assert said[0].startswith("standing by: run ")


def test_a_syncer_is_stopped_although_its_store_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(syncing, "STOP_SECONDS", 0.5)
    caplog.set_level(logging.INFO, logger="torchtitan_diloco")
    store = tmp_path / "store"
    with open_run(store) as run:
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        with syncer(store, tmp_path / "scratch"):
            train(pair, 12, TOKENS)
            store.rename(tmp_path / "gone")
    assert "ends without publishing what is being merged" in caplog.text
    (tmp_path / "gone").rename(store)
    with open_run(store) as run, syncer(store, tmp_path / "scratch"):
        for island in pair:
            island.run = run
            island.decisions = Decisions(run)
        train(pair, 30, TOKENS)
    equal_versions(pair)


def test_a_damaged_copy_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """Only a syncer on another machine needs it."""
    store = tmp_path / "store"
    with open_run(store) as run:
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        with syncer(store, tmp_path / "scratch"):
            train(pair, 12, TOKENS)
    for path in (store / "copy").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with (
        open_run(store) as run,
        pytest.raises(UserError, match=r"is damaged .* with --islands\.found true"),
    ):
        SyncerProcess(run, tmp_path / "other").run()


def test_a_missing_copy_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """To start the syncer again would not help."""
    store = tmp_path / "store"
    with open_run(store) as run:
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        with syncer(store, tmp_path / "scratch"):
            train(pair, 12, TOKENS)
    for path in (store / "copy").iterdir():
        path.unlink()
    reason = r"is damaged \(copy/\S+ is no longer stored\): put back .* with --islands\.found true"
    with open_run(store) as run, pytest.raises(UserError, match=reason):
        SyncerProcess(run, tmp_path / "other").run()


def test_a_decision_of_a_store_before_it_was_put_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its syncer died before it could withdraw it. No syncer goes on from it."""
    monkeypatch.setattr("torchtitan_diloco.islands.rules.commit.WENT_BACK_SECONDS", 0.0)
    store = tmp_path / "store"
    older = tmp_path / "older"
    with open_run(store) as run:
        pair = [HandIsland(run, name, config(0, delay=1)) for name in ("a", "b")]
        with syncer(store, tmp_path / "scratch"):
            train(pair, 12, TOKENS)
        shutil.copytree(store, older)
        with syncer(store, tmp_path / "scratch"):
            train(pair, 40, TOKENS)
    before = newest(older)
    stray = f"run/{newest(store).number:012d}"
    shutil.copy(store / stray, older / stray)
    with open_run(older) as run, pytest.raises(UserError, match=f"delete {stray} from it"):
        SyncerProcess(run, tmp_path / "other").run()
    (older / stray).unlink()
    with syncer(older, tmp_path / "other"):
        wait_until(lambda: newest(older).session != before.session, "the next decision")
    assert newest(older).fragments[0].version == before.fragments[0].version


def test_a_folder_has_the_same_files_by_all_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {folder_of(tmp_path, path) for path in ("run", "./run/", f"{tmp_path}/run")}
    assert len(paths) == 1
    assert paths.isdisjoint({folder_of(tmp_path, "other"), folder_of(tmp_path, "s3://run")})


def test_each_syncer_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """So that the second one on a machine can stand by."""
    names = [lock_folder(tmp_path / "run").name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_a_session_of_another_machine_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system may have locks that hold on one machine only."""
    write_session(tmp_path, "5e55")
    assert read_session(tmp_path) == "5e55"
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    assert read_session(tmp_path) == ""


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UserError, match=r"No locks available: .* on a disk of this machine"):
        lock_folder(tmp_path)


def test_a_damaged_decision_is_deleted_by_hand_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its syncer has died, none may lead: a standby repeats what to do."""
    monkeypatch.setattr("torchtitan_diloco.islands.rules.commit.STANDSTILL", 1.0)
    monkeypatch.setattr(syncing, "DAMAGE_SECONDS", 0.5)
    store = tmp_path / "store"
    said = list[str]()
    with open_run(store) as run, ThreadPoolExecutor(1) as pool:
        pair = [HandIsland(run, name, config(8, delay=1)) for name in ("a", "b")]
        with syncer(store, tmp_path / "scratch"):
            train(pair, 12, TOKENS)
        number = newest(store).number
        damaged = damage(store, number)
        standby = SyncerProcess(run, tmp_path / "other", say=said.append)
        standing_by = pool.submit(standby.run)
        try:
            wait_until(lambda: len(said) == 3, "three lines")
            remedy = "if no syncer has decided since, delete it: the run goes on from the decision"
            assert [remedy in line for line in said] == [False, True, True]
            assert all(line.startswith(f"{store}: run/{damaged.name} was") for line in said)
            damaged.unlink()
            train(pair, 30, TOKENS)
            equal_versions(pair)
            assert newest(store).number > number
            assert [slot.ledgers[0].lost for slot in newest(store).slots] == [0, 0]
        finally:
            standby.stop()
        assert not standing_by.result()


class Machine:
    """The machine of a syncer that hears islands all the time."""

    def __init__(self) -> None:
        self.presence = Presence()
        self.fates = list[Fate]()
        self.adopted = list[bool]()

    def call(self, call: Callable[[Any], Any], /) -> Any:
        return call(self)

    def sleep(self, seconds: float) -> None:
        self.presence.listened += seconds

    def on_part(self, _: str, __: Part, fate: Fate) -> None:
        self.fates.append(fate)

    def on_adopted(self, _: str, __: Founding, is_whole: bool) -> None:
        self.adopted.append(is_whole)


def test_chunks_of_interrupted_writers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no object. Those of an object that a later decision announces are under way. A full
    quota may refuse deletions for a while."""
    monkeypatch.setattr(syncing, "SWEEP_SECONDS", 0.2)
    root = "0123456789abcdef"
    failures = [AwayError("the store is away"), FullError("the quota is used up")]
    delete = LargeObjects.delete

    def delete_later(large: LargeObjects, name: str, *arguments: Any) -> None:
        if name.startswith("found/b/") and failures:
            raise failures.pop()
        delete(large, name, *arguments)

    monkeypatch.setattr(LargeObjects, "delete", delete_later)
    with open_run(tmp_path / "store") as run:
        pair = [HandIsland(run, name, config(8, delay=1)) for name in ("a", "b")]
        with syncer(tmp_path / "store", tmp_path / "scratch"):
            train(pair, 20, TOKENS)
            left = [f"version/1-0-1.{root}.{number:05d}" for number in range(3)]
            left += [f"found/b/1111-0.{root}.00000", f"copy/1-0-1.{root}.00000"]
            later = f"version/{10**6}-0-1.{root}.00000"
            for name in (*left, later):
                run.store.create(name, b"chunk")
            wait_until(lambda: all(run.store.get(name) is None for name in left), "their deletion")
            assert run.store.get(later) is not None
            train(pair, 40, TOKENS)
    assert failures == []
    assert newest(tmp_path / "store").fragments[0].version > 3


def test_a_part_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its syncer hears islands all the time, it is not the store that is away."""

    def get(*_: object, **__: object) -> None:
        raise AwayError("it cannot be read")

    monkeypatch.setattr(LargeObjects, "get", get)
    machine = Machine()
    fragments: Any = SimpleNamespace(memory_for=lambda _: memoryview(bytearray(8)))
    part = Part(0, 1, 0, "0", 0, 10, weight=10, size=8)
    with open_run(tmp_path) as run:
        transfers = TransferTasks(run, fragments, machine.call, machine.sleep, lambda: None)
        transfers.fetch(Fetch("b/1111", part))
    assert machine.fates == [Fate.UNREADABLE]
    assert machine.presence.listened == pytest.approx(UNREADABLE_SECONDS, abs=1.0)


def test_copies_of_a_founder_are_read_once_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    real = LargeObjects.get

    def get(large: LargeObjects, name: str, *arguments: Any) -> Any:
        read.append(name)
        return real(large, name, *arguments)

    monkeypatch.setattr(LargeObjects, "get", get)
    machine = Machine()
    with open_run(tmp_path / "store") as run:
        island = HandIsland(run, "a", config(1, delay=1))
        founding = island.founding
        decision = Decision(PROTOCOL, 1, "session", founding.run, founding.settings)
        decision.founder = island.incarnation
        island.machine.on_decision(decision, 0.0)
        fragments = FragmentTasks(run, tmp_path / "scratch", machine.call, machine.sleep)
        adopt = Adopt(island.incarnation, founding)
        fragments.adopt(adopt)
        names = [founding_name(island.incarnation, number) for number in range(len(island.states))]
        assert len(names) > 1
        island.found()
        run.large.delete(names[-1])
        fragments.adopt(adopt)
        assert read == [], "one is missing"
        run.large.create(names[-1], b"damaged")
        fragments.adopt(adopt)
    assert read == names
    assert machine.adopted == [False, False, False]
