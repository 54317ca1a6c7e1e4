import itertools
import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchtitan_diloco.data.shards as shards_module
from tests.data.conftest import MakeShards
from torchtitan_diloco.data.shard_writer import ShardWriter
from torchtitan_diloco.data.shards import (
    HEADER_BYTES,
    TokenShards,
    read_header,
    token_dtype,
    write_manifest,
)
from torchtitan_diloco.data.tokenizer import build_tokenizer, format_ranks


def test_any_range_across_shards(make_shards: MakeShards) -> None:
    shards = TokenShards(make_shards(), "train")
    assert len(shards) == 1000
    expected = np.arange(1000) % 251

    @given(st.integers(0, 999), st.integers(1, 1000))
    def check(start: int, length: int) -> None:
        stop = min(start + length, 1000)
        assert np.array_equal(shards.read(start, stop), expected[start:stop])

    check()
    borders = [
        number
        for end in (0, 212, 424, 848, 1000)
        for number in (end - 1, end, end + 1)
        if 0 <= number <= 1000
    ]
    for start, stop in itertools.combinations(borders, 2):
        assert np.array_equal(shards.read(start, stop), expected[start:stop])


def test_shards_are_closed_by_the_piece_that_fills_them(make_shards: MakeShards) -> None:
    folder = make_shards()  # pieces of 53 tokens, shards of 170
    headers = [read_header(path) for path in sorted(folder.glob("train-*"))]
    assert [header.tokens for header in headers] == [212, 212, 212, 212, 152]
    assert [(header.first_piece, header.end_piece) for header in headers][:2] == [(0, 4), (4, 8)]
    assert [header.documents for header in headers] == [4, 4, 4, 4, 3]


def test_the_format_to_the_byte(make_shards: MakeShards) -> None:
    """As docs/data.md gives it: other programs may read and write shards."""
    content = (make_shards(validation=5) / "validation-00000.tokens").read_bytes()
    payload = struct.pack("<5H", 0, 1, 2, 3, 4)
    fields = struct.pack("<8sIIIIQQQQ", b"TDTOKENS", 1, 2, 257, zlib.crc32(payload), 5, 1, 0, 1)
    fields += bytes.fromhex(build_tokenizer("bytes").fingerprint)
    assert content == (fields + struct.pack("<I", zlib.crc32(fields))).ljust(128, b"\0") + payload


@pytest.mark.parametrize(("vocab_size", "width"), [(257, 2), (2**16, 2), (2**16 + 1, 4)])
def test_two_bytes_a_token_where_they_suffice(vocab_size: int, width: int) -> None:
    assert token_dtype(vocab_size).itemsize == width


def test_vocabulary_beyond_two_bytes(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"%06d" % number: 256 + number for number in range(70_000)}
    (tmp_path / "large.tiktoken").write_bytes(format_ranks(ranks))
    tokenizer = build_tokenizer(str(tmp_path / "large.tiktoken"))
    writer = ShardWriter(tmp_path, "train", tokenizer, 100)
    writer.add(0, np.array([1, 70_000, tokenizer.end_of_document]), ends_document=True)
    writer.finish_shard()
    write_manifest(tmp_path, {"source": "test"})
    assert TokenShards(tmp_path, "train", tokenizer).read(0, 3).tolist() == [1, 70_000, 70_256]


