"""Run the GPU benchmark on the CPU with small sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import core, gpu, records, train_step
from benchmarks.gpu_scales import MINIATURE
from torchtitan_diloco.train import main


def measure_here(name: str, *how: Any) -> train_step.Result:
    return train_step.measure([name], *how)[0]


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("name", gpu.PARTS)
def test_every_part_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = core.train

    def train_here(folder: Path, settings: core.Settings, NPROC: str) -> list[core.Record]:
        """Train a single worker in this process, which has already imported the package."""
        if NPROC != "1" or "islands.join" in settings:
            return start(folder, settings, NPROC=NPROC)
        assert main(core.command_line(settings | {"run.folder": str(folder)})) == 0
        return core.read_records(folder)

    monkeypatch.setattr(train_step, "measure_alone", measure_here)
    monkeypatch.setattr(core, "train", train_here)
    try:
        checks = list(gpu.PARTS[name][0](MINIATURE, tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    assert checks
    assert [check for check in checks if check.passed is False] == []


def test_parts_that_fail_keep_what_they_have_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_and_fail(*_: object) -> Iterator[gpu.Check]:
        yield gpu.Check("first", "", "seen")
        raise RuntimeError("no more")

    monkeypatch.setitem(gpu.PARTS, "bits", (begin_and_fail, 60))
    with pytest.raises(RuntimeError):
        gpu.show_part("bits", MINIATURE, tmp_path)
    shown = (tmp_path / "bits.jsonl").read_text()

    def run_program(words: list[str], log: Path, _seconds: float) -> int:
        """Stand in for the process of that part."""
        (tmp_path / f"{words[-2]}.jsonl").write_text(shown)
        log.write_text("RuntimeError: no more\n")
        return 1

    monkeypatch.setattr(core, "run_program", run_program)
    first, rest = gpu.run_part("bits", 60.0, tmp_path, ["--miniature"])
    assert (first.what, first.measured, first.passed) == ("first", "seen", None)
    assert (rest.what, rest.passed) == ("the rest of the part", False)
    assert rest.measured == "exit code 1: RuntimeError: no more"


def test_the_command_writes_a_table_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part ends well, one is cut by its own limit, and the time is over before the last."""
    monkeypatch.setitem(gpu.PARTS, "bits", (gpu.bits, gpu.SHORTEST_SECONDS))
    monkeypatch.setitem(gpu.PARTS, "save", (gpu.save, 0))
    monkeypatch.setattr("sys.argv", ["gpu", "--only", "nccl,bits,save", "--miniature"])
    monkeypatch.setattr(core, "STOP_SECONDS", 5.0)
    passed = gpu.run_parts(["nccl", "bits", "save"], 200.0, tmp_path, ["--miniature"])
    lines = records.read("gpu", [tmp_path])
    by_part = {line["part"]: line for line in lines}
    assert by_part["nccl"]["measured"] == "all_reduce of 1 is 1"
    assert by_part["save"]["measured"] == "not run: the time was over"
    assert passed == all(line["passed"] is not False for line in lines)
    table = (tmp_path / "gpu.md").read_text()
    assert all(word in table for word in ("nccl", "bits", "save", torch.__version__))
    assert "== nccl" in (tmp_path / "gpu.txt").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "gpu.md",
        "gpu.txt",
        records.file_name(
            "gpu",
            records.Provenance(
                **{
                    key: lines[0][key]
                    for key in ("date", "commit", "command", "device", "versions")
                }
            ),
        ),
    }
    assert "nccl: at most 40 s" in capsys.readouterr().out
