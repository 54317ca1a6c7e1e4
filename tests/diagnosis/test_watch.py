"""Verdicts of real runs, and stacks of a hang."""

import itertools
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest

from tests.diloco.toy import alone, config
from tests.processes import ProcessPool
from tests.test_trainer import join, records, settings
from tests.waiting import wait_until
from torchtitan_diloco.base.hardware import GLOO_INTERFACE
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.config import load_config
from torchtitan_diloco.diagnosis import verdicts, watch
from torchtitan_diloco.diagnosis.kinds import WORDS
from torchtitan_diloco.diagnosis.watch import Stacks
from torchtitan_diloco.diloco import Link, liveness, reports
from torchtitan_diloco.diloco.flags import NOT_FINITE
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.diloco.vitals import Action, Report, VerdictKind, Vitals
from torchtitan_diloco.islands import IslandFencedError
from torchtitan_diloco.launching import rank as rank_module
from torchtitan_diloco.trainer import Trainer


def _train(chosen: Mapping[str, str]) -> Path:
    """Train while worker 1 says that it is slow for 30 steps, and later pauses."""
    config = load_config("debug", dict(chosen))
    world = join(config)
    trainer = Trainer(config, world)
    step = trainer.train_step

    def vitals(_: Telemetry) -> Vitals:
        is_slow = world.worker == 1 and 20 <= trainer.step < 50
        return Vitals(compute=0.1 if is_slow else 0.02)

    def train_step(batches: Any) -> Any:
        time.sleep(3.0 if (world.worker, trainer.step) == (1, 70) else 0.0)
        return step(batches)

    with (
        patch.object(liveness, "LATE_SECONDS", 1.0),
        patch.object(reports, "LATE_SECONDS", 1.0),
        patch.dict(verdicts.SETTLED, clear=True),  # rounds are short
        patch.object(Telemetry, "vitals", vitals),
        patch.object(trainer, "train_step", train_step),
    ):
        return trainer.run()


def test_a_worker_that_is_slow_and_one_that_pauses_are_recorded_until_they_are_well(
    text: Path, processes: ProcessPool
) -> None:
    changes = {"diloco.method": "streaming", "diloco.workers": 2, "training.steps": 100}
    changes |= {"diloco.sync_every": 4, "training.global_batch_size": 12, "validation.every": 0}
    folder, _ = processes.run(_train, 2, settings(text, **changes))
    for worker in range(2):
        found = [one for one in records(folder, "verdict", worker) if one["culprit"] == "worker 1"]
        begun, over = (one for one in found if one["what"] == "slow compute")
        assert (begun["over"], over["over"]) == (False, True)
        assert 20 <= begun["since"] <= begun["step"] < 50 < over["step"]
        assert begun["evidence"] == "0.1 s per step (the other worker: 0.02 s)"
        late = [
            one for one in found if one["what"] == VerdictKind.HUNG and 70 <= one["since"] <= 78
        ]
        assert worker or [one["over"] for one in late] == [False, True]
        expected = (
            r"its header has not arrived for \d s, "
            r"and it answers \(its last step, \d+, was \d s ago\)"
        )
        assert worker or re.fullmatch(expected, late[0]["evidence"])


def watching(
    folder: Path | None = None,
    *,
    is_first: bool = True,
    link: Link | None = None,
    has_mirror: bool = False,
) -> tuple[StreamingDiLoCo, watch.Diagnosis, mock.Mock]:
    """Return a loop in which each step ends a round, what watches it, and its telemetry."""
    outer, _, _ = alone(replace(config(), link=link or Link(interface="eth1")))
    telemetry = mock.Mock(applied=[1], vitals=lambda: Vitals(compute=0.25))
    world = mock.Mock(rank_in_worker=0, is_first=is_first)
    folder = folder or Path("none")
    diagnosis = watch.Diagnosis(outer, world, telemetry, folder, has_mirror=has_mirror)
    return outer, diagnosis, telemetry


