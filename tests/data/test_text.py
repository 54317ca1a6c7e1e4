import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.pieces import PIECE_CHARACTERS, is_held_out, split_into_pieces
from torchtitan_diloco.data.text import open_corpus, standard_library


def pieces(spec: object) -> list[str]:
    return [piece.text for piece in open_corpus(str(spec)).pieces()]


def documents(path: Path) -> list[str]:
    found, parts = [], []
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
        ("a.txt", bytes(range(256)), " is not UTF-8 .* or leave it out if it is no text"),
        ("a.jsonl", FINE + b'{"text": "gr\xfc"}', " is not UTF-8 .* byte 0xfc"),
        ("a.jsonl", FINE + b'{"b": "a", "id": 3}', ", line 2: no field \"text\" .* in .'b', 'id'"),
        ("a.jsonl", FINE + b'["text"]', ", line 2: no field \"text\" with a string in .'text'"),
    ],
)
def test_damage_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}{message}"):
        documents(tmp_path / name)


# --- corpora of files ---


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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{}/picture.png", r"picture\.png: unknown kind of file '\.png'; use \.txt \.md \.py \.js"),
        ("{}/c.txt", r"cannot read {}/c\.txt: no such regular file"),
        ("{}/zzz*.txt", r"{}/zzz\*\.txt has no text"),
        ("{}/empty.txt", r"empty\.txt' has no text"),
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
    ours, others = ["b/x.py", "a.py"], ["test/t.py", "b/tests/t.py", "site-packages/p.py"]
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


# --- Hugging Face datasets ---


def test_hugging_face_folders(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(5)]
    texts = [row["text"] for row in rows]
    files, folder = tmp_path / "files", f"hf:{tmp_path}/files"
    files.mkdir()
    (files / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (files / "test.jsonl").write_text(json.dumps({"text": "of the test"}))
    assert pieces(folder) == pieces(f"{folder}:train") == texts
    assert pieces(f"{folder}:test") == ["of the test"]
    assert open_corpus(f"{folder}:test").fingerprint != open_corpus(folder).fingerprint
    with pytest.raises(ValueError, match=r"cannot open .*files:none'"):
        pieces(f"{folder}:none")
    for row, message in (
        ({"content": "a"}, r"row 0: no field \"text\".*\['content'\]"),
        ({"text": ""}, "has no text"),
    ):
        (files / "test.jsonl").unlink(missing_ok=True)
        (files / "train.jsonl").write_text(json.dumps(row))
        with pytest.raises(ValueError, match=message):
            pieces(folder)

    for name in ("/nowhere/at/all", "owner/set/subset:train"):
        message = rf"(?s)cannot open 'hf:{name}' .*write hf:OWNER/DATASET.*the network"
        with pytest.raises(ValueError, match=message):
            pieces(f"hf:{name}")


@pytest.mark.parametrize("name", ["", "owner/", "owner//subset", "a/b/c/d", ":train"])
def test_what_is_no_name_of_a_dataset(name: str) -> None:
    with pytest.raises(ValueError, match=rf'^"hf:{name}" is no name of a dataset: write hf:OWNER'):
        open_corpus(f"hf:{name}")
