from pathlib import Path

import pytest

from tests.report.synthetic import (
    SETTINGS,
    round_records,
    step_records,
    summary_record,
    write_run,
)


@pytest.fixture
def streaming(tmp_path: Path) -> Path:
    """A finished run of three workers."""
    records = step_records(600, workers=3) + round_records(600, workers=3) + [summary_record(600)]
    return write_run(tmp_path / "streaming", records, SETTINGS)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run with another codec and few measured rounds that is writing its last line."""
    rounds = round_records(400, workers=3, seed=1, measure_every=10)
    records = step_records(400, workers=3, seed=1) + rounds
    folder = write_run(tmp_path / "running", records, SETTINGS.replace("fp4_e3m0", "int8"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "train/loss_nats_per_tok')
    return folder


@pytest.fixture
def data_parallel(tmp_path: Path) -> Path:
    records = [
        {
            key: value
            for key, value in record.items()
            if not key.startswith("diloco/") and "exposed" not in key
        }
        for record in step_records(300, workers=3, seconds=1.3, seed=2)
    ]
    return write_run(tmp_path / "data-parallel", records, SETTINGS.replace("streaming", "none"))