def test_more_shards_than_maps_at_once(
    make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_MAPS_AT_ONCE", 2)
    shards = TokenShards(make_shards(shard_tokens=1), "train")
    for start in (0, 500, 0, 900, 100):
        assert shards.read(start, start + 100).tolist() == [
            token % 251 for token in range(start, start + 100)
        ]
    assert len(shards._maps) == 2


def test_fingerprint_is_of_the_tokens_not_of_the_place(make_shards: MakeShards) -> None:
    first, copy = (TokenShards(make_shards(name), "train") for name in ("a", "b"))
    other = TokenShards(make_shards("c", train=999), "train")
    assert first.fingerprint == copy.fingerprint != other.fingerprint
    assert first.fingerprint != TokenShards(first.folder, "validation").fingerprint


def test_pickled_shards_map_the_files_again(make_shards: MakeShards) -> None:
    shards = TokenShards(make_shards(train=5000, shard_tokens=5000), "train")
    shards.read(0, 10)
    pickled = pickle.dumps(shards)
    assert len(pickled) < 3000
    assert pickle.loads(pickled).read(4000, 4002).tolist() == [4000 % 251, 4001 % 251]


def change(path: Path, at: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


def seal(path: Path, vocab_size: int) -> None:
    """Changes the header and makes its checksum right again."""
    change(path, 16, struct.pack("<I", vocab_size))
    change(path, 64, struct.pack("<I", zlib.crc32(path.read_bytes()[:64])))


SECOND = "train-00001.tokens"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: change(path, 0, b"X"), r"is not a token shard: it begins with b'XDTOKENS'"),
        (
            lambda path: change(path, 8, b"\2"),
            r"has version 2 of the shard format, this code reads version 1",
        ),
        (lambda path: change(path, 30, b"X"), r"the header of .* is damaged"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            r"is truncated: 551 bytes where 212 tokens .* make 552",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"12"),
            r"is followed by something else: 554 bytes",
        ),
        (lambda path: path.write_bytes(b"TDTOKENS"), r"is too short for a token shard: 8 bytes"),
        (lambda path: path.unlink(), r"cannot read the token shard .*No such file"),
        (
            lambda path: path.write_bytes(path.with_name("train-00004.tokens").read_bytes()),
            r"is not the shard that corpus",
        ),
        (lambda path: seal(path, vocab_size=258), r"was written with another tokenizer than"),
    ],
)
def test_damaged_shard_is_refused_on_opening(
    make_shards: MakeShards, damage: object, message: str
) -> None:
    path = make_shards() / SECOND
    assert callable(damage)
    damage(path)
    with pytest.raises(ValueError, match=rf"(?s){message}") as error:
        TokenShards(path.parent, "train")
    assert SECOND in str(error.value)


def test_token_beyond_the_vocabulary_is_named_when_it_is_read(make_shards: MakeShards) -> None:
    folder = make_shards()
    change(folder / SECOND, HEADER_BYTES + 2 * 7, struct.pack("<H", 257))
    shards = TokenShards(folder, "train")
    shards.read(0, 219)
    with pytest.raises(
        ValueError, match=rf"{SECOND} is damaged: token 7 is 257, the vocabulary ends at 256"
    ):
        shards.read(210, 230)
    with pytest.raises(ValueError, match=r"token 7 is 257"):
        shards.read(219, 220)


def test_verify_finds_a_flipped_bit(make_shards: MakeShards) -> None:
    folder = make_shards()
    TokenShards(folder, "train").verify()
    change(folder / SECOND, HEADER_BYTES + 9, b"\1")
    with pytest.raises(ValueError, match=rf"{SECOND} is damaged: its tokens have checksum 0x"):
        TokenShards(folder, "train").verify()


def test_unfinished_folder(make_shards: MakeShards) -> None:
    folder = make_shards()
    (folder / "corpus.json").unlink()
    with pytest.raises(
        ValueError, match=r"is not a finished folder of token shards.*run the same command again"
    ):
        TokenShards(folder, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot read the manifest"), ('{"format_version": 9}', "version 1")],
)
def test_damaged_manifest(make_shards: MakeShards, content: str, message: str) -> None:
    folder = make_shards()
    (folder / "corpus.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        TokenShards(folder, "train")


def test_empty_splits(make_shards: MakeShards) -> None:
    with pytest.raises(
        ValueError, match=r"holds out nothing for validation .*raise data\.validation_fraction"
    ):
        TokenShards(make_shards("a", validation=0), "validation")
    with pytest.raises(
        ValueError, match=r"has no tokens to train on; its source is 'made by a test'"
    ):
        TokenShards(make_shards("b", train=0), "train")


def test_another_tokenizer_is_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    (tmp_path / "other.tiktoken").write_bytes(
        format_ranks({bytes([byte]): 255 - byte for byte in range(256)})
    )
    other = build_tokenizer(str(tmp_path / "other.tiktoken"))
    with pytest.raises(
        ValueError,
        match=r'other\.tiktoken" \(257 tokens, .*is not what .* was prepared with: "bytes"',
    ):
        TokenShards(make_shards(), "train", other)


def test_manifest_lists_the_shards(make_shards: MakeShards) -> None:
    manifest = json.loads((make_shards() / "corpus.json").read_text())
    train = manifest["splits"]["train"]
    assert (train["tokens"], train["documents"], len(train["shards"])) == (1000, 19, 5)
    assert train["shards"][0]["file"] == "train-00000.tokens"
