import errno
import fcntl
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

import torchtitan_diloco.data.prepare as prepare_module
import torchtitan_diloco.data.tokenizing as tokenizing_module
from tests.conftest import save_tokenizer
from torchtitan_diloco.data.pieces import is_held_out
from torchtitan_diloco.data.prepare import main, prepare
from torchtitan_diloco.data.shards import SPLITS, ShardWriter, TokenShards, only_writer
from torchtitan_diloco.data.text import open_corpus
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


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


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
        command = ["--out", out, *options]
        status = None
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
    corpus = open_corpus(str(source))
    begin = tokenizer is not BYTES
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


def test_a_folder_has_one_source_and_settings(
    run: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(source, documents=3)
    (other := tmp_path / "b.jsonl").write_bytes(source.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_RECORD_TOKENS", 1)
        patch.setattr(prepare_module._Writing, "finish", interrupt)
        status, printed = run()
    assert (status, "the same command continues" in printed) == (130, True)
    tokenizer = save_tokenizer(tmp_path / "own.json", 300)
    for refused, state in (
        ("was begun with other settings ({}): continue it with the same ones", "to train on"),
        ("was prepared with other settings ({}): use the same ones", "was complete already"),
    ):
        for options, difference in {
            ("--shard-tokens", "7"): "shard_tokens was 268435456 and is 7",
            ("--max-tokens", "7", "--validation-fraction", "0"): "validation_fraction was 0.005 and"
            " is 0.0; max_tokens was None and is 7",
            ("--tokenizer", tokenizer): f"tokenizer was 'bytes' and is {tokenizer!r}",
            ("--text-field", "t"): f"names, sizes or times of the files of {source}, or the field "
            "of the text, have changed",
            ("--source", other): f"source was {str(source)!r} and is {str(other)!r}",
        }.items():
            status, printed = run(*options)
            assert (status, printed.count("\n")) == (2, 1)
            assert f"{refused.format(difference)}, or use another folder" in printed
        status, printed = run("--processes", 1)
        assert (status, state in printed) == (0, True)
    write_documents(source, documents=4)
    assert "names, sizes or times of the files of" in run()[1]


def test_a_folder_that_has_no_tokens_yet_takes_corrected_settings(
    run: Run, source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(source, documents=60)
    status, printed = run("--text-field", "t")
    assert (status, printed.count("\n")) == (2, 1)
    corrected = "--validation-fraction", 0
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module._Writing, "finish", interrupt)
        assert run("--validation-fraction", 0.5)[0] == 130
    assert (out / "validation-00000.tokens").exists(), "no index lists it"
    assert run(*corrected)[0] == 0
    assert run(*corrected, out=tmp_path / "at once")[0] == 0
    assert content(out) == content(tmp_path / "at once")


def test_the_help_shows_no_default_that_is_none(run: Run) -> None:
    status, printed = run("--help")
    assert status == 0
    assert "(default 0.005)" in printed
    assert not re.search(r"None|False", printed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--validation-fraction", "0.6"), '"0.6": give a number from 0 to 0.5'),
        (("--max-tokens", "0"), '"0": give a whole number from 1 on, such as 1000000 or 1e6'),
        (("--shard-tokens", "1.5"), '"1.5": give a whole number'),
        *(
            (("--processes", wrong), f'--processes: "{wrong}": give a whole number from 1 to 8 (')
            for wrong in ("100000", "9", "0", "-1", "1e6")
        ),
        (("--source", "nowhere"), "--source nowhere: cannot read "),
        (("--begin-token",), "--begin-token: bytes has none of <|begin_of_text|>, <s>, <bos>"),
    ],
)
def test_bad_arguments(
    run: Run, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "available_cores", lambda: 2)
    status, printed = run(*options, source="stdlib")
    assert (status, message in printed) == (2, True)


def test_a_single_piece_says_what_to_raise(run: Run, source: Path) -> None:
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    status, printed = run("--max-tokens", "1")
    assert (status, "tokens in 1 document to train on" in printed) == (0, True)
    remedy = "raise --max-tokens of `prepare`, or set data.validation_corpus"
    assert f"as --max-tokens is 1, and it is not held out: {remedy}\n" in printed


def test_a_folder_that_cannot_be_used(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with only_writer(out, wait=False):
        assert "another process is writing" in run(source="stdlib")[1]
    (file := out.with_name("file")).touch()
    for folder in (file, file / "in it"):
        said = f"error: cannot write into {folder}: {file} is a file; choose a folder, or move it\n"
        assert run(source="stdlib", out=folder) == (2, said)

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


def test_an_unfinished_folder_of_an_earlier_version_or_with_damage(
    run: Run, source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(source, documents=60)
    options = "--shard-tokens", 20_000, "--validation-fraction", 0.1
    assert run(*options)[0] == 0
    finish = ShardWriter.finish_shard
    shards = len([*out.glob("train-*")])
    with monkeypatch.context() as patch:
        finishes: Iterator[Callable[[ShardWriter], None]] = chain([finish] * 2, repeat(interrupt))
        patch.setattr(ShardWriter, "finish_shard", lambda writer: next(finishes)(writer))
        patch.setattr(tokenizing_module, "_BATCH_PIECES", 2)
        part = tmp_path / "part"
        assert run(*options, out=part)[0] == 130
    index = json.loads((part / "prepare.json").read_text())
    assert index["position"]["pieces"] > 0
    assert len(index["splits"]["train"]["shards"]) == 2 < shards
    before = content(part)
    for name, size in (("train-00000.tokens", 7), ("validation-00000.tokens", 0)):
        (part / name).write_bytes(before[name][:size])
        message = rf"part is damaged: {name}: it has .* bytes.*; delete the folder, and start the s"
        assert re.search(message, run(*options, out=part)[1])
        (part / name).write_bytes(before[name])
    del index["position"], index["splits"]["validation"]["partial"]
    (part / "prepare.json").write_text(json.dumps(index))
    status, printed = run(*options, out=part)
    assert (status, "continue" in printed) == (0, False)
    assert content(part) == content(out)