def test_an_error_says_who_was_slow(capsys: pytest.CaptureFixture[str]) -> None:
    """So the log of a restart does, too."""
    outer, diagnosis, _ = watching()
    said = {"worker 0": Report(Vitals(0.25)), "worker 1": Report(flags=NOT_FINITE)}
    with patch.object(outer.peers.reports, "latest", lambda: said):
        for step in range(3):
            diagnosis.after_step(step)
    stuck = Report(absent=VerdictKind.STUCK, evidence="of its payload nothing for 12 s")
    diagnosis.missing({"worker 2": stuck})
    with pytest.raises(WorkerLostError) as error, diagnosis:
        raise WorkerLostError([1], "connection closed")
    rank_module._print_error(error.value)
    printed = capsys.readouterr().err
    assert "worker 2 has hung in communication since step 0: of its payload nothing" in printed
    lost = "worker 1 left or did not answer in time (connection closed)"
    assert f"{lost}; worker 1 has sent wrong numbers since step 0" in printed


def test_an_error_that_names_its_cause_has_no_hint_about_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(watch, "time", mock.Mock(monotonic=lambda: next(clock), time=time.time))
    outer, diagnosis, _ = watching()
    busy = {"a": Report(Vitals(0.25, queued=0.2)), "b": Report(Vitals(0.25), flags=NOT_FINITE)}
    with patch.object(outer.peers.reports, "latest", lambda: busy):
        for step in range(60):
            diagnosis.after_step(step)
    with pytest.raises(WorkerLostError) as lost, diagnosis:
        raise WorkerLostError([1], "connection closed")
    with pytest.raises(IslandFencedError) as fenced, diagnosis:
        raise IslandFencedError("island a ends: it is evicted")
    assert any("short of CPU cores" in note for note in lost.value.__notes__)
    (note,) = fenced.value.__notes__
    assert note.startswith("b has sent wrong numbers")


