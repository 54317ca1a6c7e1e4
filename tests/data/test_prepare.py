import errno
import fcntl
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import torchtitan_diloco
from torchtitan_diloco.data.corpora import is_held_out, open_corpus
from torchtitan_diloco.data.files import only_writer
from torchtitan_diloco.data.preparation import prepare
from torchtitan_diloco.data.prepare import main
from torchtitan_diloco.data.progress import Progress
from torchtitan_diloco.data.shards import SPLITS, Split, TokenShards
from torchtitan_diloco.data.text_files import PIECE_CHARACTERS
from torchtitan_diloco.data.tokenizer import build_tokenizer

ROOT = Path(torchtitan_diloco.__file__).parents[1]
END = 256


def write_documents(path: Path, *, documents: int, seed: int = 0) -> list[str]:
    """Documents of very different lengths, some of several pieces."""
    numbers = random.Random(seed)
    texts = [f"{numbers.random()}\n" * int(10 ** numbers.uniform(0, 3.8)) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens(folder: Path, split: Split) -> list[int]:
    shards = TokenShards(folder, split)
    return [int(token) for token in shards.read(0, len(shards))]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_all_text_is_there_once_in_order(tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "a.jsonl", documents=60)
    assert (
        run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "all", "--validation-fraction", 0)
        == 0
    )
    expected = b"".join(text.encode() + b"\0" for text in texts)  # \0 for the end: no text has it
    assert (
        bytes(0 if token == END else token for token in tokens(tmp_path / "all", "train"))
        == expected
    )


