"""A mixture goes on exactly after kill -9, with any number of workers."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.components.test_resume import chosen, last, run
from tests.processes import DIED, ProcessPool
from tests.waiting import wait_until
from torchtitan_diloco.components.checkpoint_folder import complete_checkpoints, step_of
from torchtitan_diloco.components.telemetry import StepResult
from torchtitan_diloco.data.batch import Batch
from torchtitan_diloco.trainer import Trainer

STEPS = 12
BATCH = 12
SAVED = 8
BEGINS = STEPS // 2 * BATCH
"""Samples before the second phase, whose turns repeat after 7 samples: the save is within them."""
STREAMING = {
    "diloco.method": "streaming",
    "diloco.sync_every": 4,
    "training.steps": STEPS,
    "checkpoint.at_end": "false",
    "validation.every": 0,
}


def train_and_list(wanted: dict[str, str], rows: Path, dies_before: int = 0) -> None:
    """Train, and append to a file what each rank reads in each step. Die before a step by SIGKILL,
    when the checkpoint is there."""
    plain = Trainer.train_step

    def listed(trainer: Trainer, batches: Iterator[Batch]) -> Iterator[Batch]:
        name = f"{trainer.step:02d}-{trainer.world.rank}"
        for number, batch in enumerate(batches):
            content = [bytes(row).decode() for row in batch[0].tolist()]
            (rows / f"{name}-{number}.json").write_text(json.dumps(content))
            yield batch

    def train_step(trainer: Trainer, batches: Iterator[Batch]) -> StepResult:
        if trainer.step + 1 == dies_before:
            folder = Path(wanted["run.folder"])
            folders = [folder / f"worker-{worker}" for worker in range(2)]
            # Neither dies before the other one has ended its step, which needs both.
            (folder / f"arrived-{trainer.world.rank}").touch()
            arrived = [folder / f"arrived-{worker}" for worker in range(2)]
            wait_until(
                lambda: all(map(Path.exists, arrived)) and all(map(is_saved, folders)),
                "the other one and the checkpoint",
            )
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(trainer, listed(trainer, batches))

    with patch.object(Trainer, "train_step", train_step):
        run(wanted)


def is_saved(folder: Path) -> bool:
    return [step_of(path) for path in complete_checkpoints(folder)][-1:] == [SAVED]


def read(rows: Path) -> list[list[str]]:
    """Return the rows of each step in the order of the stream: rank after rank."""
    steps: list[list[str]] = [[] for _ in range(STEPS)]
    for path in sorted(rows.iterdir()):
        steps[int(path.name[:2]) - 1] += json.loads(path.read_text())
    return steps


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, str]:
    """The settings of a run with 3 to 1 samples of two texts, and then 5 to 2. Each sequence is
    unique, and the second text is read more than once."""
    for name, lines in (("a", 2000), ("b", 100)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n:06d}" for n in range(lines)))
    a = tmp_path / "a.txt"
    b = tmp_path / "b.txt"
    return chosen(a, "run", **STREAMING) | {
        "data.corpus": "",
        "data.mixture": f"{a}=3 {b}=1",
        "data.phases": f'[{{start = 0.5, mixture = {{"{a}" = 5, "{b}" = 2}}}}]',
    }


def check_shares(steps: list[list[str]]) -> None:
    """After each sample, both texts have had their share up to less than a sample."""
    of_b = [row.count("b") > 0 for step in steps for row in step]
    assert len(of_b) == STEPS * BATCH
    for number in range(len(of_b) + 1):
        first = min(number, BEGINS)
        second = max(number - BEGINS, 0)
        assert abs(sum(of_b[:number]) - first / 4 - second * 2 / 7) < 1


def test_a_mixture_goes_on_exactly_after_kill_with_other_numbers_of_workers(
    mixed: dict[str, str], tmp_path: Path, processes: ProcessPool
) -> None:
    places = {name: tmp_path / "rows" / name for name in ("whole", "killed", "four", "one")}
    for place in places.values():
        place.mkdir(parents=True)
    two = mixed | {"diloco.workers": "2"}
    processes.run(train_and_list, 2, two | {"run.folder": str(tmp_path / "whole")}, places["whole"])
    whole = read(places["whole"])
    check_shares(whole)
    for name, sequences in (("a", 2000 * 7 // 32), ("b", 100 * 7 // 32)):
        rows = [row for step in whole for row in step if name in row][:sequences]
        assert len(set(rows)) == len(rows), "none twice in an epoch"

    killed = processes.run(train_and_list, 2, two, places["killed"], SAVED + 3, dying=range(2))
    assert killed == [DIED] * 2
    assert step_of(last(tmp_path / "run")) == SAVED
    assert read(places["killed"])[: SAVED + 2] == whole[: SAVED + 2]
    for name, workers in (("four", 4), ("one", 1)):
        folder = shutil.copytree(tmp_path / "run", tmp_path / name)
        other = mixed | {"run.folder": str(folder), "diloco.workers": str(workers)}
        processes.run(train_and_list, workers, other, places[name])
        assert read(places[name]) == [[]] * SAVED + whole[SAVED:], f"with {workers} workers"
