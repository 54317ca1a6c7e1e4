import gzip
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchtitan_diloco.data.text as text_module
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.pieces import (
    BEGINNING,
    PIECE_CHARACTERS,
    Place,
    is_held_out,
    split_into_pieces,
)
from torchtitan_diloco.data.text import open_corpus, standard_library


def pieces(spec: object) -> list[str]:
    return [piece.text for piece in open_corpus(str(spec)).pieces()]


def documents(path: Path) -> list[str]:
    found = []
    parts = []
    for piece in open_corpus(str(path)).pieces():
        assert 0 < len(piece.text) <= PIECE_CHARACTERS
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last piece ends its document"
    return found


# --- pieces and files ---


@given(st.lists(st.text(alphabet="ab\n", max_size=30)), st.integers(1, 12))
def test_pieces_are_the_text_whatever_the_blocks(blocks: list[str], limit: int) -> None:
    text = "".join(blocks)
    found = list(split_into_pieces(blocks, limit))
    assert "".join(piece for piece, _ in found) == text
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True] * bool(text)
    assert all(0 < len(piece) <= limit for piece, _ in found)
    assert found == list(split_into_pieces([text], limit))
    for piece, ends_document in found:
        assert ends_document or piece.endswith("\n") or "\n" not in piece, "at line ends if any"


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress)])
def test_a_file_or_a_line_of_jsonl_is_a_document(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    text = "x" + "".join(f"{n}, größer \U0001f600 \r\n" for n in range(30_000))  # many blocks
    for times in (1, 2):  # a compressed file may have several frames
        (tmp_path / f"a.txt{suffix}").write_bytes(times * compress(text.encode()))
        assert documents(tmp_path / f"a.txt{suffix}") == [times * text]
    texts = ["one", "two\nlines", "ü" * 70_000, "\ud800 alone"]
    lines = [json.dumps({"back": text[::-1], "text": text}) for text in texts]
    lines += ["", json.dumps({"back": "", "text": ""}), "  "]  # no documents
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress("\n".join(lines).encode()))
    assert documents(path) == [*texts[:3], "\ufffd alone"]
    corpus = open_corpus(str(path), "back")
    assert [piece.text for piece in corpus.pieces()][:2] == ["eno", "senil\nowt"]
    assert corpus.fingerprint != open_corpus(str(path)).fingerprint


def damaged(content: bytes) -> list[bytes]:
    middle = len(content) // 2
    flipped = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    flipped = content[:middle] + flipped + content[middle + 64 :]
    return [content[:middle], flipped, b"not compressed", content + b"rubbish"]


LINES = b"".join(b"%d\n" % (n * n) for n in range(50_000))
FINE = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            ("a.txt.gz", content, ".*: copy it again, or rename it")
            for content in damaged(gzip.compress(LINES))
        ),
        ("a.txt", b"ok\n" * 300_000 + b"gr\xfc\xdfe", " is not UTF-8 .*iconv"),
        ("a.jsonl", FINE + b"{nope", r", line 2: not JSON \(.*: correct or delete the line\..*"),
        (
            "a.jsonl",
            FINE + b'{"text": "a", "id": ' + b"7" * 5000 + b"}",
            ", line 2: cannot be read, as a number in it has too many digits: correct or delete",
        ),
        (
            "a.jsonl",
            FINE + b"[" * 100_000,
            ", line 2: cannot be read, as it is nested too deep: correct or delete the line",
        ),
        ("a.txt", bytes(range(256)), " is not UTF-8 .* or leave it out if it is no text"),
        ("a.jsonl", FINE + b'{"text": "gr\xfc"}', ", line 2 is not UTF-8 .* byte 0xfc"),
        (
            "a.jsonl",
            FINE + b'{"b": "a", "id": 3}',
            ', line 2: there is .* "text" .*: b, id. Set --text-field',
        ),
        ("a.jsonl", FINE + b'["text"]', ", line 2: there is .* \"text\" .*; it is .'text'"),
    ],
)
def test_damage_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}{message}"):
        documents(tmp_path / name)


# --- corpora of files ---


