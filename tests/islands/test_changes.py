"""Requests of a person to a run in a folder, whose syncer and islands run."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.diloco.toy import config
from tests.islands.by_hand import newest, syncer
from tests.islands.trainees import TOKENS, Trainee, trained
from tests.islands.written_run import WrittenRun, damage
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.islands import changes
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.changes import CHANGE_SECONDS
from torchtitan_diloco.islands.instructions import IslandFencedError
from torchtitan_diloco.store import RefusedError, Store, open_store

pytestmark = pytest.mark.timeout(240)


@contextmanager
def training(folder: Path, *names: str) -> Iterator[list[Trainee]]:
    """Yield islands that train in a folder, and stop those that are left."""
    islands = [
        Trainee(folder / "store", name, config(2, delay=1), total_tokens=10**9, step_seconds=0.02)
        for name in names
    ]
    began = threading.Barrier(len(names) + 1)
    for one in islands:
        one.on_step = lambda step: began.wait(60) if step == 3 else None  # type: ignore[assignment]
    with syncer(folder / "store", folder / "scratch"):
        for one in islands:
            one.thread.start()
        try:
            began.wait(120)
            yield islands
        finally:
            for one in islands:
                one.stop.set()
            for one in islands:
                one.thread.join(60)


def run(folder: Path, *words: str) -> int:
    return main([*words, "--join", str(folder / "store")])


def test_a_run_is_changed_while_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path, "a", "b") as (first, second):
        assert run(tmp_path, "change", "diloco.sync_every", "7") == 0
        said = "the run continues with diloco.sync_every = 7 (before: 8)\n"
        assert capsys.readouterr().out == said
        assert newest(tmp_path / "store").settings.sync_every == 7
        assert run(tmp_path, "change", "slots", "3") == 0
        capsys.readouterr()
        for words, why in (
            (("diloco.overlap.delay", "7"), "delay 7 must be smaller than 7"),
            (("diloco.quantization.codec", "topk"), "give one of"),
            (("diloco.sync_evry", "7"), "did you mean diloco.sync_every?"),
            (("total_tokens", "1"), "error: total_tokens = 1: the run has merged"),
            (("islands.slots", "2"), "the run has 3 slots, which cannot be removed"),
            (("model.dim", "2"), "cannot be changed during a run"),
            (("diloco.sync_every", "many"), "error: diloco.sync_every = many: give a whole number"),
        ):
            assert run(tmp_path, "change", *words) == USER_ERROR
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert why in said
        deadline = time.monotonic() + 60
        while first.outer.config.sync_every != 7 or second.outer.config.sync_every != 7:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_islands_leave_and_are_evicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with training(tmp_path, "a", "b") as (first, second):
        assert run(tmp_path, "leave", "nobody") == USER_ERROR
        assert "the run has no island 'nobody'; it has: a, b" in capsys.readouterr().err
        assert run(tmp_path, "leave", "b") == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith("asked b to leave: waiting until its parts are merged")
        assert said[1] == "b has left"
        second.finish()
        assert run(tmp_path, "evict", "a") == 0
        assert capsys.readouterr().out.startswith("evicted a: its slot is free; `islands change")
        with pytest.raises(IslandFencedError, match="the owner of the run has evicted"):
            first.finish()
        assert newest(tmp_path / "store").barred == ["a"]
        assert run(tmp_path, "change", "admit", "a") == 0
        assert newest(tmp_path / "store").barred == []
        assert not any(
            ledger.lost for slot in newest(tmp_path / "store").slots for ledger in slot.ledgers
        )


def test_a_run_that_has_ended_goes_on_with_more_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its syncer has ended, too: the change waits for the next one."""
    store = tmp_path / "store"
    chosen = config(8, delay=1)
    total = 24 * TOKENS
    one = Trainee(store, "a", chosen, total_tokens=total, begin=1, slots=1)
    with syncer(store, tmp_path / "scratch"), trained(one):
        pass
    assert newest(store).ended
    assert run(tmp_path, "leave", "a") == USER_ERROR
    assert "has ended" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes, "CHANGE_SECONDS", 0.5)
        assert run(tmp_path, "change", "total_tokens", str(2 * total)) == USER_ERROR
    said = capsys.readouterr().err
    assert "no syncer has decided within 0.5 s: start `" in said
    assert f"islands sync {store}`. The change is stored, and is made then" in said
    again = Trainee(store, "a", chosen, total_tokens=total, begin=1, slots=1, saved=one.saved)
    with syncer(store, tmp_path / "scratch"), trained(again):
        pass
    decision = newest(store)
    assert decision.ended
    assert decision.settings.total_tokens == 2 * total
    assert decision.fragments[0].clock >= 2 * total
    assert again.steps >= 24


