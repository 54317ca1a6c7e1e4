"""Threads of a syncer, and when its terms wait for them."""

import threading
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.islands import syncing
from torchtitan_diloco.islands.lanes import Lanes
from torchtitan_diloco.islands.syncing import SyncerProcess
from torchtitan_diloco.store import Kind


def test_lanes_that_stop_drop_what_waits_and_let_the_others_run() -> None:
    may_end = threading.Event()
    done = list[str]()
    errors = list[BaseException]()
    lanes = Lanes("test", 1, errors.append)

    def upload() -> None:
        may_end.wait()
        done.append("upload")

    lanes.submit("first", upload)
    lanes.submit("first", lambda: done.append("next of the lane"))
    lanes.submit("second", lambda: done.append("other lane"))
    lanes.stop()
    lanes.submit("third", lambda: done.append("too late"))
    assert done == []
    may_end.set()
    lanes.close()
    assert done == ["upload"]
    assert errors == []


def test_a_syncer_stands_by_while_uploads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads again only after them: they read files that it would write."""
    happened = list[str]()

    class FakeTerm:
        def __init__(self, *_: Any, **__: Any) -> None:
            happened.append("begins a term")

        def lead(self) -> bool:
            return happened.count("begins a term") == 2

        def close(self) -> None:
            happened.append("waits for transfers")

    class FakeRun:
        class store:
            kind = Kind.FOLDER

    monkeypatch.setattr(syncing, "Term", FakeTerm)
    monkeypatch.setattr(SyncerProcess, "_stand_by", lambda _: happened.append("stands by"))
    run: Any = FakeRun()
    assert SyncerProcess(run, tmp_path, say=lambda _: None).run()
    term = ["stands by", "begins a term"]
    assert happened == [*term, "stands by", "waits for transfers", *term[1:], "waits for transfers"]