@pytest.mark.parametrize("name", ["gr\udcfc.txt", "a.txt,gr\udcfc/*.txt"])
def test_a_name_in_another_encoding_is_refused(name: str) -> None:
    """The index and the checkpoints of a run could not contain it."""
    with pytest.raises(UserError, match=r"gr\\udcfc.* is not text in UTF-8, .* rename the file"):
        open_corpus(name)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "sub").mkdir()
    lines = b'{"text": "c1"}\n{"text": "c2"}\n'
    (tmp_path / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("hidden")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path


def test_paths_folders_and_globs(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(texts))
    for spec, expected in {
        "{}": ["a", "b", "c1", "c2"],  # regular files, without other kinds, hidden and empty ones
        "{}/b*.txt": ["b"],
        "{}/**/*.jsonl*": ["c1", "c2"],
        "{}/b.txt, {}/a.md": ["b", "a"],  # the order is the user's
        "{}/b.txt,{}": ["b", "a", "c1", "c2"],  # nothing is read twice
        "~/a.md,~/b*.txt": ["a", "b"],
    }.items():
        assert pieces(spec.replace("{}", str(texts))) == expected


def test_nothing_is_left_out_or_read_twice_because_of_how_it_is_named(
    texts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = texts / "nothing"
    (elsewhere / "e.TXT").write_text("e")
    (elsewhere / "sub").symlink_to(texts / "sub")
    (elsewhere / "f.txt").symlink_to(texts / "b.txt")
    (elsewhere / "circle.txt").symlink_to(elsewhere / "circle.txt")
    assert pieces(str(elsewhere)) == ["e", "b"]
    assert [line.partition(" is")[0] for line in caplog.messages] == [str(elsewhere / "sub")]
    with pytest.raises(ValueError, match=r"circle\.txt: no such regular file"):
        pieces(str(elsewhere / "circle.txt"))
    monkeypatch.chdir(texts)
    assert pieces(f"b.txt,{texts}/b.txt,./b.txt,nothing/../b.txt") == ["b"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".GZ"])
def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix else bytes
    text, lines = (tmp_path / f"{name}{suffix}" for name in ("a.txt", "b.jsonl"))
    text.write_bytes(pack("\ufeffé 1".encode()))
    lines.write_bytes(pack('\ufeff{"text": "c1"}\n{"text": "c2"}\n'.encode()))
    assert pieces(str(text)) == ["é 1"]
    assert pieces(str(lines)) == ["c1", "c2"]
    for file in (text, lines):
        whole = list(open_corpus(str(file)).read(BEGINNING).pieces)
        for number, located in enumerate(whole, start=1):
            rest = open_corpus(str(file)).read(located.after).pieces
            assert [one.piece for one in rest] == [one.piece for one in whole[number:]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{}/picture.png", r"picture\.png: unknown kind of file '\.png'; use \.txt \.md \.py \.js"),
        ("{}/c.txt", r"cannot read {}/c\.txt: no such regular file"),
        ("{}/zzz*.txt", r"{}/zzz\*\.txt has no text"),
        ("{}/empty.txt", r'corpus "{}/empty\.txt" has no text, as all of it is empty: give other'),
        ("{}/c.md,stdlib", r"^stdlib cannot be in a list of files: give it a weight in data\.mixt"),
        ("s3://bucket/a", r'^"s3://bucket/a" is a URL: only files and hf:NAME.* are read: downl'),
        ("{}/c.md, https://a/b.txt", r'^"https://a/b\.txt" is a URL'),
        ("{}/nothing", r"{}/nothing has no text .*and no token shards"),
        ("{}/link*.txt", r"cannot read {}/link\.txt"),
        ("{}/pipe*.txt", r"cannot read .*pipe\.txt: no such regular file"),
        (" , ", r"names no file"),
    ],
)
def test_errors_name_what_is_wrong(texts: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{}", str(texts))):
        pieces(spec.replace("{}", str(texts)))


def test_fingerprint_follows_the_files(texts: Path) -> None:
    def fingerprint() -> str:
        return open_corpus(str(texts)).fingerprint

    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    (texts / "b.txt").write_text("longer")
    seen.append(fingerprint())
    os.utime(texts / "b.txt", ns=(1, 1))
    seen.append(fingerprint())
    (texts / "b.txt").rename(texts / "renamed.txt")
    assert len({*seen, fingerprint()}) == 4


# --- the standard library ---


def test_standard_library_without_tests_and_packages(tmp_path: Path) -> None:
    ours = ["b/x.py", "a.py"]
    others = ["test/t.py", "b/tests/t.py", "site-packages/p.py"]
    for name in [*ours, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert standard_library(tmp_path) == [tmp_path / "a.py", tmp_path / "b/x.py"]


@given(st.floats(0.0, 0.5), st.integers(1, 3000))
def test_held_out_share_is_exact_and_even(fraction: float, count: int) -> None:
    held_out = [number for number in range(count) if is_held_out(number, fraction)]
    assert abs(len(held_out) - fraction * count) <= 1
    gaps = [second - first for first, second in itertools.pairwise(held_out)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.floats(0.0, 0.5), st.integers(1, 300))
def test_at_least_one_of_several_pieces_is_held_out(fraction: float, count: int) -> None:
    last = count - 1
    held_out = [one for one in range(count) if is_held_out(one, fraction, is_last=one == last)]
    evenly = [one for one in range(count) if is_held_out(one, fraction)]
    if fraction == 0 or count == 1:
        assert held_out == []
    else:
        assert held_out == (evenly or [last])


# --- places ---


@given(st.text(alphabet="ab\n\u00fc\U0001f600", max_size=40), st.integers(0, 40))
def test_reading_continues_at_each_place(text: str, half: int) -> None:
    """In all kinds of files, it gives the pieces and the places that follow."""
    lines = "".join(
        f"{json.dumps({'text': part}, ensure_ascii=False)}\n \n" for part in (text[:half], text)
    )
    small = partial(split_into_pieces, limit=3)
    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(text_module, "split_into_pieces", small),
    ):
        folder = Path(name)
        for file, content in (("a.txt", text), ("b.jsonl", lines), ("c.md", "end")):
            (folder / file).write_text(content, newline="")
            frames = [content[:half].encode(), content[half:].encode()]
            (folder / f"{file}.gz").write_bytes(b"".join(map(gzip.compress, frames)))
        corpus = open_corpus(name)
        located = [*corpus.read(BEGINNING).pieces]
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert located[-1].after.bytes == corpus.read(BEGINNING).bytes == size
        assert [*corpus.pieces()] == [piece for piece, _ in located]
        for number, (_, place) in enumerate(located, start=1):
            written_down = msgspec.json.decode(msgspec.json.encode(place), type=Place)
            reading = corpus.read(written_down)
            assert [*reading.pieces] == located[number:]
            assert ("reading continues at byte" in reading.how) == (number < len(located))
