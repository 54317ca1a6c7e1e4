"""A crashed run is started again from its latest checkpoint."""

import os
import signal
from pathlib import Path

import pytest

from tests.launch.running import launcher, two_nodes
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.restarts import NotRestartedError, Restarts


def save(run: Path, step: int) -> None:
    folder = run / f"checkpoints/step-{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def restarts(folder: Path, **settings: object) -> Restarts:
    note = folder / "note"
    note.write_text(str(folder / "run"))
    return Restarts(2, Checkpoint(**settings), note)  # type: ignore[arg-type]


def test_a_new_checkpoint_begins_the_count_again(tmp_path: Path) -> None:
    decide = restarts(tmp_path)
    arguments = ["--run.folder", str(tmp_path / "run"), "--checkpoint.resume", "auto"]
    pauses = []
    for step in (0, 0, 7, 7, 9):
        if step and not (tmp_path / f"run/checkpoints/step-{step}").exists():
            save(tmp_path / "run", step)
        assert decide.after_crash("it crashed") == arguments
        origin = f"the checkpoint of step {step}" if step else "the beginning"
        assert decide.announcement.startswith(f"starting again from {origin} in ")
        pauses.append(decide.pause_seconds)
    assert pauses == [5, 10, 5, 10, 5]
    decide.after_crash("it crashed")
    reason = "2 restarts from the checkpoint of step 9 brought no new checkpoint"
    with pytest.raises(NotRestartedError, match=reason):
        decide.after_crash("it crashed")
    assert decide.summary.startswith("started again 6 times, after: it crashed; it crashed;")


def test_runs_without_a_checkpoint_that_are_not_started_again(tmp_path: Path) -> None:
    for settings, reason in (
        ({"every_minutes": 0}, "saves no checkpoints while it trains"),
        ({"resume": "never"}, "had saved no checkpoint"),
        ({"resume": "somewhere"}, "had saved no checkpoint"),
    ):
        with pytest.raises(NotRestartedError, match=reason):
            restarts(tmp_path, **settings).after_crash("it crashed")
    save(tmp_path / "run", 3)
    assert restarts(tmp_path, resume="somewhere").after_crash("it crashed")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_crashed_run_goes_on(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "run"
    does = f"crash:{folder}:{-signal.SIGKILL}:0-100"
    with launcher(tmp_path / "console", does, workers=workers) as run:
        assert run.wait() == 0, run.output
    last, resumed = workers - 1, f"'--run.folder', '{folder}', '--checkpoint.resume', 'auto'"
    assert run.output.count(f"started rank={last}") == 3
    assert run.output.count(resumed) == 2 * workers
    killed = f"rank {last} was killed by SIGKILL (often by the system, when memory runs out)"
    assert run.output.count(f"error: {killed}\n") == 2
    assert "starting again from the beginning in 0.1 s (restart 1 of 3 without" in run.output
    assert "starting again from the checkpoint of step 100 in 0.1 s (restart 1 of 3" in run.output
    assert run.output.endswith(f"\nstarted again 2 times, after: {killed}; {killed}\n")
    run.wait_until_ranks_are_gone()


@pytest.mark.parametrize(
    ("code", "limit", "ending"),
    [
        (3, 1, "\nstarted again once, after: rank 0 failed with exit code 3\n"),
        (2, 3, ""),  # a mistake of the user, which the rank has named
    ],
)
def test_runs_that_end(tmp_path: Path, code: int, limit: int, ending: str) -> None:
    does = f"crash:{tmp_path / 'run'}:{code}:5-5-5"
    with launcher(tmp_path / "console", does, "--run.restarts", str(limit), workers=1) as run:
        assert run.wait() == code
    assert run.output.count("started rank=0") == 1 + bool(ending)
    why = "because a restart from the checkpoint of step 5 brought no new checkpoint\n"
    assert (f"exit code 3; not started again, {why}" in run.output) == bool(ending)
    assert ("again" in run.output, run.output.endswith(ending)) == (bool(ending), True)


def test_a_signal_ends_the_pause_before_a_restart(tmp_path: Path) -> None:
    does = f"crash:{tmp_path / 'run'}:3:5-5-5"
    variables = {"PAUSE_SECONDS": "60"}
    with launcher(tmp_path / "console", does, workers=1, environment=variables) as run:
        run.wait_for("starting again")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
    assert run.output.count("started rank=0") == 1


def test_two_nodes_meet_again_after_a_crash(tmp_path: Path) -> None:
    common = two_nodes()
    does = f"crash:{tmp_path / 'run'}:7:100,meet"
    with (
        launcher(tmp_path / "1", does, environment={**common, "NODE_RANK": "1"}) as one,
        launcher(tmp_path / "0", does, environment={**common, "NODE_RANK": "0"}) as zero,
    ):
        assert (zero.wait(), one.wait()) == (0, 0), zero.output + one.output
    for run in (zero, one):
        assert run.output.count("of 2 sum=1") == 1
        assert "started again once" in run.output.splitlines()[-1]
