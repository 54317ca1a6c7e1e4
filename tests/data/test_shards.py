import itertools
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import torchtitan_diloco.data.shards as shards_module
from tests.conftest import save_tokenizer
from tests.data.conftest import MakeShards
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.shards import SPLITS, TokenShards, find_damage, token_type
from torchtitan_diloco.data.tokenizer import build_tokenizer

SECOND = "train-00001.tokens"
INDEX = "corpus.json"
BOUNDS = [0, 1, 2, 211, 212, 213, 423, 424, 425, 700, 848, 999, 1000]  # shards of 212 tokens


def flip_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_any_range_across_shards(make_shards: MakeShards) -> None:
    shards = TokenShards(make_shards(), "train")
    expected = np.arange(1000) % 251
    assert len(shards) == 1000
    for start, stop in itertools.combinations(BOUNDS, 2):
        assert np.array_equal(shards.read(start, stop), expected[start:stop])


def test_the_format_to_the_byte(make_shards: MakeShards) -> None:
    """As docs/data-and-models.md gives it: other programs may read and write shards."""
    folder = make_shards(validation=5)  # pieces of 53 tokens, shards closed at 170
    payload = struct.pack("<5H", 0, 1, 2, 3, 4)
    assert (folder / "validation-00000.tokens").read_bytes() == payload
    index = json.loads((folder / "corpus.json").read_text())
    shard = {"file": "validation-00000.tokens", "tokens": 5, "checksum": zlib.crc32(payload)}
    expected = {"tokens": 5, "documents": 1, "shards": [shard | {"last_piece": 0}]}
    assert (index["format_version"], index["splits"]["validation"]) == (3, expected)
    train = [(one["tokens"], one["last_piece"]) for one in index["splits"]["train"]["shards"]]
    assert train == [(212, 3), (212, 7), (212, 11), (212, 15), (152, 18)]


def test_a_vocabulary_beyond_two_bytes(make_shards: MakeShards) -> None:
    words = 2**16 + 1
    folder = make_shards(train=70_000, shard_tokens=100_000, words=words, vocab_size=words)
    assert np.array_equal(TokenShards(folder, "train").read(0, 70_000), np.arange(70_000) % words)
    assert token_type(2**16).itemsize == 2


def test_fingerprint_depends_on_the_tokens_only(make_shards: MakeShards) -> None:
    first, copy = (TokenShards(make_shards(name), "train").fingerprint for name in ("a", "b"))
    folder = make_shards("c", train=999)
    others = {TokenShards(folder, split).fingerprint for split in SPLITS}
    assert first == copy
    assert len({first, *others}) == 3


def damage(path: Path, change: Callable[[bytes], bytes] | None) -> None:
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    shards_module._map_shard.cache_clear()  # as in a new process


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: old[:-1], "it has 423 bytes instead of 424"),
        (lambda old: old + b"12", "it has 426 bytes instead of 424"),
        (None, "it has 0 bytes instead of 424"),
    ],
)
def test_a_shard_of_another_size_is_found_at_the_start(
    make_shards: MakeShards, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    folder = make_shards()
    damage(folder / SECOND, change)
    assert find_damage(folder)[1] == [f"{SECOND}: {message}"]
    with pytest.raises(ValueError, match=rf"damaged: {SECOND}: {message};.* doctor --corpus"):
        TokenShards(folder, "train")


@pytest.mark.parametrize("at", [0, 200, 423])
def test_reading_all_of_a_corpus_finds_any_changed_bit(make_shards: MakeShards, at: int) -> None:
    folder = make_shards()
    assert find_damage(folder) == ("7 files, 0.00 GB", [])
    damage(folder / SECOND, lambda old: flip_bit(old, at))
    assert find_damage(folder)[1] == [f"{SECOND}: its checksum is wrong"]


def test_a_read_looks_at_nothing_but_what_it_returns(make_shards: MakeShards) -> None:
    """All other tokens are damaged, and whoever reads one of them finds it."""
    folder = make_shards()
    expected = np.arange(1000) % 251
    files = sorted(folder.glob("train-*"))
    whole = [np.fromfile(file, "<u2") for file in files]
    for start, stop in itertools.combinations(BOUNDS, 2):
        first = 0
        for file, tokens in zip(files, whole, strict=True):
            places = first + np.arange(len(tokens))
            inside = (start <= places) & (places < stop)
            np.where(inside, tokens, 2**16 - 1).astype("<u2").tofile(file)
            first += len(tokens)
        shards_module._map_shard.cache_clear()
        shards = TokenShards(folder, "train")
        assert np.array_equal(shards.read(start, stop), expected[start:stop])
        for wider in {(max(start - 1, 0), stop), (start, min(stop + 1, 1000))} - {(start, stop)}:
            with pytest.raises(ValueError, match="it has token 65535, of a vocabulary of 257"):
                shards.read(*wider)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b'{"format_version": 3}', "missing required field `settings`.* delete it"),
        (lambda _: b"\0", "cannot be read .*: copy the folder again"),
        (lambda old: old.replace(b'version": 3', b'version": 9'), "version 9 .* instead of 3"),
        (lambda old: old.replace(b'"vocab_size": 257', b'"vocab_size": "257"'), "whole number"),
        (lambda old: old.replace(b"tokenizer_fingerprint", b"else"), "is None instead of a text"),
        (None, "has no token shards .*: give the folder"),
    ],
)
def test_an_index_that_cannot_be_used(
    make_shards: MakeShards, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    folder = make_shards()
    damage(folder / INDEX, change)
    for use in (find_damage, lambda folder: TokenShards(folder, "train")):
        with pytest.raises(UserError, match=message):
            use(folder)


def test_a_token_beyond_the_vocabulary_with_the_right_checksum(make_shards: MakeShards) -> None:
    """As another program may write it."""
    folder = make_shards()
    message = f"{SECOND}: it has token 250, of a vocabulary of 100"
    damage(folder / INDEX, lambda old: old.replace(b": 257", b": 100"))
    assert message in find_damage(folder)[1]
    TokenShards(folder, "train").read(251, 350)
    with pytest.raises(UserError, match=message):
        TokenShards(folder, "train").read(230, 260)


def test_another_tokenizer_is_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    other = build_tokenizer(save_tokenizer(tmp_path / "other.json", 257))
    with pytest.raises(ValueError, match=r'other\.json" \(.* was prepared with "bytes"'):
        TokenShards(make_shards(), "train", other)
