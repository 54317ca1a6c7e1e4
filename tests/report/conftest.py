"""Folders of runs, written once: tests that change one copy it."""

from pathlib import Path

import pytest

from tests.report.synthetic import (
    SETTINGS,
    phase_records,
    round_records,
    step_records,
    with_corpora,
    write_run,
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs of three workers.

    `streaming` is finished and has read a mixture in three phases. `running` has another codec and
    few measured rounds and is writing its last line. `data-parallel` has no outer loop.
    """
    folder = tmp_path_factory.mktemp("runs")
    rounds = round_records(600, workers=3)
    steps = with_corpora(step_records(600))
    phases = phase_records([420, 480, 594], steps=600)  # two names would meet, one is at the edge
    write_run(folder / "streaming", steps, rounds, SETTINGS, phases=phases)
    rounds = round_records(400, workers=3, seed=1, measure_every=10)
    settings = SETTINGS.replace("fp4_e3m0", "int8")
    write_run(folder / "running", step_records(400, seed=1), rounds, settings)
    with (folder / "running/worker-0/metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "loss/tr')
    steps = step_records(300, seconds=1.3, seed=2)
    for record in steps:
        for key in [key for key in record if "sync/" in key or "ex" in key or "sent" in key]:
            del record[key]
    none = SETTINGS.replace("streaming", "none")
    write_run(folder / "data-parallel", steps, ((), (), ()), none)
    return folder
