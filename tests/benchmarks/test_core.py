import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import slow_link, sync, train_step
from benchmarks.core import (
    kept,
    list_of,
    positive,
    positive_number,
    print_table,
    summary,
    take_turns,
)


def test_wrong_words_are_rejected() -> None:
    for parse, text in (
        (positive, "0"),
        (positive, "1.5"),
        (positive_number, "-1"),
        (list_of(positive), "3,0"),
        (list_of(int), "1,x"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=text.split(",")[-1]):
            parse(text)
    assert list_of(positive)("3,1") == [3, 1]


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (slow_link.main, "--workers 1", "sends nothing"),
        (slow_link.main, "--repeats 0", "give a whole number from 1 up"),
        (slow_link.main, "--methods telepathy", "there are data parallel; DiLoCo"),
        (slow_link.main, "--diloco.quantization.codec int8", "the table sets this itself"),
        (slow_link.main, "--run.seed", "look like --section.key"),
        (slow_link.main, "--optimizer.lr fast", "optimizer.lr"),
        (slow_link.main, "--repeets 3", 'repeets = "3": unknown key'),
        (slow_link.main, "--out pyproject.toml", "pyproject.toml: File exists: give a folder"),
        (slow_link.main, "--rates fast", "a rate is a number of Mbit/s"),
        (slow_link.main, "--rates 0", "a rate is a number of Mbit/s"),
        (sync.main, "--roundz=3", "unrecognized arguments: --roundz=3"),
        (sync.main, "--fragments 4", "must share the"),
        (sync.main, "--codecs int7", "there are fp32"),
        (train_step.main, "--config debgu", "did you mean debug?"),
    ],
)
def test_commands_refuse_before_anything_is_measured(
    main: Callable[[], None],
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_tasks_take_turns() -> None:
    calls: list[str] = []

    def task(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = take_turns({"a": lambda: task("a"), "b": lambda: task("b")}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}, "without the warm-up"


def test_a_finished_run_is_kept(tmp_path: Path) -> None:
    calls = []

    def measure() -> dict[str, int]:
        calls.append(1)
        return {"loss": len(calls)}

    assert [kept(tmp_path / "run", {"seed": "0"}, measure) for _ in range(2)] == [{"loss": 1}] * 2
    with pytest.raises(SystemExit, match="other settings"):
        kept(tmp_path / "run", {"seed": "1"}, measure)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", "what | ms", [["a", summary([1.0, 3.0, 2.0], 1, 1e3)], ["b", "-"]])
    assert capsys.readouterr().out.strip().splitlines() == [
        "title",
        "",
        "| what | ms                            |",
        "| ---- | ----------------------------- |",
        "| a    | 2,000.0 (1,000.0 ... 3,000.0) |",
        "| b    | -                             |",
    ]
    assert summary([0.5], 1) == "0.5"
