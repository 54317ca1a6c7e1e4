import gzip
import json
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.text_files import (
    PIECE_CHARACTERS,
    Piece,
    documents_of_file,
    split_into_pieces,
)


def read(path: Path) -> list[Piece]:
    return list(documents_of_file(path))


def texts(path: Path) -> list[str]:
    """The documents, put together again."""
    documents, parts = [], []
    for piece in read(path):
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last piece ends its document"
    return documents


def compressed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


@given(st.lists(st.text(alphabet="ab\n", max_size=30)), st.integers(1, 12))
def test_pieces_are_the_text_whatever_the_blocks(blocks: list[str], limit: int) -> None:
    text = "".join(blocks)
    pieces = list(split_into_pieces(blocks, limit))
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True] * bool(text)
    assert all(0 < len(piece) <= limit for piece, _ in pieces)
    assert pieces == list(split_into_pieces([text], limit))


@given(st.lists(st.text(alphabet="ab", max_size=5), min_size=1))
def test_pieces_end_at_line_ends_where_lines_are_short(lines: list[str]) -> None:
    *others, _ = split_into_pieces(["".join(line + "\n" for line in lines)], 8)
    assert all(piece.endswith("\n") for piece, _ in others)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".py"])
def test_a_text_file_is_one_document(tmp_path: Path, kind: str, suffix: str) -> None:
    text = "".join(
        f"line {number}, größer \U0001f600 \r\n" for number in range(30_000)
    )  # beyond a block and a piece
    path = compressed(tmp_path / f"a{kind}{suffix}", text.encode())
    assert texts(path) == [text]
    assert max(len(piece.text) for piece in read(path)) <= PIECE_CHARACTERS
    assert read(path)[-1].bytes_read == path.stat().st_size


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_of_jsonl_is_a_document(tmp_path: Path, suffix: str) -> None:
    documents = ["one", "two\nlines", "ü" * 70_000, "\ud800 alone"]
    lines = [
        json.dumps({"id": number, "text": document}) for number, document in enumerate(documents)
    ]
    content = "\n".join(
        [*lines, "", json.dumps({"text": ""}), "  "]
    ).encode()  # blank lines and no text: no document
    assert texts(compressed(tmp_path / f"a.jsonl{suffix}", content)) == documents


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_frames_in_one_file(tmp_path: Path, suffix: str) -> None:
    frames = [
        compressed(tmp_path / f"{number}{suffix}", b"frame %d\n" % number).read_bytes()
        for number in range(3)
    ]
    path = tmp_path / f"all.txt{suffix}"
    path.write_bytes(b"".join(frames))
    assert texts(path) == ["frame 0\nframe 1\nframe 2\n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "not compressed", "rubbish behind"])
def test_damaged_compression_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = compressed(
        tmp_path / f"a.txt{suffix}", b"".join(b"%d\n" % (n * n) for n in range(50_000))
    )
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "cut": content[:middle],
            "flipped": content[:middle]
            + bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
            + content[middle + 64 :],
            "not compressed": b"plain text",
            "rubbish behind": content + b"rubbish",
        }[damage]
    )
    with pytest.raises(ValueError, match=rf"a\.txt{suffix} is not a whole {suffix} file"):
        read(path)


def test_zstd_without_its_package_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        ValueError,
        match=r"a\.txt\.zst needs the package zstandard: .* -m pip install -e '.*\[zstd\]'",
    ):
        read(compressed(tmp_path / "a.txt.zst", b"text"))


@pytest.mark.parametrize("before", [0, 10, 300_000])
def test_bytes_that_are_not_utf8_are_named_by_line_and_offset(tmp_path: Path, before: int) -> None:
    head = b"ok\n" * before
    path = tmp_path / "latin.txt"
    path.write_bytes(head + b"gr\xfc\xdfe\n")
    with pytest.raises(
        ValueError,
        match=rf"latin\.txt, line {before + 1} \(byte {3 * before + 2}\) is not UTF-8.*iconv",
    ):
        read(path)


def test_a_character_cut_off_at_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_bytes(b"one\ntwo \xf0\x9f\x98")
    with pytest.raises(ValueError, match=r"cut\.txt, line 2 \(byte 8\) is not UTF-8"):
        read(path)


@given(st.integers(1, 3))
def test_characters_across_blocks(shift: int) -> None:
    text = "x" * shift + "\U0001f600" * 100_000
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emoji.txt"
        path.write_text(text, encoding="utf-8")
        assert texts(path) == [text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{nope", r"not JSON"),
        (b"[" * 100_000, r"not JSON"),
        (b'{"text": "gr\xfc"}', r"\(byte 12 of the line\) is not UTF-8"),
        (
            b'{"content": "a", "id": 3}',
            r"no field \"text\" with a string; its fields are \['content', 'id'\]",
        ),
        (b'{"text": 3}', r"no field \"text\" with a string"),
        (b'["text"]', r"no field \"text\" with a string; it is b'\[\"text\"\]'"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 2.*{message}"):
        read(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*gone\.txt"):
        read(tmp_path / "gone.txt")
