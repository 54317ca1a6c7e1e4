import base64
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import tiktoken
from hypothesis import example, given
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

RANKS = {bytes([byte]): byte for byte in range(256)}
BYTES = build_tokenizer("bytes")


def from_ranks(path: Path, ranks: dict[bytes, int]) -> Tokenizer:
    path.write_bytes(format_ranks(ranks))
    return build_tokenizer(str(path))


@given(st.text())
@example("<|endoftext|>")  # a special token in a text is text
def test_bytes_tokenizer_is_utf8(text: str) -> None:
    assert bytes(BYTES.encode(text).tolist()) == text.encode()
    assert BYTES.decode(BYTES.encode(text)) == text


def test_bytes_tokenizer_takes_any_text() -> None:
    assert (BYTES.vocab_size, BYTES.end_of_document) == (257, 256)
    assert len(BYTES.encode("x" * 4_000_000)) == 4_000_000  # hours where it is not linear
    for text, expected in (("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600")):
        assert BYTES.decode(BYTES.encode(text)) == expected


def test_rank_file_merges_by_rank_and_its_fingerprint_is_of_its_content(tmp_path: Path) -> None:
    merges = {"a": b"ab", "b": b"ab", "c": b"ba"}
    first, same, other = (
        from_ranks(tmp_path / f"{name}.tiktoken", RANKS | {merge: 256, b"abc": 257})
        for name, merge in merges.items()
    )
    assert first.encode("abcab").tolist() == [257, 256]
    assert (first.vocab_size, first.end_of_document) == (259, 258)
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_fingerprints_are_frozen(tmp_path: Path) -> None:
    """Prepared corpora of users carry them. That of a rank file depends on SPLIT_PATTERN, too."""
    assert BYTES.fingerprint == "3625b1f403981c51"
    assert from_ranks(tmp_path / "ranks.tiktoken", RANKS).fingerprint == "b9a31c733e71e351"


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


GOOD = [line(token, rank) for token, rank in RANKS.items()]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*GOOD[:9], b"no base64! 9"], r"line 10: .*is not a token in base64"),
        ([*GOOD[:9], b"YQ== x"], r"line 10"),
        ([*GOOD, line(b"ab", 300)], r"line 257: .* rank 256 and a new token should follow"),
        (GOOD[:200], r"no token for 56 of the 256 bytes \(the first is 0xc8\)"),
    ],
)
def test_damaged_rank_file_is_refused(tmp_path: Path, lines: list[bytes], message: str) -> None:
    (tmp_path / "bad.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ValueError, match=rf"(?s)bad\.tiktoken.*{message}"):
        build_tokenizer(str(tmp_path / "bad.tiktoken"))


@pytest.mark.parametrize(("name", "nearest"), [("gtp2", "gpt2"), ("byte", "bytes")])
def test_unknown_name_gets_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf'data\.tokenizer = "{name}".*Did you mean "{nearest}"'):
        build_tokenizer(name)


def test_encoding_that_cannot_be_fetched_names_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise requests.exceptions.ConnectionError("no network in this test")

    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    message = r"(?s)p50k_edit.*could not load.*no network.*TIKTOKEN_CACHE_DIR.*train-tokenizer"
    with pytest.raises(ValueError, match=message):
        build_tokenizer("p50k_edit")


@pytest.mark.parametrize("special", [{"<|endoftext|>": 256, "<|other|>": 300}, {}])
def test_named_encoding_keeps_its_own_end_of_document(
    monkeypatch: pytest.MonkeyPatch, special: dict[str, int]
) -> None:
    encoding = tiktoken.Encoding(
        "named", pat_str=r"[\s\S]", mergeable_ranks=RANKS, special_tokens=special
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["named"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    if not special:
        with pytest.raises(ValueError, match=r'"named": .* with an <\|endoftext\|> token'):
            build_tokenizer("named")
        return
    tokenizer = build_tokenizer("named")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (301, 256)
    assert tokenizer.fingerprint != BYTES.fingerprint
    assert tokenizer.decode_bytes([97, 280, 98]) == "\ufffd".encode(), "280 is a gap"


# --- learning ------------------------------------------------------------------------------------

VOCAB_SIZE = 1500


@pytest.fixture(scope="module")
def learned() -> Any:
    """Learned from 1 MB of code, and what else text can be."""
    odd = "don't DON'T größer 日本語 \U0001f600\u200d 12345 \r\n\r\n  \t x" * 50
    pieces = (piece.text for piece in open_corpus("stdlib").pieces())
    return learn_bpe(iter([*itertools.islice(pieces, 60), odd]), VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def ours(learned: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return from_ranks(folder / "ours.tiktoken", ranks_of(learned))


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


def test_bad_arguments(fox: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.tiktoken"
    for changed, message in (
        (("--vocab-size", "256"), "--vocab-size 256 is too small: every byte and the end"),
        (("--vocab-size", "5000"), "is too large for this text: after "),
        (("--out", "tokenizer.json"), "must end in .tiktoken"),
        (("--source", "none.txt"), "cannot read the text file"),
    ):
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
