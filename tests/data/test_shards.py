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
from torchtitan_diloco.data.shards import SPLITS, TokenShards, token_type
from torchtitan_diloco.data.tokenizer import build_tokenizer

SECOND, INDEX = "train-00001.tokens", "corpus.json"


def flip_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_any_range_across_shards(make_shards: MakeShards) -> None:
    shards, expected = TokenShards(make_shards(), "train"), np.arange(1000) % 251
    assert len(shards) == 1000
    bounds = [0, 1, 2, 211, 212, 213, 423, 424, 425, 700, 848, 999, 1000]  # shards of 212 tokens
    for start, stop in itertools.combinations(bounds, 2):
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


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (SECOND, lambda old: old[:-1], f"{SECOND} is damaged: it has 423 bytes instead of 424"),
        (SECOND, lambda old: old + b"12", f"{SECOND}.* 426 bytes instead of 424"),
        (SECOND, None, f"{SECOND}.* 0 bytes instead of 424"),
        (SECOND, lambda old: flip_bit(old, 0), f"{SECOND} is damaged: its checksum is wrong"),
        (SECOND, lambda old: flip_bit(old, 423), f"{SECOND} is damaged: its checksum is wrong"),
        # As if another program had written other tokens, with the right checksums.
        (
            INDEX,
            lambda old: old.replace(b": 257", b": 100"),
            f"{SECOND} has token 250 of a vocabulary of 100",
        ),
        (INDEX, None, "is no finished folder of token shards.*run the same `prepare` again"),
        (INDEX, lambda _: b'{"format_version": 3}', "cannot .*missing required field `settings`"),
        (
            INDEX,
            lambda old: old.replace(b'version": 3', b'version": 9'),
            "version 9 .* instead of 3",
        ),
    ],
)
def test_damage_is_found(
    make_shards: MakeShards, file: str, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    path = make_shards() / file
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    shards_module._map_shard.cache_clear()  # as in a new process
    with pytest.raises(ValueError, match=message):
        TokenShards(path.parent, "train").read(300, 301)


def test_a_shard_is_checked_when_it_is_first_read(make_shards: MakeShards) -> None:
    folder = make_shards()  # shards of 212 tokens
    (folder / SECOND).write_bytes(flip_bit((folder / SECOND).read_bytes(), 0))
    shards = TokenShards(folder, "train")
    shards.read(0, 212)
    with pytest.raises(ValueError, match=rf"{SECOND} is damaged: its checksum is wrong"):
        shards.read(211, 213)


def test_another_tokenizer_is_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    other = build_tokenizer(save_tokenizer(tmp_path / "other.json", 257))
    with pytest.raises(ValueError, match=r'other\.json" \(.* was prepared with "bytes"'):
        TokenShards(make_shards(), "train", other)
