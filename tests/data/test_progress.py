"""`prepare` says how far it is while it works, by a clock of the test."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import torchtitan_diloco.data.prepare as prepare_module
import torchtitan_diloco.data.tokenizing as tokenizing_module
from torchtitan_diloco.data.prepare import main
from torchtitan_diloco.data.progress import Amount, Progress
from torchtitan_diloco.data.tokenizing import tokenize

START = Amount(bytes=1_000_000_000, documents=1000, tokens=300_000_000)
NOW = Amount(bytes=1_600_000_000, documents=1801, tokens=480_500_000)
TEXT = "1.6 GB, 1,801 documents, 480 M tokens, 10 MB/s, 3.01 M tokens/s"


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((None, None), TEXT),
        ((0.25, 0.4), f"40.0%, {TEXT}, 0:04:00 left"),  # 0.15 took a minute
        ((0.25, 0.25), f"25.0%, {TEXT}"),
        ((0.25, 1.0), f"100.0%, {TEXT}, 0:00:00 left"),
    ],
)
def test_a_line_every_so_often_without_a_terminal(
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    shares: tuple[float | None, float | None],
    expected: str,
) -> None:
    progress = Progress("tokenize it", START, shares[0])
    for clock.now in (1.0, 9.9, 60.0, 61.0, 89.0):
        progress.show(NOW, shares[1])
    progress.close()
    assert capsys.readouterr().err == f"data: tokenize it: {expected}\n"


@pytest.mark.parametrize("share", [None, 0.4])
def test_a_bar_on_a_terminal(
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    progress = Progress("tokenize it", START, None if share is None else 0.25)
    clock.now = 0.1
    progress.show(NOW, share)
    assert capsys.readouterr().err == "", "what is short shows nothing"
    clock.now = 60.0
    progress.show(NOW, share)
    progress.close()
    printed = capsys.readouterr().err
    assert TEXT in printed
    assert (" 40%|" in printed, ", 0:04:00 left" in printed) == (share == 0.4, share == 0.4)


def shown(monkeypatch: pytest.MonkeyPatch, *options: object) -> list[tuple[Amount, float | None]]:
    """Run the command. Return the amounts and shares, of which the first is that of its start."""
    amounts = list[tuple[Amount, float | None]]()

    class Recorder(Progress):
        def __init__(self, action: str, start: Amount, share: float | None) -> None:
            super().__init__(action, start, share)
            amounts.append((start, share))

        def show(self, amount: Amount, share: float | None) -> None:
            amounts.append((amount, share))

    monkeypatch.setattr(prepare_module, "Progress", Recorder)
    monkeypatch.setattr(tokenizing_module, "_BATCH_PIECES", 10)
    main([str(option) for option in options])
    return amounts


TYPED = """---
dataset_info:
  features: [{name: text, dtype: string}]
  splits: [{name: train, num_bytes: 1000, num_examples: 100}]
---
"""


@pytest.mark.parametrize("kind", ["files", "tokens", "dataset"])
def test_the_share_of_what_is_known_and_a_resumed_run_begins_at_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    lines = "".join(json.dumps({"text": f"{row:09}"}) + "\n" for row in range(100))
    (rows / "train.jsonl").write_text(lines)
    source, size = (rows, len(lines)) if kind != "dataset" else (f"hf:{rows}", 900)
    if kind == "dataset":
        (rows / "README.md").write_text(TYPED)
    command = ["--source", source, "--validation-fraction", 0, "--shard-tokens", 200, "--out"]
    if kind == "tokens":
        command = ["--max-tokens", 500, *command]
    amounts = shown(monkeypatch, *command, tmp_path / "whole")
    assert amounts[0] == (Amount(0, 0, 0), 0.0)
    assert [amount.documents for amount, _ in amounts[1:4]] == [10, 20, 30]
    if kind == "tokens":  # fewer than there are in the file, so they say when it ends
        assert amounts[1][1] == 0.2
    else:
        assert amounts[-1] == (Amount(size, 100, 1000), 1.0)
        assert kind != "dataset" or amounts[1] == (Amount(90, 10, 100), 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "tokenize", interrupted(tokenize, batches=3))
        with pytest.raises(SystemExit):
            shown(patch, *command, tmp_path / "part")
    resumed = shown(monkeypatch, *command, tmp_path / "part")
    assert resumed == amounts[2:], "the last record is after two batches"


def interrupted(function: Callable[..., Iterator[Any]], batches: int) -> Callable[..., Any]:
    def some(*arguments: Any) -> Iterator[Any]:
        yield from islice(function(*arguments), batches)
        raise KeyboardInterrupt

    return some
