import base64
import pickle
import time
from pathlib import Path

import pytest
import requests
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.tokenizer import build_tokenizer, format_ranks

BYTES = {bytes([byte]): byte for byte in range(256)}


def write(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


@given(st.text())
def test_bytes_tokenizer_is_utf8(text: str) -> None:
    tokenizer = build_tokenizer("bytes")
    assert bytes(tokenizer.encode(text).tolist()) == text.encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_tokenizer_has_257_tokens() -> None:
    tokenizer = build_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_time_is_linear_in_the_length() -> None:
    tokenizer = build_tokenizer("bytes")
    start = time.perf_counter()
    assert len(tokenizer.encode("x" * 4_000_000)) == 4_000_000
    assert time.perf_counter() - start < 10, (
        "0.1 s where it is linear, minutes where it is quadratic"
    )


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\ud83d\ude00"])
def test_surrogates_do_not_stop_the_encoding(text: str) -> None:
    decoded = build_tokenizer("bytes").decode(build_tokenizer("bytes").encode(text))
    assert decoded == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_special_tokens_in_a_text_are_text() -> None:
    tokenizer = build_tokenizer("bytes")
    ids = tokenizer.encode("<|endoftext|>")
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == "<|endoftext|>"


def test_rank_file_merges_by_rank(tmp_path: Path) -> None:
    ranks = BYTES | {b"ab": 256, b"abc": 257}
    path = tmp_path / "small.tiktoken"
    path.write_bytes(format_ranks(ranks))
    tokenizer = build_tokenizer(str(path))
    assert tokenizer.encode("abcab").tolist() == [257, 256]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (259, 258)


def test_fingerprint_is_that_of_the_encoding_not_of_the_path(tmp_path: Path) -> None:
    specs = [str(tmp_path / name) for name in ("a.tiktoken", "b.tiktoken", "c.tiktoken")]
    for spec, merge in zip(specs, (b"ab", b"ab", b"ba"), strict=True):
        Path(spec).write_bytes(format_ranks(BYTES | {merge: 256}))
    first, same, other = (build_tokenizer(spec).fingerprint for spec in specs)
    assert first == same != other
    assert build_tokenizer("bytes").fingerprint == "3625b1f403981c51", (
        "prepared corpora of users carry it"
    )


def test_pickled_tokenizer_encodes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "small.tiktoken"
    path.write_bytes(format_ranks(BYTES | {b"ab": 256}))
    tokenizer = build_tokenizer(str(path))
    pickled = pickle.dumps(tokenizer)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled)
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode("abab").tolist() == tokenizer.encode("abab").tolist()


GOOD = [line(token, rank) for token, rank in BYTES.items()]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*GOOD[:9], b"no base64! 9"], r"line 10: .*is not a token in base64"),
        ([*GOOD[:9], b"onlyoneword"], r"line 10: .*is not a token in base64"),
        ([*GOOD[:9], b"YQ== x"], r"line 10"),
        ([*GOOD, line(b"ab", 300)], r"line 257: rank 300 where 256 should follow"),
        ([*GOOD, line(b"a", 256)], r"line 257: token b'a' is there twice"),
        (GOOD[:200], r"no token for 56 of the 256 bytes \(the first is 0xc8\)"),
    ],
)
def test_damaged_rank_file_is_refused_with_its_line(
    tmp_path: Path, lines: list[bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)bad\.tiktoken.*{message}"):
        build_tokenizer(write(tmp_path / "bad.tiktoken", lines))


def test_missing_rank_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none\.tiktoken.*does not exist.*data\.train_tokenizer --source"
    ):
        build_tokenizer(str(tmp_path / "none.tiktoken"))


def test_unreadable_rank_file(tmp_path: Path) -> None:
    (tmp_path / "folder.tiktoken").mkdir()
    with pytest.raises(ValueError, match=r"folder\.tiktoken.*cannot be read"):
        build_tokenizer(str(tmp_path / "folder.tiktoken"))


@pytest.mark.parametrize(
    ("name", "nearest"), [("gtp2", "gpt2"), ("byte", "bytes"), ("cl100k", "cl100k_base")]
)
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
    with pytest.raises(
        ValueError,
        match=r"(?s)p50k_edit.*could not fetch.*no network.*TIKTOKEN_CACHE_DIR.*train_tokenizer",
    ):
        build_tokenizer("p50k_edit")


def test_named_encoding_keeps_its_own_end_of_document(monkeypatch: pytest.MonkeyPatch) -> None:
    special = {"<|endoftext|>": 256, "<|other|>": 300}
    encoding = tiktoken.Encoding(
        "named", pat_str=r"[\s\S]", mergeable_ranks=BYTES, special_tokens=special
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["named"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    tokenizer = build_tokenizer("named")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (301, 256)
    assert tokenizer.fingerprint != build_tokenizer("bytes").fingerprint


def test_named_encoding_without_end_of_document_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = tiktoken.Encoding(
        "endless", pat_str=r"[\s\S]", mergeable_ranks=BYTES, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["endless"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    with pytest.raises(ValueError, match=r'"endless" has no <\|endoftext\|> token'):
        build_tokenizer("endless")
