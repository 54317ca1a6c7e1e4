"""Syncers and islands that are killed at any moment, and a store that is away."""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.diloco.toy import config
from tests.islands.audit import audited
from tests.islands.by_hand import newest, open_run, syncer
from tests.islands.mortal import PATIENCE, Lives, decide, train
from tests.islands.rules.desk import A
from tests.islands.test_one_job import Versions, one_job
from tests.islands.trainees import SAMPLES, TOKENS, Trainee, trained
from tests.islands.written_run import WrittenRun, damage, reading
from tests.processes import FORKS, ProcessPool
from tests.waiting import wait_until
from torchtitan_diloco.islands import link
from torchtitan_diloco.islands.followers import SharedCopies
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.rules import fragment as rules
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.syncing import SyncerProcess

PER_SAMPLE = TOKENS // SAMPLES


def test_ten_kills_of_the_syncer_change_no_bit(
    processes: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two writes, from the founding on. The islands have the versions of one job."""
    monkeypatch.setattr(rules, "FRESH", 60.0)  # wait for it, however busy the machine is
    chosen = config(8, delay=1)
    expected = processes.run(one_job, 2, chosen, [TOKENS, TOKENS])[0][0]
    store = tmp_path / "store"
    scratch = tmp_path / "scratch"
    total = 100 * 2 * TOKENS
    pair = [Trainee(store, name, chosen, total_tokens=total, grace=60.0) for name in "ab"]
    versions: Versions = {}

    def look(_: int) -> None:
        for number, fragment in enumerate(pair[0].peers.machine.fragments):
            state = pair[0].outer.loop.states[number]
            versions.setdefault((number, fragment.applied), state.outer.clone())

    pair[0].on_step = look
    store.mkdir()
    with audited(store) as audit:
        lives = Lives(decide, [1, 2, 3, 5, 4, 7, 6, 9, 8, 11], store, scratch)
        lives.start()
        with trained(*pair):
            pass
        lives.finish()
    for key, value in expected.items():
        assert torch.equal(versions[key], value), key
    copies = audit.check(PER_SAMPLE)
    for island in pair:
        for state, copy in zip(island.outer.loop.states, copies, strict=True):
            assert torch.equal(state.outer, copy)
    assert len({decision.session for decision in audit.decisions.values()}) >= 10
    assert audit.newest.ended


@pytest.mark.parametrize("deaths", [[], [6, 9, 14]], ids=["island", "both"])
def test_an_island_is_killed_in_its_uploads(tmp_path: Path, deaths: list[int]) -> None:
    """It returns from its checkpoint, also while the syncer is killed. `deaths`: of the syncer."""
    chosen = config(8, delay=1)
    store = tmp_path / "store"
    scratch = tmp_path / "scratch"
    total = 150 * 2 * TOKENS
    store.mkdir()
    survivor = Trainee(store, "a", chosen, total_tokens=total, step_seconds=0.05)
    with audited(store) as audit:
        syncers = Lives(decide, deaths, store, scratch)
        victim = Lives(train, [3, 4], store, "b", chosen, total, tmp_path)
        syncers.start()
        victim.start()
        with trained(survivor):
            pass
        victim.finish()
        syncers.finish()
    copies = audit.check(PER_SAMPLE)
    shared = torch.load(tmp_path / "shared.pt")
    for name, value in survivor.shared.items():
        assert torch.equal(value, shared[name]), name
    for state, copy in zip(survivor.outer.loop.states, copies, strict=True):
        assert torch.equal(state.outer, copy)
    assert audit.newest.ended


def test_all_processes_are_killed_and_go_on(tmp_path: Path) -> None:
    """The islands from their checkpoints, and the syncer on another machine, without its files."""
    store = tmp_path / "store"
    chosen = config(8, delay=1)
    total = 150 * 2 * TOKENS
    folders = [tmp_path / name for name in "ab"]
    for folder in (store, *folders):
        folder.mkdir()

    def start(scratch: str) -> list[BaseProcess]:
        bodies: list[Callable[[], None]] = [partial(decide, None, store, tmp_path / scratch)]
        for folder in folders:
            bodies.append(partial(train, None, store, folder.name, chosen, total, folder))
        processes: list[BaseProcess] = [FORKS.Process(target=body, daemon=True) for body in bodies]
        for process in processes:
            process.start()
        return processes

    with audited(store) as audit:
        processes = start("first")
        wait_until(lambda: all((folder / "saved.pt").exists() for folder in folders), "both saves")
        wait_until(lambda: newest(store).fragments[0].version > 3, "four versions")
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        killed = newest(store)
        processes = start("second")
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not killed.ended
    assert audit.newest.run == killed.run
    assert audit.newest.ended
    copies = audit.check(PER_SAMPLE)
    shared = [torch.load(folder / "shared.pt") for folder in folders]
    for name, value in shared[0].items():
        assert torch.equal(value, shared[1][name]), name
    assert sum(copy.numel() for copy in copies) == sum(map(torch.numel, shared[0].values()))


def test_islands_train_on_while_the_store_is_away(tmp_path: Path) -> None:
    """Its folder disappears, as if it was unmounted, and comes back."""
    chosen = config(8, delay=1)
    store = tmp_path / "store"
    away = tmp_path / "away"
    total = 300 * 2 * TOKENS
    pair = [Trainee(store, name, chosen, total_tokens=total, step_seconds=0.03) for name in "ab"]
    is_training = threading.Event()
    pair[0].on_step = lambda step: is_training.set() if step == 30 else None
    store.mkdir()
    with audited(store) as audit, syncer(store, tmp_path / "scratch"), trained(*pair):
        assert is_training.wait(60)
        store.rename(away)
        steps = [island.steps for island in pair]
        time.sleep(6)
        assert not store.exists()
        trained_on = [island.steps - before for island, before in zip(pair, steps, strict=True)]
        away.rename(store)
        before = newest(store)
    assert min(trained_on) > 20
    copies = audit.check(PER_SAMPLE)
    for island in pair:
        for state, copy in zip(island.outer.loop.states, copies, strict=True):
            assert torch.equal(state.outer, copy)
    assert audit.newest.session == before.session, "the syncer has stayed"
    assert audit.newest.ended


def test_a_damaged_decision_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An island, a standby and a reader say so, and go on with the next one."""
    monkeypatch.setattr(link, "STILL_SECONDS", 0.05)
    store = tmp_path / "store"
    written = WrittenRun()
    written.rounds(1)
    written.write(store)
    damaged = damage(store, written.state.number)
    says = f"{damaged.relative_to(store)} was altered: the checksum of its .* differs"
    heard = list[int]()
    machine = SimpleNamespace(
        decision=None,
        slot=None,
        incarnation=A,
        on_decision=lambda decision, _: heard.append(decision.number),
        on_empty=pytest.fail,
    )
    said = list[str]()
    with open_run(store) as run, reading(store) as reader, ThreadPoolExecutor(2) as pool:
        island = Link(run, cast("Island", machine), cast("SharedCopies", None), [])
        standby = SyncerProcess(run, tmp_path / "scratch", say=said.append)
        pool.submit(island._guard, island._read)
        standing_by = pool.submit(standby.run)
        try:
            wait_until(lambda: bool(said) and bool(caplog.messages), "what both say")
            found = reader.overview()
            assert found["phase"] == "cannot be read"
            assert re.fullmatch(rf"a decision could not be read \({says}\)", found["connection"])
            written.rounds(1)
            written.write(store)
            number = written.state.number
            wait_until(lambda: heard == [number] and len(said) == 2, "the decision")
            reader.read()
            assert reader.overview()["connection"] == "ok"
        finally:
            island._closed.set()
            standby.stop()
        assert not standing_by.result()
        island.check()
    assert re.fullmatch(rf"{store}: {says}; trying again", caplog.messages[0])
    assert re.fullmatch(rf"{store}: {says}; trying again", said[0])
    assert said[1].startswith("standing by")
