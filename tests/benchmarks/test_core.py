import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import slow_link, sync, train_step
from benchmarks.core import (
    kept,
    list_of,
    parse_config,
    parse_settings,
    positive,
    positive_number,
    print_table,
    summary,
    take_turns,
)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (positive, "0"),
        (positive, "1.5"),
        (positive_number, "-1"),
        (list_of(positive), "3,0"),
        (list_of(int), "1,x"),
        (slow_link.parse_rate, "-5"),
        (slow_link.parse_rate, "fast"),
    ],
)
def test_wrong_words_are_rejected(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text.split(",")[-1]):
        parse(text)
    assert list_of(positive)("3,1") == [3, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.seed", "3"], "--run.seed 3: the table sets this"),
        (["--run.seed"], "look like --section.key"),
    ],
)
def test_settings_of_a_table_are_reserved(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    found = parse_settings(parser, ["--optimizer.lr", "1e-3"], {"run.seed"})
    assert found == {"optimizer.lr": "1e-3"}
    with pytest.raises(SystemExit):
        parse_settings(parser, words, {"run.seed"})
    assert message in capsys.readouterr().err


def test_a_wrong_configuration_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(argparse.ArgumentParser(), ["--config", "debgu"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (slow_link.main, ["--workers", "1"]),
        (slow_link.main, ["--repeats", "0"]),
        (slow_link.main, ["--methods", "telepathy"]),
        (slow_link.main, ["--diloco.quantization.codec", "int8"]),
        (slow_link.main, ["--optimizer.lr", "fast"]),
        (sync.main, ["--fragments", "4"]),
        (sync.main, ["--codecs", "int7"]),
        (train_step.main, ["--training.steps", "none"]),
    ],
)
def test_commands_refuse_before_anything_is_measured(
    main: Callable[[], None], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


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
