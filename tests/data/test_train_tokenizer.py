import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.corpora import open_corpus
from torchtitan_diloco.data.prepare import main as prepare_main
from torchtitan_diloco.data.tokenizer import SPLIT_PATTERN, Tokenizer, build_tokenizer, format_ranks
from torchtitan_diloco.data.train_tokenizer import (
    byte_characters,
    learn_bpe,
    main,
    ranks_of,
    train_tokenizer,
)

VOCAB_SIZE = 1500


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """1 MB of code, and what else text can be."""
    pieces = (piece.text for piece in open_corpus("stdlib").pieces())
    return [
        *itertools.islice(pieces, 60),
        "don't DON'T größer 日本語 \U0001f600\u200d 12345 \r\n\r\n  \t x" * 50,
    ]


@pytest.fixture(scope="module")
def learned(texts: list[str]) -> Any:
    return learn_bpe(iter(texts), VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def ours(learned: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "ours.tiktoken"
    path.write_bytes(format_ranks(ranks_of(learned)))
    return build_tokenizer(str(path))


def test_encodes_text_exactly_as_it_was_learned(
    texts: list[str], learned: Any, ours: Tokenizer
) -> None:
    unseen = [piece.text for piece in itertools.islice(open_corpus("stdlib").pieces(), 300, 340)]
    for text in [*texts, *unseen]:
        assert ours.encode(text).tolist() == learned.encode(text).ids


@given(st.text(alphabet="ab'sSdDtT\u0301éß日\U0001f600 \t\n\r\u20031239.,-_", max_size=40))
def test_encodes_odd_text_exactly_as_it_was_learned(
    learned: Any, ours: Tokenizer, text: str
) -> None:
    assert ours.encode(text).tolist() == learned.encode(text).ids


@given(st.text())
def test_any_text_comes_back(ours: Tokenizer, text: str) -> None:
    assert ours.decode(ours.encode(text)) == text


def test_vocabulary_counts_the_end_of_document(ours: Tokenizer) -> None:
    assert ours.vocab_size == VOCAB_SIZE
    assert ours.end_of_document == VOCAB_SIZE - 1


def test_it_compresses(texts: list[str], ours: Tokenizer) -> None:
    text = texts[10]
    assert len(ours.encode(text)) < 0.45 * len(text.encode())


def test_byte_characters_are_those_of_byte_level_bpe() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, range(0x300)))
    ((written, _),) = level.pre_tokenize_str(text)
    assert written == "".join(byte_characters()[byte] for byte in text.encode())


def test_two_learn_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox, the lazy dog\n" * 50)
    corpus = open_corpus(str(tmp_path / "a.txt"))
    assert train_tokenizer(corpus, 270) == train_tokenizer(corpus, 270)


def test_sample_comes_from_all_over_the_corpus(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text(f"{chr(0x61 + number) * 12} " * 400)
    ranks = train_tokenizer(open_corpus(str(tmp_path)), 260, max_bytes=26_000)  # 5 of the 20 files
    assert all(token.strip()[0] > ord("a") for token, rank in ranks.items() if rank >= 256)


def test_command_line_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox, the lazy dog\n" * 50)
    out = tmp_path / "new" / "small.tiktoken"
    command = ["--source", str(tmp_path / "a.txt"), "--vocab-size", "270", "--out", str(out)]
    assert main(command) == 0
    assert "270 tokens (256 bytes, 13 merges, 1 end of document)" in capsys.readouterr().out
    shards = [
        "--source",
        str(tmp_path / "a.txt"),
        "--tokenizer",
        str(out),
        "--out",
        str(tmp_path / "shards"),
    ]
    assert prepare_main([*shards, "--validation-fraction", "0"]) == 0
    assert main(command) == 2
    assert "exists; shards may depend on it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--vocab-size", "256"),
            "--vocab-size 256 is too small: 257 is every byte and the end-of-document token",
        ),
        (("--vocab-size", "5000"), "is too large for this text: after "),
        (("--out", "tokenizer.json"), "must end in .tiktoken"),
        (("--source", "none.txt"), "none.txt does not exist"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], message: str
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 5)
    options = {
        "--source": str(tmp_path / "a.txt"),
        "--vocab-size": "260",
        "--out": str(tmp_path / "t.tiktoken"),
    }
    options |= dict([arguments])
    assert main([word for pair in options.items() for word in pair]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t.tiktoken").exists()


def test_the_vocabulary_that_the_error_names_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 5)
    corpus = open_corpus(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="or --vocab-size") as error:
        train_tokenizer(corpus, 5000)
    largest = int(str(error.value).rstrip(".").rsplit(" ", 1)[1])
    assert len(train_tokenizer(corpus, largest)) == largest - 1


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        ValueError, match=r"needs the package tokenizers: .* -m pip install -e '.*\[tokenizer\]'"
    ):
        train_tokenizer(open_corpus(str(tmp_path / "a.txt")), 260)


def test_pattern_is_frozen() -> None:
    """Rank files and shards of users were made with it: it may never change."""
    assert SPLIT_PATTERN == (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
