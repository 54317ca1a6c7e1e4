import argparse
import errno
import fcntl
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from torchtitan_diloco.data.prepare import main, parse_quantity, prepare
from torchtitan_diloco.data.shards import SPLITS, Split, TokenShards, only_writer
from torchtitan_diloco.data.text import PIECE_CHARACTERS, is_held_out, open_corpus
from torchtitan_diloco.data.tokenizer import END_OF_DOCUMENT, Tokenizer, build_tokenizer

BYTES = build_tokenizer("bytes")
END = 256


def write_documents(path: Path, *, documents: int, seed: int = 0) -> list[str]:
    """Write documents of very different lengths, some of several pieces."""
    numbers = random.Random(seed)
    texts = [f"{numbers.random()}\n" * int(10 ** numbers.uniform(0, 3.8)) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens(folder: Path, split: Split) -> list[int]:
    shards = TokenShards(folder, split)
    return [int(token) for token in shards.read(0, len(shards))]


class Job:
    """The command, with a source and a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.source, self.out, self._capsys = folder / "a.jsonl", folder / "out", capsys
        self.printed = self.error = ""

    def run(self, *options: object, source: object = None) -> object:
        command = ["--source", source or self.source, "--out", self.out, *options]
        return self.main(*command)

    def main(self, *command: object) -> object:
        """Return the exit status."""
        status: object = 0
        try:
            main([str(word) for word in command])
        except SystemExit as stop:
            status = stop.code
        self.printed, self.error = self._capsys.readouterr()
        return status

    def unfinish(self) -> None:
        """Make the folder look as if it had been killed before its index was written."""
        (self.out / "corpus.json").rename(self.out / "prepare.json")


@pytest.fixture
def job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(tmp_path, capsys)


def test_all_text_is_there_once_in_order(job: Job) -> None:
    texts = [*write_documents(job.source, documents=60), "a\ufffdb"]
    with job.source.open("a") as file:
        file.write('{"text": "a\\ud800b"}')  # a lone surrogate
    assert job.run("--validation-fraction", 0) == 0
    expected = b"".join(text.encode() + b"\0" for text in texts)  # \0 for the end: no text has it
    assert bytes(0 if token == END else token for token in tokens(job.out, "train")) == expected


def with_begin_token() -> Tokenizer:
    special = {END_OF_DOCUMENT: END, "<|begin_of_text|>": END + 1}
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "begins", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special
    )
    return Tokenizer("begins", encoding, pattern="begins")


@pytest.mark.parametrize("tokenizer", [BYTES, with_begin_token()], ids=["bytes", "begin token"])
def test_held_out_pieces_are_in_validation_and_nowhere_else(job: Job, tokenizer: Tokenizer) -> None:
    write_documents(job.source, documents=60)
    corpus, begin = open_corpus(str(job.source)), tokenizer is not BYTES
    options: dict[str, Any] = {"validation_fraction": 0.3, "shard_tokens": 10_000, "begin": begin}
    prepare(corpus, tokenizer, job.out, **options)
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
        assert tokens(job.out, split) == expected
    if begin:
        with pytest.raises(ValueError, match="other settings: begin_token was 257 and is None"):
            prepare(corpus, tokenizer, job.out, **options | {"begin": False})


def test_threads_do_not_change_a_byte(job: Job) -> None:
    write_documents(job.source, documents=200)
    found = []
    for threads in (1, 7):
        job.out = job.out.with_name(f"threads-{threads}")
        options = ("--shard-tokens", "50K", "--validation-fraction", 0.1, "--threads", threads)
        assert job.run(*options) == 0
        found.append(content(job.out))
    assert len(found[0]) > 10
    assert found[0] == found[1]


@pytest.mark.parametrize("finished", [(0, 0), (0, 3), (5, 0), (5, 2), (99, 1)])
def test_killed_at_any_point_and_restarted_is_uninterrupted(
    job: Job, finished: tuple[int, int]
) -> None:
    """Resume with some shards of both splits, or with all that --max-tokens asks for."""
    write_documents(job.source, documents=200)
    settings = ("--max-tokens", "300K", "--shard-tokens", "40K", "--validation-fraction", 0.3)
    assert job.run(*settings) == 0
    whole, index = content(job.out), json.loads((job.out / "corpus.json").read_text())
    assert 300_000 <= index["splits"]["train"]["tokens"] <= 300_000 + PIECE_CHARACTERS
    for split, kept in zip(SPLITS, finished, strict=True):
        shards, state = index["splits"][split]["shards"], index["splits"][split]
        for shard in shards[kept:]:
            partial = job.out / f".{shard['file']}.partial"  # as a kill leaves it
            (job.out / shard["file"]).rename(partial)
            partial.write_bytes(partial.read_bytes()[:1000])
        state["shards"], state["documents"] = shards[:kept], 0
        state["tokens"] = sum(shard["tokens"] for shard in shards[:kept])
    (job.out / "corpus.json").write_text(json.dumps(index))
    job.unfinish()
    before = {path: path.stat().st_mtime_ns for path in job.out.glob("*.tokens")}
    assert len(before) == sum(len(state["shards"]) for state in index["splits"].values())
    assert job.run(*settings) == 0
    again = content(job.out)
    lists = [json.loads(found.pop("corpus.json"))["splits"] for found in (again, whole)]
    assert again == whole
    for split in SPLITS:
        assert lists[0][split]["shards"] == lists[1][split]["shards"]
    assert before == {path: path.stat().st_mtime_ns for path in before}, "finished ones are kept"


def test_finished_folder_stays_as_it_is_and_other_settings_are_refused(job: Job) -> None:
    write_documents(job.source, documents=3)
    assert job.run("--shard-tokens", "40000") == 0
    assert "3 documents to train on" in job.printed
    assert job.run("--shard-tokens", "40000") == 0
    assert "was complete already" in job.printed
    for change in ("finished", "not finished"):
        assert job.run("--shard-tokens", "7") == 2, change
        settings = "other settings: shard_tokens was 40000 and is 7. Use the same ones to continue"
        assert settings in job.error
        if change == "finished":
            job.unfinish()
    write_documents(job.source, documents=4)
    assert job.run("--shard-tokens", "40000") == 2
    assert "source_fingerprint was" in job.error


def test_verify(job: Job) -> None:
    write_documents(job.source, documents=30)
    assert job.run("--verify") == 0
    assert "as they were written" in job.printed
    job.out.rename(job.out.with_name("copy"))
    shard = job.out.with_name("copy") / "train-00000.tokens"
    shard.write_bytes(b"\7" + shard.read_bytes()[1:])
    assert job.main("--out", shard.parent, "--verify") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--validation-fraction", "0.6"), "--validation-fraction 0.6 is not between 0 and 0.5"),
        (("--threads", "0"), "'0' is not a whole number from 1 on"),
        (("--tokenizer", "byts"), 'Did you mean "bytes"?'),
        (("--begin-token",), "--begin-token: bytes has none of <|begin_of_text|>, <s>, <bos>"),
    ],
)
def test_bad_arguments(job: Job, options: tuple[str, ...], message: str) -> None:
    assert job.run(*options, source="stdlib") == 2
    assert message in job.error


def test_quantities() -> None:
    for text in ("1000000", "1_000_000", "1e6", "1M", "1MB", "1mb", "1000K", "0.001G"):
        assert parse_quantity(text) == 1_000_000
    for text in ("", "x", "-1", "0", "1.5", "1X", "1 000", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 on"):
            parse_quantity(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("thesis.tex", "", "is not empty (thesis.tex); choose a new folder"),
        ("prepare.json", "{", "cannot read prepare.json"),
    ],
)
def test_folder_with_other_things_is_refused(job: Job, name: str, text: str, message: str) -> None:
    job.out.mkdir()
    (job.out / name).write_text(text)
    assert job.run(source="stdlib") == 2
    assert message in job.error


def test_folder_that_cannot_be_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with only_writer(job.out, wait=False):
        assert job.run(source="stdlib") == 2
    assert "another process is writing" in job.error

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        assert job.run(source="stdlib") == 2
    assert "No locks available; choose a folder" in job.error
    (job.out / "file").touch()
    job.out = job.out / "file" / "out"
    assert job.run(source="stdlib") == 2
    assert "cannot write into" in job.error


def test_interrupted_by_the_user(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(job.source, documents=30)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", interrupt)
        assert job.run() == 130
    assert "the same command continues" in job.error
    assert job.run() == 0
