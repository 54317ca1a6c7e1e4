"""The notebook of two workers: its cells run from top to bottom, and plot what the runs have
recorded. That of two places is run by `test_two_places.py`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.programs import run_program

EXAMPLES = REPOSITORY / "examples"
TWO_WORKERS = EXAMPLES / "two_workers.ipynb"
SHORTER = ("STEPS = 120", "STEPS = 60")


def read_cells(path: Path) -> list[dict[str, Any]]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells: list[dict[str, Any]] = notebook["cells"]
    return cells


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    cells = read_cells(path)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_its_cells_run_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Jupyter runs them, in one namespace, with runs of half the length in forks."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        module, *words = command[2:]
        return run_program(tmp_path / "console.txt", words, main=module)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # read again
    code = [
        "".join(cell["source"]) for cell in read_cells(TWO_WORKERS) if cell["cell_type"] == "code"
    ]
    assert SHORTER[0] in code[0]
    namespace: dict[str, Any] = {}
    backend = mpl.get_backend()
    mpl.use("Agg")
    plt.close("all")
    try:
        for number, text in enumerate(code):
            exec(compile(text.replace(*SHORTER), f"cell {number}", "exec"), namespace)
        fragments, sent, compared = (plt.figure(one).axes[0] for one in plt.get_fignums())
    finally:
        plt.close("all")
        mpl.use(backend)

    first = namespace["runs"]["H = 30, 4 bits"]
    rounds = [one for records in first for one in records if one.get("kind") == "round"]
    assert len(fragments.collections) == len(rounds) > 0
    own, parallel = (np.asarray(line.get_ydata()) for line in sent.get_lines())
    assert 0 < own[-1] < parallel[-1] / 50
    assert len(compared.collections) == len(namespace["runs"]) == 4
    megabytes = {
        name: namespace["megabytes"](records)[1][-1]
        for name, (records, _) in namespace["runs"].items()
    }
    most_first = ["H = 30, 32 bits", "H = 10, 4 bits", "H = 30, 4 bits", "H = 60, 4 bits"]
    assert sorted(megabytes, key=lambda name: -megabytes[name]) == most_first
    assert capsys.readouterr().out.count("MB sent by a worker") == 4
    assert {path.parent for path in tmp_path.rglob("*")} >= {namespace["FOLDER"]}
