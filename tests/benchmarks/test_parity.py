import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity
from benchmarks.core import command_line
from benchmarks.parity import print_losses, run_folder, train
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
    assert parse_terms("streaming, M=4, lr 0.7, inner lr 2e-3, means in bf16, lr 0.4") == {
        "diloco.workers": "4",
        "diloco.outer_optimizer.lr": "0.4",
        "optimizer.lr": "2e-3",
        "diloco.quantization.gather_codec": "bf16",
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
    assert len(begun) > 5
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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of the runs that were started; each run appends a loss to its records."""
    folders: list[Path] = []

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "torchtitan_diloco.launch"]
        folder = Path(command[command.index("--run.folder") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 20, parity.LOSS: 1.5 + len(folders)}) + "\n")
        folders.append(folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", start)
    return folders


def test_a_finished_run_is_not_repeated(started: list[Path], tmp_path: Path) -> None:
    assert [train(tmp_path, RUN) for _ in range(3)] == [1.5] * 3
    assert train(tmp_path, RUN | {"run.seed": "1"}) == 2.5
    assert train(tmp_path, RUN | {"optimizer.beta2": "0.95"}) == 3.5
    assert len(set(started)) == len(started) == 3


def test_an_interrupted_run_resumes_if_it_has_a_checkpoint(
    started: list[Path], tmp_path: Path
) -> None:
    folder = run_folder(tmp_path, RUN)
    records = folder / "metrics.jsonl"
    (folder / "checkpoints").mkdir(parents=True)
    records.write_text('{"step": 10}\n')
    train(tmp_path, RUN)
    assert len(records.read_text().splitlines()) == 2
    assert not (folder / "checkpoints").exists(), "a finished run needs none"
    (folder / "finished.json").unlink()
    train(tmp_path, RUN)
    assert len(records.read_text().splitlines()) == 1
    assert started == [folder, folder]


def test_losses_are_compared_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {DROPS[0]: [1.0, 2.0], DROPS[3]: [1.01, 2.06]}
    print_losses(TABLES["robustness-drops"], 2000, losses)
    title, *_, control, dropped = capsys.readouterr().out.strip().splitlines()
    assert "after 2,000 steps = 1.0M tokens; n = 2 seeds" in title
    assert "control" in control
    assert [cell.strip() for cell in dropped.strip("|").split("|")] == [
        "drop probability 0.5",
        "200",
        "1.5350 (1.0100 ... 2.0600)",
        "+2.00 (+1.00 ... +3.00) %",
        "+2.1 % perplexity",
    ]