def test_a_syncer_does_not_end_before_it_has_read_changes(tmp_path: Path) -> None:
    """The run has ended, and is made longer while no syncer runs."""
    store = tmp_path / "store"
    total = 24 * TOKENS
    one = Trainee(store, "a", config(8, delay=1), total_tokens=total, begin=1, slots=1)
    with syncer(store, tmp_path / "scratch"), trained(one):
        pass
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes, "CHANGE_SECONDS", 0.1)
        with pytest.raises(UserError, match="no syncer has decided"):
            changes.change(str(store), "total_tokens", str(10 * total))
    with syncer(store, tmp_path / "scratch"):
        deadline = time.monotonic() + 60
        while newest(store).settings.total_tokens == total:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        assert not newest(store).stopped, "it waits for islands"


def test_a_login_that_may_not_change_a_run_is_told_who_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = WrittenRun()
    written.rounds(1)
    written.write(tmp_path / "store")

    def refuse(*_: object) -> bool:
        raise RefusedError("s3://islands: these credentials have no permission to create change/1")

    monkeypatch.setattr(Store, "create", refuse)
    for words in (("leave", "a"), ("evict", "a"), ("change", "slots", "9")):
        assert run(tmp_path, *words) == USER_ERROR
        said = capsys.readouterr().err
        assert "only the owner of the run may change it" in said
        assert "stop an island with Ctrl-C or SIGTERM where it runs" in said
        assert said.count("\n") == 1


def test_only_an_island_that_was_evicted_is_admitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = WrittenRun()
    written.rounds(1)
    written.state.barred = ["c", "d"]
    written.write(tmp_path / "store")
    assert run(tmp_path, "change", "admit", "a") == USER_ERROR
    assert capsys.readouterr().err == (
        "error: admit a: this island is not evicted; evicted are: c, d\n"
    )
    assert not (tmp_path / "store/change").exists()


def test_the_login_of_a_site_is_told_who_may_change_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    join = tmp_path / "join-b.toml"
    join.write_text(
        'location = "s3://islands"\nendpoint = "https://127.0.0.1:1"\naccess_key_id = "b"\n'
        'secret_access_key = "secret"\nname = "b"\nprefix = "mirror/b/"\n'
    )
    store = partial(open_store, tmp_path / "store")
    monkeypatch.setattr(changes, "open_store", lambda _, **options: store(**options))
    assert main(["change", "slots", "9", "--join", str(join)]) == USER_ERROR
    said = capsys.readouterr().err
    assert f"{join}: the login of b may not do this: only the owner of the run may" in said
    assert said.count("\n") == 1


def test_a_run_that_has_not_started_cannot_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    assert run(tmp_path, "change", "slots", "9") == USER_ERROR
    assert "the run has not started" in capsys.readouterr().err
    assert CHANGE_SECONDS > 10
    with suppress(FileNotFoundError):
        assert not list((tmp_path / "store" / "change").iterdir())


def test_a_run_whose_newest_decision_is_damaged_cannot_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = WrittenRun()
    written.rounds(1)
    written.write(tmp_path / "store")
    damaged = damage(tmp_path / "store", written.state.number)
    assert run(tmp_path, "change", "slots", "9") == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/store: run/{damaged.name} was altered: ")
    assert "; if no syncer has decided since, delete it: the run goes on" in said
