"""Run the GPU benchmark on the CPU with small sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import core, gpu, train_step
from torchtitan_diloco.train import main


def measure_here(name: str, *how: Any) -> train_step.Result:
    return train_step.measure([name], *how)[0]


@pytest.mark.parametrize("name", gpu.PARTS)
def test_every_part_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = core.train

    def train_here(folder: Path, settings: core.Settings, NPROC: str) -> list[core.Record]:
        """Train a single worker in this process, which has already imported the package."""
        if NPROC != "1":
            return start(folder, settings, NPROC=NPROC)
        assert main(core.command_line(settings | {"run.folder": str(folder)})) == 0
        return core.read_records(folder)

    monkeypatch.setattr(train_step, "measure_alone", measure_here)
    monkeypatch.setattr(core, "train", train_here)
    try:
        checks = list(gpu.PARTS[name][0](gpu.MINIATURE, tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    assert checks
    assert [check for check in checks if check.passed is False] == []


def test_parts_that_fail_are_recorded_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (late,) = gpu.run_part("bits", 0.1, tmp_path, ["--miniature"])
    (done,) = gpu.run_part("nccl", 120.0, tmp_path, ["--miniature"])
    assert late.measured.startswith("not done in 0 s")
    assert (done.measured, done.passed) == ("all_reduce of 1 is 1", True)
    results = {"bits": [late], "nccl": [done]}
    monkeypatch.setattr(gpu, "run_part", lambda name, *_: results[name])
    words = ["--out", str(tmp_path), "--miniature", "--only", ",".join(results)]
    monkeypatch.setattr("sys.argv", ["gpu", *words])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    table = (tmp_path / "gpu.md").read_text()
    assert [table.count(word) for word in ("FAILED", "| ok", torch.__version__)] == [1, 1, 1]
