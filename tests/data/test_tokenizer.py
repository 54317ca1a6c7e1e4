import base64
from pathlib import Path

import pytest
import requests
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer, format_ranks

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
    message = r"(?s)p50k_edit.*could not load.*no network.*TIKTOKEN_CACHE_DIR.*train_tokenizer"
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
