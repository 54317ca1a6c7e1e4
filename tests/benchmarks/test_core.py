import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import (
    activations,
    backlog,
    core,
    diagnosis,
    downstream,
    gpu,
    islands,
    parity,
    scale,
    slow_link,
    sync,
    train_step,
)


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (slow_link.main, "--workers 1", "as one sends nothing"),
        (slow_link.main, "--repeats 0", "give a whole number from 1 up"),
        (slow_link.main, "--diloco.quantization.codec int8", "the table sets this itself"),
        (slow_link.main, "--optimizer.lr fast", "optimizer.lr"),
        (slow_link.main, "--repeets 3", "--repeets 3: settings of the trainer look like"),
        (slow_link.main, "--rates 0", "give numbers"),
        (parity.main, "--runs telepathy", "there are data parallel; DiLoCo"),
        (sync.main, "--codecs int7", "there are fp32"),
        (activations.main, "--activation_checkpoint.mode full", "the table sets this itself"),
        (activations.main, "--rounds none", "give a whole number from 1 up"),
        (train_step.main, "--config debgu", "did you mean debug?"),
        (islands.main, "--cases earthquake", "there are control; killed"),
        (diagnosis.main, "--faults earthquake", "there are clean, slow-compute-1.3"),
        (scale.main, "--out x --minutes 0", "give a whole number from 1 up"),
        (scale.main, "--out x --minutes 1 --sizes big", "unknown size 'big'"),
        (scale.main, "--out x --minutes 1 --workers 3", "there are 2, 4, 8"),
        (scale.main, "--out /proc/x --minutes 1", "choose another folder"),
        (scale.main, "--out x --minutes 1 --diloco.workers 2", "the table sets this itself"),
        (scale.main, "--out x", "give --minutes and --out, or --show"),
        (gpu.main, "--out x --only bits", "torch sees no GPU here"),
        (backlog.main, "--minutes 5 --only 99", "'99': there are 1, 2"),
        (gpu.main, "--out x --only all", "there are bits, syncs"),
        (downstream.main, "--out x --run.seed 1", "the table sets this itself"),
        (downstream.main, "--out x --runs y", 'has diloco.method = "none", as a control'),
    ],
)
def test_commands_refuse_before_anything_is_measured(
    main: Callable[[], None],
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_tasks_take_turns() -> None:
    calls: list[str] = []

    def task(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = core.take_turns({"a": lambda: task("a"), "b": lambda: task("b")}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}, "without the warm-up"


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = core.summary([1.0, 3.0, 2.0], ",.1f", 1e3)
    core.print_table("title", "what | ms", [["a", seconds], ["b", "-"]])
    assert capsys.readouterr().out.strip().splitlines() == [
        "title",
        "",
        "| what | ms                            |",
        "| ---- | ----------------------------- |",
        "| a    | 2,000.0 (1,000.0 ... 3,000.0) |",
        "| b    | -                             |",
    ]
    assert core.summary([0.5], ".1f") == "0.5"
    assert core.against({0: 1.01, 1: 2.06}, {0: 1.0, 1: 2.0, 2: 3.0}) == "+2.00 (+1.00 ... +3.00) %"
    assert core.against({0: math.pi}, {}) == "", "no seed in common"
