"""Run the GPU benchmark on the CPU with small sizes."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, train_step
from benchmarks.gpu_parts import MINIATURE, PARTS
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.train import main


def measure_here(name: str, words: list[str], rounds: int, steps: int) -> train_step.Result:
    config = from_command_line([*words, *train_step.ONE_WORKER])
    assert config is not None
    return train_step.measure([name], config, rounds, steps)[0]


def run_here(command: list[str], env: dict[str, str], **more: Any) -> None:
    """Train a single worker in this process, which has already imported the package."""
    if env["NPROC"] == "1":
        assert main(command[3:]) == 0
    else:
        subprocess.Popen(command, env=env, cwd=more["cwd"]).wait()


@pytest.mark.parametrize("name", PARTS)
def test_every_part_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "measure_alone", measure_here)
    monkeypatch.setattr(subprocess, "run", run_here)
    try:
        checks = PARTS[name][0](MINIATURE, tmp_path)
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
