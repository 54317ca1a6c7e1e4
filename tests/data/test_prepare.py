import errno
import fcntl
import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

import torchtitan_diloco.data.corpus as corpus_module
from torchtitan_diloco.data.corpus import main, prepare
from torchtitan_diloco.data.shards import SPLITS, ShardWriter, TokenShards, only_writer
from torchtitan_diloco.data.text import PIECE_CHARACTERS, Corpus, is_held_out, open_corpus
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer

BYTES = build_tokenizer("bytes")
END = 256
BEGINS = replace(BYTES, name="begins", vocab_size=END + 2, begin_of_document=END + 1)
Run = Callable[..., tuple[object, str]]


def write_documents(path: Path, *, documents: int) -> None:
    """Write documents of very different lengths, some of several pieces."""
    numbers = random.Random(0)
    texts = [f"{numbers.random()}\n" * int(10 ** numbers.uniform(0, 3.8)) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command. Returns the exit status, and what was printed."""

    def run(*options: object, source: object = source, out: Path = out) -> tuple[object, str]:
        command, status = ["--out", out, *options], None
        try:
            main([str(word) for word in ["--source", source, *command]])
        except SystemExit as stop:
            status = stop.code
        return status or 0, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("tokenizer", [BYTES, BEGINS], ids=["bytes", "begin token"])
def test_all_text_is_there_once_in_order_and_in_one_split(
    source: Path, out: Path, tokenizer: Tokenizer
) -> None:
    write_documents(source, documents=60)
    corpus, begin = open_corpus(str(source)), tokenizer is not BYTES
    options: dict[str, Any] = {"validation_fraction": 0.3, "shard_tokens": 10_000, "begin": begin}
    prepare(corpus, tokenizer, out, **options)
    pieces = list(corpus.pieces())
    assert len(pieces) > 70, "some documents have several pieces"
    for split in SPLITS:
        expected: list[int] = []
        for number, piece in enumerate(pieces):
            held_out = is_held_out(number, 0.3)
            if held_out == (split == "validation"):
                # A document that continues in the other split has ended for this one.
                goes_on = number and not pieces[number - 1].ends_document
                if begin and not (goes_on and is_held_out(number - 1, 0.3) == held_out):
                    expected.append(END + 1)
                expected += piece.text.encode()
                if piece.ends_document or is_held_out(number + 1, 0.3) != held_out:
                    expected.append(END)
        shards = TokenShards(out, split)
        assert shards.read(0, len(shards)).tolist() == expected
    if begin:
        with pytest.raises(ValueError, match=r"other settings .begin_token was 257 and is None"):
            prepare(corpus, tokenizer, out, **options | {"begin": False})


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_interrupted_anywhere_and_continued_with_other_threads_is_uninterrupted(
    run: Run, source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(source, documents=200)
    settings = ("--max-tokens", "3e5", "--shard-tokens", "4e4", "--validation-fraction", 0.3)
    monkeypatch.setattr(corpus_module, "available_cores", lambda: 1)
    assert run(*settings)[0] == 0
    whole, index = content(out), json.loads((out / "corpus.json").read_text())
    assert 300_000 <= index["splits"]["train"]["tokens"] <= 300_000 + PIECE_CHARACTERS
    finish, finished = ShardWriter.finish_shard, sum(name.endswith(".tokens") for name in whole)
    for count in range(finished):
        part = tmp_path / f"interrupted-after-{count}"
        finishes = chain([finish] * count, repeat(interrupt))
        with monkeypatch.context() as patch:
            patch.setattr(
                ShardWriter,
                "finish_shard",
                lambda writer, finishes=finishes: next(finishes)(writer),
            )
            assert run(*settings, out=part)[0] == 130
        splits = json.loads((part / "prepare.json").read_text())["splits"].values()
        kept = [part / shard["file"] for split in splits for shard in split["shards"]]
        times = [path.stat().st_mtime_ns for path in kept]
        assert len(kept) == count
        monkeypatch.setattr(corpus_module, "available_cores", lambda: 7)
        assert run(*settings, out=part)[0] == 0
        assert content(part) == whole
        assert [path.stat().st_mtime_ns for path in kept] == times, "finished ones are kept"


def test_a_folder_has_one_source_and_settings(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(source, documents=3)
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "pieces", interrupt)
        status, printed = run()
    assert (status, "the same command continues" in printed) == (130, True)
    for state in ("3 documents to train on", "was complete already"):
        status, printed = run("--shard-tokens", "7")
        assert status == 2
        assert "settings (shard_tokens was 268435456 and is 7): use the same ones" in printed
        status, printed = run()
        assert (status, state in printed) == (0, True)
    write_documents(source, documents=4)
    assert "source_fingerprint was" in run()[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--validation-fraction", "0.6"), "0.6 is not between 0 and 0.5"),
        (("--max-tokens", "0"), '"0": give a whole number from 1 on, such as 1000000 or 1e6'),
        (("--shard-tokens", "1.5"), '"1.5": give a whole number'),
        (("--begin-token",), "--begin-token: bytes has none of <|begin_of_text|>, <s>, <bos>"),
    ],
)
def test_bad_arguments(run: Run, options: tuple[str, ...], message: str) -> None:
    status, printed = run(*options, source="stdlib")
    assert (status, message in printed) == (2, True)


def test_a_folder_that_cannot_be_used(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with only_writer(out, wait=False):
        assert "another process is writing" in run(source="stdlib")[1]

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        assert "No locks available; choose a folder" in run(source="stdlib")[1]

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", no_space)
        assert run(source="stdlib", out=(full := out.with_name("full"))) == (
            2,
            f"error: cannot write into {full}: No space left on device; make room, and "
            "start the same command again\n",
        )
    for name, message in (
        ("thesis.tex", "is not empty (thesis.tex); choose a new folder"),
        ("prepare.json", "prepare.json cannot be read"),
    ):
        (out / name).write_text("{")
        assert message in run(source="stdlib")[1]
    assert "cannot write into" in run(source="stdlib", out=out / "thesis.tex" / "out")[1]
