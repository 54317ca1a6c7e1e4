"""Folders of runs, written once: tests that change one copy it."""

from pathlib import Path

import pytest

from tests.report.synthetic import SETTINGS, round_records, step_records, summary, write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs of three workers.

    `streaming` is finished, `running` has another codec and few measured rounds and is writing its
    last line, and `data-parallel` has no outer loop.
    """
    folder = tmp_path_factory.mktemp("runs")
    steps, rounds = step_records(600, workers=3), round_records(600, workers=3)
    write_run(folder / "streaming", [*steps, *rounds, summary(600)], SETTINGS)
    steps = step_records(400, workers=3, seed=1)
    rounds = round_records(400, workers=3, seed=1, measure_every=10)
    write_run(folder / "running", [*steps, *rounds], SETTINGS.replace("fp4_e3m0", "int8"))
    with (folder / "running/metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "train/loss_nats_per_tok')
    steps = step_records(300, workers=3, seconds=1.3, seed=2)
    for record in steps:
        for key in [key for key in record if "diloco/" in key or "exposed" in key]:
            del record[key]
    write_run(folder / "data-parallel", steps, SETTINGS.replace("streaming", "none"))
    return folder