def test_held_out_pieces_are_in_validation_and_nowhere_else(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", documents=60)
    corpus = open_corpus(str(tmp_path / "a.jsonl"))
    prepare(
        corpus,
        build_tokenizer("bytes"),
        tmp_path / "out",
        validation_fraction=0.3,
        shard_tokens=10_000,
    )
    pieces = list(corpus.pieces())
    assert len(pieces) > 70, "some documents have several pieces"
    for split in SPLITS:
        expected: list[int] = []
        for number, piece in enumerate(pieces):
            if is_held_out(number, 0.3) == (split == "validation"):
                expected += piece.text.encode()
                # a document that goes on in the other split has ended for this one
                if piece.ends_document or is_held_out(number + 1, 0.3) != is_held_out(number, 0.3):
                    expected.append(END)
        assert tokens(tmp_path / "out", split) == expected


def test_one_large_file_can_be_held_out_from(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a line of text\n" * 50_000)
    done = prepare(
        open_corpus(str(tmp_path / "one.txt")),
        build_tokenizer("bytes"),
        tmp_path / "out",
        validation_fraction=0.1,
    )
    assert 0 < done.tokens["validation"] <= 3 * (PIECE_CHARACTERS + 1)
    assert done.tokens["train"] + done.tokens["validation"] == 15 * 50_000 + sum(
        done.documents.values()
    )


def test_threads_do_not_change_a_byte(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", documents=200)
    folders = [tmp_path / f"threads-{threads}" for threads in (1, 2, 7)]
    for threads, folder in zip((1, 2, 7), folders, strict=True):
        common = (
            "--source",
            tmp_path / "a.jsonl",
            "--shard-tokens",
            "50K",
            "--validation-fraction",
            0.1,
        )
        assert run(*common, "--out", folder, "--threads", threads) == 0
    assert len(content(folders[0])) > 10
    assert content(folders[0]) == content(folders[1]) == content(folders[2])


def start_preparing(source: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "torchtitan_diloco.data.prepare",
        "--source",
        str(source),
        "--out",
        str(out),
    ]
    settings = ["--shard-tokens", "40000", "--validation-fraction", "0.1", "--threads", "2", *more]
    return subprocess.Popen(
        [*command, *settings], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("more", [(), ("--max-tokens", "3M")])
def test_killed_at_any_point_and_restarted_is_uninterrupted(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    source = tmp_path / "a.jsonl"
    write_documents(source, documents=330)
    whole = start_preparing(source, tmp_path / "whole", *more)
    assert whole.wait() == 0
    out = tmp_path / "killed"
    numbers = random.Random(1)
    kills = 0
    for shards in (1, 4, 20, 45):
        process = start_preparing(source, out, *more)
        while process.poll() is None and len(list(out.glob("train-*"))) < shards:
            time.sleep(0.001)
        time.sleep(numbers.uniform(0, 0.01))
        process.kill()
        process.communicate()
        kills += not (out / "corpus.json").exists()
    assert kills >= 2, "the test kills while there is work"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*")}
    last = start_preparing(source, out, *more)
    assert last.wait() == 0
    last.communicate()
    whole.communicate()
    assert content(out) == content(tmp_path / "whole")
    assert before == {name: (out / name).stat().st_mtime_ns for name in before}, (
        "finished shards are kept"
    )


def test_killed_between_manifest_and_clean_up(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", documents=3)
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0
    expected = content(tmp_path / "out")
    (tmp_path / "out" / "prepare.json").write_text("{}")
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0
    assert content(tmp_path / "out") == expected


def test_an_error_in_the_source_leaves_a_folder_that_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_documents(tmp_path / "a.jsonl", documents=200)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("no json\n")
    command = (
        "--source",
        tmp_path / "a.jsonl",
        "--out",
        tmp_path / "out",
        "--shard-tokens",
        10_000,
        "--threads",
        1,
    )
    assert run(*command) == 2
    assert f"a.jsonl, line {len(texts) + 1}: not JSON" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob(".*.partial"))
    assert list((tmp_path / "out").glob("train-*.tokens"))
    assert not (tmp_path / "out" / "corpus.json").exists()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--validation-fraction", "0.2"), "validation_fraction was 0.1 and is 0.2"),
        (("--shard-tokens", "7"), "shard_tokens was 40000 and is 7"),
        (("--max-tokens", "7"), "max_tokens was None and is 7"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    finished: bool,
    change: tuple[str, str],
    named: str,
) -> None:
    write_documents(tmp_path / "a.jsonl", documents=3)
    settings = {"--validation-fraction": "0.1", "--shard-tokens": "40000"}
    common = ("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert run(*common, *[word for pair in settings.items() for word in pair]) == 0
    if not finished:
        manifest = tmp_path / "out" / "corpus.json"
        (tmp_path / "out" / "prepare.json").write_text(
            json.dumps(json.loads(manifest.read_text())["settings"])
        )
        manifest.unlink()
    settings |= dict([change])
    assert run(*common, *[word for pair in settings.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert f"was prepared with other settings: {named}. Use the same ones to continue" in error


def test_a_changed_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "a.jsonl", documents=3)
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0
    write_documents(tmp_path / "a.jsonl", documents=4)
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 2
    assert "source_fingerprint was" in capsys.readouterr().err


def test_finished_folder_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "a.jsonl", documents=3)
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0
    first = capsys.readouterr().out
    assert "3 documents" in first
    assert "M tokens/s" in first
    assert "MB/s" in first
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0
    assert "was complete already" in capsys.readouterr().out


def test_max_tokens_ends_with_the_piece_that_reaches_it(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", documents=100)
    assert (
        run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--max-tokens", "100K")
        == 0
    )
    assert 100_000 <= len(TokenShards(tmp_path / "out", "train")) <= 100_000 + PIECE_CHARACTERS


def test_restarted_when_only_validation_is_missing(tmp_path: Path) -> None:
    """All that is trained on is there, --max-tokens of it; of the held-out pieces before that point some are not."""
    write_documents(tmp_path / "a.jsonl", documents=200)
    command = (
        "--source",
        tmp_path / "a.jsonl",
        "--out",
        tmp_path / "out",
        "--max-tokens",
        "300K",
        "--shard-tokens",
        "40K",
        "--validation-fraction",
        0.3,
    )
    assert run(*command) == 0
    whole = content(tmp_path / "out")
    settings = json.loads(whole["corpus.json"])["settings"]
    (tmp_path / "out" / "prepare.json").write_text(json.dumps(settings))
    (tmp_path / "out" / "corpus.json").unlink()
    lost = sorted((tmp_path / "out").glob("validation-*"))[1:]
    assert lost
    for path in lost:
        path.unlink()
    assert run(*command) == 0
    assert content(tmp_path / "out") == whole


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "a.jsonl", documents=30)
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--verify") == 0
    assert "as they were written" in capsys.readouterr().out
    shard = tmp_path / "out" / "train-00000.tokens"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    assert run("--out", tmp_path / "out", "--verify") == 2
    assert "train-00000.tokens is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation-fraction", "0.6"), "--validation-fraction 0.6 is not between 0 and 0.5"),
        (("--shard-tokens", "0"), "--shard-tokens 0 and --max-tokens None must be at least 1"),
        (("--max-tokens", "0"), "must be at least 1"),
        (("--threads", "0"), "--threads 0 must be at least 1"),
        (("--tokenizer", "byts"), 'Did you mean "bytes"?'),
    ],
)
def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run("--source", "stdlib", "--out", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err


def test_missing_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", tmp_path / "out") == 2
    assert "--source is missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["many", "1.5", "-3"])
def test_bad_quantity(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        run("--source", "stdlib", "--out", tmp_path / "out", f"--max-tokens={text}")
    assert "number" in capsys.readouterr().err


def test_folder_with_other_things_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert run("--source", "stdlib", "--out", tmp_path / "out") == 2
    assert "is not empty (thesis.tex); choose a new folder" in capsys.readouterr().err


def test_folder_that_another_process_writes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with only_writer(tmp_path / "out", wait=False):
        assert run("--source", "stdlib", "--out", tmp_path / "out") == 2
    assert "another process is writing" in capsys.readouterr().err


def test_file_system_without_locks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert run("--source", "stdlib", "--out", tmp_path / "out") == 2
    assert "has no file locks" in capsys.readouterr().err


def test_damaged_settings_of_an_unfinished_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "prepare.json").write_text("{")
    assert run("--source", "stdlib", "--out", tmp_path / "out") == 2
    assert f"cannot read {tmp_path / 'out' / 'prepare.json'}" in capsys.readouterr().err


def test_interrupted_by_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path / "a.jsonl", documents=30)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", interrupt)
        assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock", "prepare.json"}
    assert run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0


def test_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("--source", "stdlib", "--out", tmp_path / "file" / "out") == 2
    assert "cannot write into the folder" in capsys.readouterr().err


def test_hugging_face_source(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    texts = write_documents(tmp_path / "set" / "train.jsonl", documents=20)
    source = f"hf:{tmp_path / 'set'}:train"
    assert run("--source", source, "--out", tmp_path / "out", "--validation-fraction", 0) == 0
    assert tokens(tmp_path / "out", "train").count(END) == len(texts)


def test_lone_surrogates_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')
    assert (
        run("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--validation-fraction", 0)
        == 0
    )
    assert np.array_equal(tokens(tmp_path / "out", "train"), [*"a\ufffdb".encode(), END])
