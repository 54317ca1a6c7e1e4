import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity_runs
from benchmarks.core import Settings, command_line
from benchmarks.parity import print_losses
from benchmarks.parity_runs import run_folder, train_all
from benchmarks.parity_tables import DROPS, SCALED, TABLES, Table, parse_terms
from torchtitan_diloco.config import from_command_line

RUN = {"training.steps": "20", "run.seed": "0"}
all_tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@all_tables
def test_runs_are_valid_distinct_and_of_equal_tokens(table: Table) -> None:
    folders = set()
    for name in table.runs:
        run = table.settings(name, table.steps)
        config = from_command_line(command_line(run))
        assert config is not None
        sequences = config.diloco.workers * config.training.batch_size
        assert sequences * config.training.sequence_length == table.tokens_per_step, name
        assert table.control_of(name) in table.runs
        folders.add((run_folder(Path(), run), table.begin(name, table.steps)))
    assert len(folders) == len(table.runs), "no run has two names"
    assert set(table.controls) | set(table.paper) <= set(table.runs)


def test_names_are_settings() -> None:
    assert parse_terms("streaming, M=4, lr 0.7, inner lr 2e-3, blocks of 32, lr 0.4") == {
        "diloco.workers": "4",
        "diloco.outer_optimizer.lr": "0.4",
        "optimizer.lr": "2e-3",
        "diloco.quantization.block_size": "32",
    }
    later = "after 1000 steps of data parallelism"
    table = TABLES["parity"]
    assert table.begin(f"streaming, M=2, H=30, {later}", table.steps // 10) == 100
    assert parse_terms(later) == {}
    with pytest.raises(StopIteration):
        parse_terms("alhpa 0.5")


@pytest.mark.parametrize("share", [1, 7, 10])
def test_controls_keep_the_checkpoints_that_runs_begin_from(share: int) -> None:
    begun = [(table, name) for table in TABLES.values() for name in table.runs]
    begun = [(table, name) for table, name in begun if table.begin(name, table.steps)]
    assert begun
    for table, name in begun:
        steps = table.steps // share
        control = table.settings(table.control_of(name), steps)
        assert 0 < table.begin(name, steps) < steps
        assert table.begin(name, steps) % int(control["checkpoint.keep_every"]) == 0


def test_a_short_run_is_the_long_one_in_miniature() -> None:
    table = TABLES["parity"]
    for name in table.runs:
        long, short = table.settings(name, table.steps), table.settings(name, table.steps // 10)
        changed = {key for key, value in long.items() if short[key] != value}
        assert changed <= {"training.steps", *SCALED}
        assert 10 * int(short["lr_schedule.warmup_steps"]) == int(long["lr_schedule.warmup_steps"])


def test_tables_share_their_runs() -> None:
    same = {
        "robustness-drops": DROPS[0],
        "sync-every": "streaming, H=10",
        "workers": "streaming, M=2",
    }
    folders = {run_folder(Path(), TABLES[table].settings(same[table], 20)) for table in same}
    assert len(folders) == 1


class Trainer:
    """Replaces a training process. Appends a loss to its records unless it is interrupted."""

    interrupted = False

    def __init__(self) -> None:
        self.started: list[Path] = []

    def __call__(self, command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert command[:3] == [sys.executable, "-m", "torchtitan_diloco.launch"]
        folder = Path(command[command.index("--run.folder") + 1])
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        record = {"step": 10} if self.interrupted else {parity_runs.LOSS: 1.5 + len(self.started)}
        (folder / "worker-0").mkdir(exist_ok=True)
        with (folder / "worker-0/metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.started.append(folder)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(subprocess, "run", trainer)
    return trainer


def test_a_finished_run_is_not_repeated(trainer: Trainer, tmp_path: Path) -> None:
    other = RUN | {"optimizer.beta2": "0.95"}
    runs = [("", run) for run in (RUN, RUN | {"run.seed": "1"}, other)]
    assert [train_all(tmp_path, runs) for _ in range(2)] == [[1.5, 2.5, 3.5]] * 2
    assert len(set(trainer.started)) == len(trainer.started) == 3


@pytest.mark.parametrize("can_be_resumed", [True, False])
def test_an_interrupted_run_is_continued(
    trainer: Trainer, tmp_path: Path, can_be_resumed: bool
) -> None:
    trainer.interrupted = True
    with pytest.raises(SystemExit, match="the same command continues it"):
        train_all(tmp_path, [("", RUN)])
    trainer.interrupted = False
    (folder,) = trainer.started
    if not can_be_resumed:
        (folder / "checkpoints").rmdir()
    assert train_all(tmp_path, [("", RUN)]) == [2.5]
    assert trainer.started == [folder, folder]
    assert len((folder / "worker-0/metrics.jsonl").read_text().splitlines()) == 1 + can_be_resumed
    assert not (folder / "checkpoints").exists(), "a finished run needs none"


def test_as_many_processes_train_at_once_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, most, lock = 0, 0, threading.Lock()

    def train(_: Path, settings: Settings) -> dict[str, float]:
        nonlocal training, most
        with lock:
            training += int(settings["diloco.workers"])
            most = max(most, training)
        time.sleep(0.01)
        with lock:
            training -= int(settings["diloco.workers"])
        return {"loss": float(settings["diloco.workers"])}

    monkeypatch.setattr(parity_runs, "run", train)
    workers = [1, 2, 4, 8, 2, 1, 1, 1, 4]
    runs = [
        ("", RUN | {"run.seed": str(seed), "diloco.workers": str(count)})
        for seed, count in enumerate(workers)
    ]
    assert train_all(tmp_path, runs, jobs=8) == workers
    assert most == 8


def test_losses_are_compared_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {DROPS[0]: {0: 1.0, 1: 2.0, 2: 3.0}, DROPS[1]: {}, DROPS[3]: {0: 1.01, 1: 2.06}}
    print_losses(TABLES["robustness-drops"], 2000, losses)
    title, *_, control, dropped = capsys.readouterr().out.strip().splitlines()
    assert "after 2,000 steps = 1.0M tokens" in title
    assert "control" in control
    assert [cell.strip() for cell in dropped.strip("|").split("|")] == [
        "drop probability 0.5",
        "1/39",
        "200",
        "2",
        "1.5350 (1.0100 ... 2.0600)",
        "+2.00 (+1.00 ... +3.00) %",
        "",
        "+2.1 % perplexity",
    ]


def test_runs_are_also_compared_with_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    first, control, run = "data parallel", "data parallel, Muon", "streaming, Muon, M=2, H=10"
    print_losses(TABLES["bytes"], 3000, {first: {0: 2.0}, control: {0: 1.0}, run: {0: 1.5}})
    row = capsys.readouterr().out.strip().splitlines()[-1].strip("|").split("|")
    assert [cell.split("(")[0].strip() for cell in row[5:7]] == ["+50.00", "-25.00"]
