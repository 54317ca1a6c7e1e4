"""`prepare` killed anywhere and started again writes the same bytes, in any number of processes."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtitan_diloco.data.prepare as prepare_module
import torchtitan_diloco.data.tokenizing as tokenizing_module
from tests.conftest import REPOSITORY, save_tokenizer
from tests.processes import PATIENCE
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.prepare import main, prepare
from torchtitan_diloco.data.shards import ShardWriter
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.data.tokenizer import Ids, build_tokenizer

OPTIONS = ["--shard-tokens", "9000", "--validation-fraction", "0.3"]
KILLED = """
import multiprocessing, os, signal, sys
import torchtitan_diloco.data.prepare as prepare
import torchtitan_diloco.data.tokenizing as tokenizing
from torchtitan_diloco.data.shards import ShardWriter

name, count, number, *arguments = sys.argv[1:]
method, left = getattr(ShardWriter, name), int(count)

def die(*given):
    global left
    method(*given)
    left -= 1
    if left == 0:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        send = os.killpg if int(number) == signal.SIGINT else os.kill
        send(os.getpid(), int(number))

if __name__ == "__main__":
    setattr(ShardWriter, name, die)
    prepare._RECORD_TOKENS = 2000
    tokenizing._BATCH_PIECES = 5
    prepare.main(arguments)
"""
"""Runs `prepare` in a process that signals itself after some calls of a method, and names its
children before that."""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(count: int) -> list[str]:
    """Return documents of very different lengths, the longest of several pieces."""
    numbers = random.Random(0)
    return [f"{numbers.random()}\n" * int(10 ** numbers.uniform(0, 3.5)) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of text of all kinds."""
    folder = tmp_path / "text"
    folder.mkdir()
    texts = documents(120)
    (folder / "a.txt").write_text("".join(texts[:40]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[40:])
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "d.md").write_text("the end")
    return folder


def killed(
    name: str, count: int, *arguments: object, number: signal.Signals = signal.SIGKILL
) -> tuple[list[int], subprocess.CompletedProcess[str]]:
    """Run the command until it gets a signal. Return the ids of its children, and its end."""
    words = [sys.executable, "-c", KILLED, name, count, int(number), *arguments]
    done = subprocess.run(
        [str(word) for word in words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        start_new_session=True,
    )
    children = [line for line in done.stdout.splitlines() if line.replace(" ", "").isdigit()]
    return [int(word) for line in children for word in line.split()], done


def wait_until_gone(children: Sequence[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline, "children outlive the command"
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_text_killed_twice_in_two_processes(folder: Path, tmp_path: Path) -> None:
    """Once in the middle of a shard, and once between two of them."""
    tokenizer = save_tokenizer(tmp_path / "own.json", 300)
    whole = tmp_path / "whole"
    part = tmp_path / "part"
    options = ["--source", str(folder), "--tokenizer", tokenizer, *OPTIONS]
    main([*options, "--out", str(whole), "--processes", "1"])
    options += ["--out", str(part)]
    for name, count in (("add", 70), ("finish_shard", 2)):
        children, done = killed(name, count, *options, "--processes", 2)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(children) == 2
        wait_until_gone(children)
        assert not (part / "corpus.json").exists()
    assert "data: continue" in done.stdout
    assert "reading continues at byte" in done.stdout
    finished = [shard["file"] for shard in index(part)["splits"]["train"]["shards"]]
    times = [(part / file).stat().st_mtime_ns for file in finished]
    main([*options, "--processes", "3"])
    assert content(part) == content(whole)
    assert len(finished) >= 2
    assert [(part / file).stat().st_mtime_ns for file in finished] == times, "they are kept"


@pytest.mark.parametrize("most", [14_000, 22_000])
def test_killed_between_the_last_shards_of_the_splits(tmp_path: Path, most: int) -> None:
    """Text that is held out may be missing although there are enough tokens to train on."""
    source = tmp_path / "a.jsonl"
    whole = tmp_path / "whole"
    part = tmp_path / "part"
    source.write_text("".join(json.dumps({"text": "x" * 150}) + "\n" for _ in range(400)))
    options: list[object] = ["--source", source, "--validation-fraction", "0.3"]
    options += ["--max-tokens", most, "--out"]
    main([str(word) for word in (*options, whole)])
    _, done = killed("finish_shard", 1, *options, part)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = index(part)["splits"]
    assert left["train"]["tokens"] >= most
    held_out = json.loads((whole / "corpus.json").read_text())["splits"]["validation"]
    assert left["validation"]["partial"]["tokens"] < held_out["tokens"]
    main([str(word) for word in (*options, part)])
    assert content(part) == content(whole)


def index(folder: Path) -> Any:
    return json.loads((folder / "prepare.json").read_text())


def test_a_stream_killed_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows"
    whole = tmp_path / "whole"
    part = tmp_path / "part"
    rows.mkdir()
    texts = documents(120)
    for file in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[40 * file : 40 * (file + 1)]]
        (rows / f"train-{file}.jsonl").write_text("".join(lines))
    options = ["--source", f"hf:{rows}", *OPTIONS, "--out"]
    main([*options, str(whole)])
    for name, count in (("add", 60), ("finish_shard", 2)):
        _, done = killed(name, count, *options, part)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert "the rows before in its data file are read again" in done.stdout
    rows_before = index(part)["position"]["place"]["row"]
    assert rows_before > 40
    capsys.readouterr()
    main([*options, str(part)])
    assert f"reading continues at row {rows_before} of" in capsys.readouterr().out
    assert content(part) == content(whole)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 120), max_size=4), st.integers(1, 8), st.booleans(), st.booleans())
