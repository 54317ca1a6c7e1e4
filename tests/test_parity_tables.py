"""The benchmarks of the loss: their tables are runs that start, at equal tokens, and none of them is trained twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity
from benchmarks.parity import command_line, print_losses, run_folder, train
from benchmarks.parity_tables import TABLES, Settings, Table
from torchtitan_diloco.config import Config, from_command_line

RUN = {"training.steps": "20", "run.seed": "0"}


def resolved(settings: Settings) -> Config:
    config = from_command_line(command_line(settings))
    assert config is not None
    return config


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_runs_of_a_table_are_valid_and_take_the_same_tokens_a_step(table: Table) -> None:
    for name, settings in table.runs.items():
        assert table.control_of(name) in table.runs
        config = resolved(settings | RUN)
        sequences = config.diloco.workers * config.training.batch_size
        assert sequences * config.training.sequence_length == table.tokens_per_step, name
    assert set(table.controls) | set(table.paper) <= set(table.runs)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_run_of_a_table_is_another_one_by_another_name(table: Table) -> None:
    runs = {
        (run_folder(Path(), settings | RUN), table.begins.get(name))
        for name, settings in table.runs.items()
    }
    assert len(runs) == len(table.runs)


@pytest.mark.parametrize("share", [1, 7, 10])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_control_keeps_the_checkpoints_that_others_begin_from(table: Table, share: int) -> None:
    table = table.of_length(table.steps // share)
    for name, step in table.begins.items():
        every = int(table.runs[table.control_of(name)]["checkpoint.keep_every"])
        assert step % every == 0
        assert 0 < step < table.steps


def test_a_short_table_is_the_long_one_in_miniature() -> None:
    table = TABLES["parity"]
    short = table.of_length(table.steps // 10)
    for name, settings in table.runs.items():
        changed = {key for key, value in settings.items() if short.runs[name][key] != value}
        assert changed <= {"lr_schedule.warmup_steps", "checkpoint.every", "checkpoint.keep_every"}
        assert int(short.runs[name]["lr_schedule.warmup_steps"]) * 10 == int(
            settings["lr_schedule.warmup_steps"]
        )
    assert table.of_length(table.steps) == table


def test_tables_share_their_runs() -> None:
    same = [
        ("robustness-drops", "0 % dropped"),
        ("sync-every", "streaming, H=10"),
        ("workers", "streaming, M=2"),
    ]
    assert len({run_folder(Path(), TABLES[table].runs[name] | RUN) for table, name in same}) == 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that were started; each writes a loss, after the records that are there already."""
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


def test_a_finished_run_is_kept_and_other_settings_are_another_run(
    started: list[Path], tmp_path: Path
) -> None:
    assert [train(tmp_path, RUN) for _ in range(3)] == [1.5] * 3
    assert train(tmp_path, RUN | {"run.seed": "1"}) == 2.5
    assert train(tmp_path, RUN | {"optimizer.beta2": "0.95"}) == 3.5
    assert len(set(started)) == len(started) == 3


def test_an_interrupted_run_goes_on_from_its_checkpoint_or_starts_anew(
    started: list[Path], tmp_path: Path
) -> None:
    folder = run_folder(tmp_path, RUN)
    records = folder / "metrics.jsonl"
    (folder / "checkpoints").mkdir(parents=True)
    records.write_text('{"step": 10}\n')
    train(tmp_path, RUN)
    assert len(records.read_text().splitlines()) == 2
    assert not (folder / "checkpoints").exists(), "nobody needs them any more"
    (folder / "finished.json").unlink()
    train(tmp_path, RUN)
    assert len(records.read_text().splitlines()) == 1
    assert started == [folder, folder]


def test_losses_are_compared_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    table = TABLES["robustness-drops"]
    print_losses(table, 2000, {"0 % dropped": [1.0, 2.0], "50 % dropped": [1.01, 2.06]})
    title, *_, control, dropped = capsys.readouterr().out.strip().splitlines()
    assert title == (
        "validation loss of the shared model after 2,000 steps = 1.0M tokens; n = 2 seeds; mean (least ... greatest)"
    )
    assert "control" in control
    cells = [cell.strip() for cell in dropped.strip("|").split("|")]
    assert cells == [
        "50 % dropped",
        "200",
        "1.5350 (1.0100 ... 2.0600)",
        "+2.00 (+1.00 ... +3.00) %",
        "+2.1 % perplexity",
    ]