@pytest.mark.parametrize(
    "absent", [VerdictKind.STOPPED, VerdictKind.HUNG, VerdictKind.STUCK, VerdictKind.NO_ROOM]
)
def test_other_workers_name_the_first_one_if_it_is_missing(
    absent: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, diagnosis, _ = watching(is_first=False)
    diagnosis.missing({"worker 0": Report(absent=absent, evidence="nothing came for 12 s")})
    has = WORDS[VerdictKind(absent)].has
    assert caplog.messages[0].startswith(f"worker 0 has {has} since step 0: nothing came for 12 s")


def test_actions_are_recorded_like_verdicts() -> None:
    outer, diagnosis, telemetry = watching()
    actions = [[Action("b", "not waited for", "late")], [Action("b", "not waited for", "", True)]]
    with patch.object(outer.peers.reports, "take_actions", lambda: actions.pop(0)):
        diagnosis.after_step(4)
        diagnosis.after_step(9)
    first, last = (call.args[0] for call in telemetry.files.write.call_args_list)
    assert (first.step, first.culprit, first.what, first.evidence, first.over) == (
        (4, "b", "not waited for", "late", False)
    )
    assert (last.step, last.culprit, last.what, last.over) == (9, "b", "not waited for", True)


@pytest.mark.parametrize(("transfer", "fits"), [(1.9, True), (4.0, False)])
def test_transfers_that_take_longer_than_a_cycle_are_named_once(
    transfer: float, fits: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("training.steps = 9\ndiloco.sync_every = 8\n")
    outer, diagnosis, _ = watching(tmp_path)
    said = {"worker 0": Report(Vitals(0.25, transfers=(0.0, transfer)))}
    with patch.object(outer.peers.reports, "latest", lambda: said):
        for step in range(3):
            diagnosis.after_step(step)
    assert outer.config.sync_every == 8  # of 2 s
    texts = [one for one in caplog.messages if "training has to wait" in one]
    assert len(texts) == (not fits)
    written = tmp_path / "settings-that-fit.toml"
    assert written.exists() != fits
    if not fits:
        assert texts[0] == (
            "worker 0 needs 4 s to exchange all fragments once, but has only 2 s of training to "
            "hide this behind, so training has to wait. These settings fit: "
            "--diloco.quantization.codec int8"
        )
        assert caplog.messages[-1].endswith(f"start again with --config {written}")
        found = load_config(str(written))
        assert (found.diloco.quantization.codec, found.diloco.sync_every) == ("int8", 8)
        assert found.run.folder == str(tmp_path), "the same run goes on"
    outer.loop.config = replace(outer.config, sync_every=4)  # islands change
    with patch.object(outer.peers.reports, "latest", lambda: said):
        for step in range(3, 20):
            diagnosis.after_step(step)
    texts = [one for one in caplog.messages if "training has to wait" in one]
    assert len(texts) == 1 + (not fits), "said again, once"


def test_the_mirror_is_to_be_given_again_as_the_settings_leave_it_out(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    outer, diagnosis, _ = watching(tmp_path, has_mirror=True)
    said = {"worker 0": Report(Vitals(0.25, transfers=(0.0, 4.0)))}
    with patch.object(outer.peers.reports, "latest", lambda: said):
        for step in range(3):
            diagnosis.after_step(step)
    written = tmp_path / "settings-that-fit.toml"
    assert caplog.messages[-1].endswith(f"--config {written} and your --checkpoint.mirror")


def test_on_a_busy_machine_the_cores_are_named_once_and_no_settings_are_proposed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it is calm, but the transfers still take too long, they are."""
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(watch, "time", mock.Mock(monotonic=lambda: next(clock), time=time.time))
    (tmp_path / "config.toml").write_text("training.steps = 9\n")
    outer, diagnosis, telemetry = watching(tmp_path)
    transfers = (0.0, 4.0)
    busy = {"worker 0": Report(Vitals(0.25, queued=0.2, transfers=transfers))}
    with patch.object(outer.peers.reports, "latest", lambda: busy):
        for step in range(60):
            diagnosis.after_step(step)
    (line,) = caplog.messages
    assert line.startswith("worker 0 has been short of CPU cores since step 0: 0.2 of 0.25 s per")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert [call.args[0].what for call in telemetry.files.write.call_args_list] == [
        VerdictKind.LOAD
    ]
    calm = {"worker 0": Report(Vitals(0.25, queued=0.01, transfers=transfers))}
    with patch.object(outer.peers.reports, "latest", lambda: calm):
        for step in range(60, 120):
            diagnosis.after_step(step)
    assert "training has to wait" in caplog.messages[1]
    assert (tmp_path / "settings-that-fit.toml").exists()


@pytest.mark.parametrize(
    ("given", "chosen", "has_links"), [("lo", "", False), ("lo", "eth1", True), ("", "", True)]
)
def test_links_are_judged_unless_workers_meet_on_the_loopback(
    given: str,
    chosen: str,
    has_links: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, given)
    monkeypatch.setattr(verdicts, "SETTLED", {})
    outer, diagnosis, _ = watching(link=Link(interface=chosen))
    both = [(0.0, 0.5), (4.0, 0.0)]
    said = {f"worker {one}": Report(Vitals(0.25, transfers=both[one])) for one in range(2)}
    with patch.object(outer.peers.reports, "latest", lambda: said):
        for step in range(8):
            diagnosis.after_step(step)
    assert any("the link worker 0 -> worker 1 has been slow" in one for one in caplog.messages) == (
        has_links
    )
    assert any("training has to wait" in one for one in caplog.messages) == has_links


def test_a_step_that_hangs_writes_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "STACKS_SECONDS", 0.05)
    with Stacks(tmp_path, 0) as stacks:
        stacks.expect_step(usual=0.001)
        wait_until(lambda: stacks.path.stat().st_size > 0, "the stacks")
        stacks.expect_nothing()
        assert "test_a_step_that_hangs_writes_its_stacks" in stacks.path.read_text()
        assert str(stacks.path) in caplog.text
        size = stacks.path.stat().st_size
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: stacks.path.stat().st_size > size, "the stacks on a signal")
        stacks.path.unlink()
        stacks.expect_nothing()
    with Stacks(tmp_path / "other", 0) as stacks:
        stacks.expect_step(usual=100.0)
        stacks.expect_nothing()
    assert not stacks.path.exists()