def test_killed_anywhere(deaths: list[int], batch: int, stops: bool, begins: bool) -> None:
    """A fork is killed after some pieces, and the next one continues, with other batches."""
    tokenizer = replace(build_tokenizer("bytes"), vocab_size=258, begin_of_document=257)
    options: dict[str, Any] = {"validation_fraction": 0.3, "shard_tokens": 9000, "begin": begins}
    options["max_tokens"] = 60_000 if stops else None
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "a.jsonl")
        lines = [json.dumps({"text": text}) + "\n" for text in documents(80)]
        source.write_text("".join(lines))
        corpus = open_corpus(str(source))
        whole = Path(name, "whole")
        part = Path(name, "part")
        prepare(corpus, tokenizer, whole, **options)
        with (
            patch.object(tokenizing_module, "_BATCH_PIECES", batch),
            patch.object(prepare_module, "_RECORD_TOKENS", 1000),
        ):
            for death in deaths:
                child = os.fork()
                if child == 0:
                    try:
                        die_after(death)
                        prepare(corpus, tokenizer, part, processes=1, **options)
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
            prepare(corpus, tokenizer, part, processes=1, **options)
        assert content(part) == content(whole)


def die_after(pieces: int) -> None:
    """Kill this process after it has written so many pieces."""
    add = ShardWriter.add
    left = pieces

    def add_and_die(*given: Any) -> None:
        nonlocal left
        add(*given)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(ShardWriter, "add", add_and_die)  # noqa: B010


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to all processes of the terminal, and no process or semaphore is left."""
    tokenizer = save_tokenizer(tmp_path / "own.json", 300)
    options = ["--source", folder, "--tokenizer", tokenizer, *OPTIONS, "--out", tmp_path / "out"]
    children, done = killed("add", 30, *options, "--processes", 2, number=number)
    assert done.returncode == 128 + number
    assert done.stderr == f"\ninterrupted; the same command continues {tmp_path / 'out'}\n"
    assert len(children) == 2
    assert not any(map(is_running, children))


def test_a_child_that_is_killed_is_one_error(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As by the system when memory runs out."""

    def kill_child(*_: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    monkeypatch.setattr(ShardWriter, "add", kill_child)
    monkeypatch.setattr(tokenizing_module, "_BATCH_PIECES", 2)
    tokenizer = save_tokenizer(tmp_path / "own.json", 300)
    command = ["--source", folder, "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    with pytest.raises(SystemExit, match="2"):
        main([str(word) for word in [*command, "--processes", 2]])
    error = "error: a process that tokenizes was killed, as the system does when memory runs out: "
    error += "the same command continues, with less memory if --processes is smaller\n"
    assert capsys.readouterr().err == error


def test_an_error_of_a_child_is_that_of_the_command(folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(save_tokenizer(tmp_path / "own.json", 300))
    save_tokenizer(tmp_path / "own.json", 301)
    corpus = open_corpus(str(folder))
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"own\.json has changed: keep its file while it is used"):
        prepare(corpus, tokenizer, out, validation_fraction=0.3, processes=2)

    def encode(text: str) -> Ids:
        raise ValueError(f"bad text of {len(text)} characters")

    bad = replace(tokenizer, encode=encode)
    with pytest.raises(UserError, match=r"tokenize piece 0 \(bad text of .*\), which begins"):
        prepare(corpus, bad, out, validation_fraction=0.3, processes=1)
