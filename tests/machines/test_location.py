"""The doctor at the location of a run of islands."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.diloco.toy import config
from tests.islands.by_hand import settings_of
from tests.islands.written_run import damage
from tests.store.places import Place
from tests.store.seaweed import SITE, SeaweedServer
from torchtitan_diloco.base.user import USER_ERROR
from torchtitan_diloco.islands.rules.decision import (
    PROTOCOL,
    Decision,
    Seen,
    SharedFragment,
    Slot,
    encode_decision,
)
from torchtitan_diloco.islands.rules.names import run_name
from torchtitan_diloco.machines import doctor
from torchtitan_diloco.store import Store, open_store

ADDRESS = ["name", "route", "port"]
LOCATION = ["location", "rights", "clock", "round trip", "rate", "run"]

Examine = Callable[..., list[str]]
"""Calls the doctor with a location, and returns its lines about it, which name these hops."""


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Examine:
    monkeypatch.setattr("torchtitan_diloco.machines.location.MEASURED_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "machine_hops", list)

    def run(location: object, hops: list[str]) -> list[str]:
        code = doctor.main(["--join", str(location), "--streams", "2"])
        lines = capsys.readouterr().out.splitlines()
        for line, hop in zip(lines, hops, strict=True):
            assert line[8:].startswith(hop)
        failed = [line for line in lines if line.startswith("FAILED  ")]
        assert failed == (lines[-1:] if code else [])
        return lines

    return run


def store_decision(location: Path, **changed: Any) -> None:
    """Store a decision of a run with an island whose steps take a tenth of a second."""
    store = open_store(location)
    settings = settings_of(config(8), sync_every=99, **changed)
    decision = Decision(
        PROTOCOL,
        1,
        "session",
        "run-1",
        settings,
        fragments=[SharedFragment([(1000, 1000)], version=3, clock=1000)],
        slots=[Slot([], owner="a/12345678")],
        seen=[Seen(step_seconds=0.1)],
        begun=True,
    )
    assert store.create(run_name(1), encode_decision(decision))
    store.close()


def test_a_folder_without_a_run(examine: Examine, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (line,) = examine(store, LOCATION[:1])
    assert f"{store} does not exist or cannot be written; check the path" in line
    assert not store.exists(), "a doctor makes none"
    store.mkdir()
    lines = examine(store, LOCATION)
    assert "all who may write it may write all names" in lines[1]
    assert "MB/s up" in lines[4]
    assert lines[-1].endswith("run: no island has founded one here")
    assert [path for path in store.rglob("*") if path.is_file()] == [store / ".store-id"]


def test_a_run_whose_parts_come_in_time(examine: Examine, tmp_path: Path) -> None:
    store_decision(tmp_path, grace=100.0)
    line = examine(tmp_path, LOCATION)[-1]
    assert "run: run-1, 1 island, 1,000 of 1,000,000,000 tokens merged; a part of 4 MB and" in line
    assert "and islands wait 100.00 s for them" in line


def test_a_run_whose_parts_come_late(examine: Examine, tmp_path: Path) -> None:
    store_decision(tmp_path, grace=0.0, delay=0, poll_seconds=1.0)
    line = examine(tmp_path, LOCATION)[-1]
    assert line.startswith("FAILED  run: run-1, ")
    remedy = r"islands change delay \d\d, or islands change grace \d, or fewer bits"
    assert re.search(f"parts of this island come late: {remedy}", line), line


def test_a_run_whose_newest_decision_is_damaged(examine: Examine, tmp_path: Path) -> None:
    store_decision(tmp_path)
    damage(tmp_path, 1)
    line = examine(tmp_path, LOCATION)[-1]
    assert line.startswith(f"FAILED  run: {tmp_path}: {run_name(1)} was altered: ")
    assert "; if no syncer has decided since, delete it: the run goes on" in line


def test_a_clock_that_is_a_day_off(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def self_test(store: Store, _: str) -> None:
        store.ahead = 86400.0

    monkeypatch.setattr(Store, "self_test", self_test)
    line = examine(tmp_path, LOCATION[:3])[-1]
    assert "FAILED  clock: -86400 s from the store's clock: set it, or start an NTP" in line


def test_rights_by_prefix(examine: Examine, seaweed: SeaweedServer, tmp_path: Path) -> None:
    lines = examine(seaweed.join_file(tmp_path / "site.toml"), ADDRESS + LOCATION)
    assert lines[3].endswith("of a server of one's own, in which one of two writers at once wins")
    assert lines[4].endswith(f"list and delete, below the names of {SITE} only")
    lines = examine(seaweed.join_file(tmp_path / "owner.toml", "owner"), ADDRESS + LOCATION)
    assert "below all names: give the login of a site rights by prefix" in lines[4]


def test_a_login_that_may_only_read(examine: Examine, bucket: Place) -> None:
    assert bucket.kind == "bucket"
    (line,) = examine("s3://readonly/run", LOCATION[:1])
    assert "no permission to create test-" in line
    assert line.endswith("grant it")


def test_a_join_file_with_a_wrong_key(
    examine: Examine, seaweed: SeaweedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = seaweed.join_file(tmp_path / "site.toml", secret_access_key="wrong")
    line = examine(path, [*ADDRESS, *LOCATION[:1]])[-1]
    assert "the credentials were refused" in line
    path = seaweed.join_file(tmp_path / "site.toml", secret_access_key="")
    assert doctor.main(["--join", str(path)]) == USER_ERROR
    assert "secret_access_key is missing" in capsys.readouterr().err
