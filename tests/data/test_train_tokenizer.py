import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.prepare import main as prepare_main
from torchtitan_diloco.data.text import Corpus, open_corpus
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer, format_ranks
from torchtitan_diloco.data.train_tokenizer import (
    learn_bpe,
    main,
    ranks_of,
    train_tokenizer,
)

VOCAB_SIZE = 1500


@pytest.fixture(scope="module")
def learned() -> Any:
    """Learned from 1 MB of code, and what else text can be."""
    odd = "don't DON'T größer 日本語 \U0001f600\u200d 12345 \r\n\r\n  \t x" * 50
    pieces = (piece.text for piece in open_corpus("stdlib").pieces())
    return learn_bpe(iter([*itertools.islice(pieces, 60), odd]), VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def ours(learned: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "ours.tiktoken"
    path.write_bytes(format_ranks(ranks_of(learned)))
    return build_tokenizer(str(path))


@pytest.fixture
def fox(tmp_path: Path) -> Corpus:
    (tmp_path / "a.txt").write_text("the quick brown fox, the lazy dog\n" * 50)
    return open_corpus(str(tmp_path / "a.txt"))


ODD = st.text(alphabet="ab'sSdDtT\u0301éß日\U0001f600 \t\n\r\u20031239.,-_", max_size=40)


@given(ODD | st.text())
def test_odd_text_is_encoded_as_it_was_learned_and_comes_back(
    learned: Any, ours: Tokenizer, text: str
) -> None:
    assert ours.encode(text).tolist() == learned.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


def test_code_is_encoded_as_it_was_learned(learned: Any, ours: Tokenizer) -> None:
    pieces = itertools.islice(open_corpus("stdlib").pieces(), 30, 90)  # half of them unseen
    code = "".join(piece.text for piece in pieces)
    assert ours.encode(code).tolist() == learned.encode(code).ids
    assert (ours.vocab_size, ours.end_of_document) == (VOCAB_SIZE, VOCAB_SIZE - 1)
    assert len(ours.encode(code)) < 0.45 * len(code.encode()), "it compresses"


def test_sample_comes_from_all_over_the_corpus(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text(f"{chr(0x61 + number) * 12} " * 400)
    ranks = train_tokenizer(open_corpus(str(tmp_path)), 260, max_bytes=26_000)  # 5 of the 20 files
    assert all(token.strip()[0] > ord("a") for token, rank in ranks.items() if rank >= 256)


def test_command_line_end_to_end(
    fox: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = str(tmp_path / "new" / "small.tiktoken")
    command = ["--source", fox.spec, "--vocab-size", "270", "--out", ranks]
    main(command)
    assert "270 tokens (256 bytes, 13 merges, 1 end of document)" in capsys.readouterr().out
    shards = ["--source", fox.spec, "--tokenizer", ranks, "--out", str(tmp_path / "shards")]
    prepare_main([*shards, "--validation-fraction", "0"])
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "exists, and shards may depend on it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--vocab-size", "256"), "--vocab-size 256 is too small: every byte and the end"),
        (("--vocab-size", "5000"), "is too large for this text: after "),
        (("--out", "tokenizer.json"), "must end in .tiktoken"),
        (("--source", "none.txt"), "cannot read the text file"),
    ],
)
def test_bad_arguments(
    fox: Corpus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: tuple[str, str],
    message: str,
) -> None:
    out = tmp_path / "t.tiktoken"
    with pytest.raises(SystemExit, match="2"):
        main(["--source", fox.spec, "--vocab-size", "260", "--out", str(out), *changed])
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_vocabulary_that_the_error_names_works(fox: Corpus) -> None:
    with pytest.raises(ValueError, match="or --vocab-size") as error:
        train_tokenizer(fox, 5000)
    largest = int(str(error.value).rstrip(".").rsplit(" ", 1)[1])
    assert len(ranks := train_tokenizer(fox, largest)) == largest - 1
    assert ranks == train_tokenizer(fox, largest), "the same each time"


def test_without_the_package(fox: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"needs the package tokenizers: .* -m pip install -e '.*\[tokenizer\]'"
    with pytest.raises(ValueError, match=message):
        train_tokenizer(fox, 260)
