import gzip
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.data.corpora import StandardLibrary, is_held_out, open_corpus


def documents(spec: str) -> list[str]:
    return [piece.text for piece in open_corpus(spec).pieces()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "c1"}\n{"text": "c2"}\n')
    )
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("hidden")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            "{}",
            ["a", "b", "c1", "c2"],
        ),  # other files, hidden ones and empty ones are left out of a folder
        ("{}/*.txt", ["b"]),
        ("{}/**/*.jsonl*", ["c1", "c2"]),
        ("{}/b.txt, {}/a.md", ["b", "a"]),  # the order is the user's
        ("{}/b.txt,{}", ["b", "a", "c1", "c2"]),  # nothing is read twice
    ],
)
def test_paths_folders_and_globs(texts: Path, spec: str, expected: list[str]) -> None:
    assert documents(spec.replace("{}", str(texts))) == expected


def test_tilde_is_the_home_folder(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(texts))
    assert documents("~/a.md,~/*.txt") == ["a", "b"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "{}/picture.png",
            r"picture\.png: unknown kind of file '\.png'; a corpus is made of \.txt \.md \.py \.jsonl, each",
        ),
        ("{}/b.text", r"the text file {}/b\.text does not exist; nearest in {}: b\.txt"),
        ("{}/subb/c.txt", r"/subb/c\.txt does not exist; nearest in {}: sub"),
        ("{}/zzz*.txt", r"no file matches {}/zzz\*\.txt"),
        (
            "{}/nothere/*.qqqqqqq",
            r"no file matches {}/nothere/\*\.qqqqqqq; {} has nothing of a similar name",
        ),
        ("{}/empty.txt", r"empty\.txt' has no text: all of its 1 files"),
        ("{}/.hidden/none", r"does not exist"),
        (" , ", r"names no file"),
        ("", r"names no file"),
    ],
)
def test_errors_name_what_is_wrong(texts: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{}", str(texts))):
        documents(spec.replace("{}", str(texts)))


def test_folder_without_text(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=rf"the folder {tmp_path} has no text file .*no folder of token shards either",
    ):
        open_corpus(str(tmp_path))


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"cannot read a file of the corpus .*gone|link\.txt"):
        open_corpus(str(tmp_path / "*.txt"))


def test_fingerprint_follows_the_files(texts: Path) -> None:
    def fingerprint() -> str:
        return open_corpus(str(texts)).fingerprint

    changes: list[Callable[[], object]] = [
        lambda: (texts / "b.txt").write_text("longer"),
        lambda: os.utime(texts / "b.txt", ns=(1, 1)),
        lambda: (texts / "b.txt").rename(texts / "renamed.txt"),
        lambda: (texts / "new.txt").write_text("new"),
    ]
    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    for change in changes:
        change()
        seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("spec", "name"), [("{}/*.txt", "texts"), ("{}/notes.v2.txt", "notes"), ("{}", "texts")]
)
def test_name_is_fit_for_a_file(tmp_path: Path, spec: str, name: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "notes.v2.txt").write_text("a")
    corpus = open_corpus(spec.replace("{}", str(folder)))
    assert corpus.name == name


def test_standard_library_is_there_and_repeatable() -> None:
    corpus = open_corpus("stdlib")
    first = list(corpus.pieces())
    assert sum(len(piece.text) for piece in first) > 3_000_000
    assert first == list(open_corpus("stdlib").pieces())
    own = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
    assert own[:5000] in "".join(piece.text for piece in first)
    assert corpus.fingerprint == open_corpus("stdlib").fingerprint


def test_standard_library_leaves_out_tests_and_packages(tmp_path: Path) -> None:
    for name in (
        "b/x.py",
        "a.py",
        "test/t.py",
        "b/tests/t.py",
        "site-packages/p.py",
        "b/__pycache__/c.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [piece.text for piece in StandardLibrary(tmp_path).pieces()] == ["a.py", "b/x.py"]


def test_standard_library_in_old_encodings(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_bytes("# coding: latin-1\n# Gr\u00fc\u00dfe\n".encode("latin-1"))
    (piece,) = StandardLibrary(tmp_path).pieces()
    assert piece.text == "# coding: latin-1\n# Grüße\n"
    (tmp_path / "broken.py").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match=r"cannot read .*broken\.py of the standard library"):
        list(StandardLibrary(tmp_path).pieces())


def test_python_without_source(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"{tmp_path} has no \.py file; set data\.corpus to text files"
    ):
        StandardLibrary(tmp_path)


@given(st.floats(0.0, 0.5), st.integers(1, 3000))
def test_held_out_share_is_exact_and_even(fraction: float, pieces: int) -> None:
    held_out = [number for number in range(pieces) if is_held_out(number, fraction)]
    assert abs(len(held_out) - fraction * pieces) <= 1
    gaps = [second - first for first, second in itertools.pairwise(held_out)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [{"text": f"row {number}"} for number in range(5)]


def test_hugging_face_folder_of_files(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"text": "of the test"}))
    assert (
        documents(f"hf:{folder}")
        == documents(f"hf:{folder}:train")
        == [row["text"] for row in rows]
    )
    assert documents(f"hf:{folder}:test") == ["of the test"]
    assert open_corpus(f"hf:{folder}:test").fingerprint != open_corpus(f"hf:{folder}").fingerprint
    with pytest.raises(
        ValueError, match=r"cannot open the corpus 'hf:.*:nosplit'.*the split \(\"nosplit\"\) right"
    ):
        documents(f"hf:{folder}:nosplit")


def test_hugging_face_folder_saved_by_the_library(
    tmp_path: Path, rows: list[dict[str, str]]
) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        assert documents(f"hf:{tmp_path / name}:train") == [row["text"] for row in rows]
    with pytest.raises(ValueError, match=r"cannot open the corpus .*several:other"):
        documents(f"hf:{tmp_path / 'several'}:other")


@pytest.mark.parametrize(
    ("row", "message"),
    [({"content": "a"}, r"row 0: no field \"text\".*\['content'\]"), ({"text": ""}, "has no text")],
)
def test_hugging_face_rows_without_text(tmp_path: Path, row: dict[str, str], message: str) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        documents(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:/nowhere/at/all", r"there is no folder /nowhere/at/all"),
        ("hf:justaname", r"is not hf:OWNER/DATASET\[/SUBSET\]\[:SPLIT\]"),
        ("hf:a/b/c/d", r"is not hf:OWNER/DATASET"),
        ("hf:", r"is not hf:OWNER/DATASET"),
        (
            "hf:owner/dataset/subset:train",
            r"cannot open the corpus 'hf:owner/dataset/subset:train' .*is the network",
        ),
    ],
)
def test_hugging_face_names(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        documents(spec)


def test_hugging_face_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"needs the package datasets: .* -m pip install -e '.*\[hf\]'"
    ):
        documents(f"hf:{tmp_path}")
