"""Read a corpus in pieces of text: the standard library, files, or a Hugging Face dataset."""

import argparse
import glob
import gzip
import hashlib
import json
import math
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from torchtitan_diloco.log import UserError, install_command

STDLIB = "stdlib"
TEXT_FIELD = "text"
HUGGING_FACE_PREFIX = "hf:"
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
COMPRESSED_SUFFIX = ".gz"
DATASETS = "hf:OWNER/DATASET[/SUBSET][:SPLIT] or hf:/FOLDER[:SPLIT]"
PIECE_CHARACTERS = 32 * 1024
SOURCES = "stdlib; files, folders, globs with commas; or hf:NAME[/SUBSET][:SPLIT]"
"""Help of the option `--source`."""

_KINDS = f"{' '.join(TEXT_SUFFIXES)}, each also with {COMPRESSED_SUFFIX}"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK_CHARACTERS = 1 << 18


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Corpus:
    """Stream of pieces that can be read repeatedly."""

    spec: str
    """The setting that it was opened from."""
    fingerprint: str
    """Changes when the text may have changed, judging by names, sizes and times of the files."""
    total: int | None
    """Size in bytes, None if unknown."""
    read: Callable[[], Iterator[Piece]]

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces in order, with a progress bar. A corpus without any is an error."""
        piece = None
        with tqdm(total=self.total, **progress_options(f"read {self.spec}")) as bar:
            for piece in self.read():
                yield piece
                bar.update(len(piece.text))
        if piece is None:
            raise UserError(f"the corpus {self.spec!r} has no text: all of it is empty")


def open_corpus(spec: str, field: str = TEXT_FIELD) -> Corpus:
    """Open `stdlib`, `hf:NAME[/SUBSET][:SPLIT]`, or comma-separated files, folders and globs.

    `field`: field of the text in JSON lines and in rows of datasets.
    """
    if spec == STDLIB:
        return _corpus_of_files(spec, standard_library(Path(sysconfig.get_path("stdlib"))), field)
    if spec.startswith(HUGGING_FACE_PREFIX):
        return _hugging_face_dataset(spec, field)
    patterns = [pattern.strip() for pattern in spec.split(",") if pattern.strip()]
    if not patterns:
        raise UserError(f'the corpus "{spec}" names no file: give files, folders or globs')
    return _corpus_of_files(spec, [path for each in patterns for path in _find_files(each)], field)


def progress_options(action: str) -> dict[str, Any]:
    """Return the options of a progress bar in bytes, which shows only what takes long."""
    every = 0.2 if sys.stderr.isatty() else 10.0  # seconds
    look = {"unit": "B", "unit_scale": True, "leave": False, "desc": action}
    return {"mininterval": every, "delay": every, **look}


def whole_number(text: str) -> int:
    """Parse an option: 1000000, 1_000_000 or 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value < 1 or not value.is_integer():
        raise argparse.ArgumentTypeError(
            f'"{text}": give a whole number from 1 on, such as 1000000 or 1e6'
        )
    return int(value)


def is_held_out(piece: int, fraction: float) -> bool:
    """Return whether a piece is for validation. The held-out pieces are evenly spaced."""
    return math.floor((piece + 1) * fraction + 0.5) > math.floor(piece * fraction + 0.5)


def split_into_pieces(parts: Iterable[str], limit: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """Cut a document after the last line end within every `limit` characters, else at `limit`.

    The cuts do not depend on how the text is divided into parts. An empty document has no piece.
    """
    text = ""
    for part in parts:
        text += part
        start = 0
        while len(text) - start > limit:  # more follows, so this cannot be the last piece
            end = text.rfind("\n", start, start + limit) + 1 or start + limit
            yield Piece(text[start:end], ends_document=False)
            start = end
        text = text[start:]
    if text:
        yield Piece(text, ends_document=True)


# --- files ---


def standard_library(folder: Path) -> list[Path]:
    """Return the source files of the running Python, except tests and installed packages."""
    found: list[Path] = []
    for inside, folders, names in os.walk(folder):
        folders[:] = {*folders} - _NOT_STDLIB  # not searched, as there may be many packages
        found += (Path(inside, name) for name in names if name.endswith(".py"))
    return sorted(found)


def text_kind(path: Path) -> str | None:
    """Return the suffix of a text file without that of compression, None for other files."""
    suffix = path.with_suffix("").suffix if path.suffix == COMPRESSED_SUFFIX else path.suffix
    return suffix if suffix in TEXT_SUFFIXES else None


def _find_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if text_kind(file) and file.is_file())
        files = sorted(file for file in inside if "/." not in f"/{file.relative_to(path)}")
    elif glob.has_magic(pattern) and not path.exists():
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207  (Path.glob: relative only)
        files = sorted(Path(name) for name in found if not Path(name).is_dir())
    else:
        files = [path]
    if not files:
        why = "; no file matches it" if glob.has_magic(pattern) else ""
        problem = f"{path.absolute()} has no text ({_KINDS}) and no token shards{why}"
        raise UserError(f"{problem}: give a path that has one of them")
    return files


def _corpus_of_files(spec: str, paths: Iterable[Path], field: str) -> Corpus:
    files = list(dict.fromkeys(paths))  # without duplicates
    for path in files:
        if not path.is_file():
            raise UserError(f"cannot read {path.absolute()}: no such regular file; check its path")
        if text_kind(path) is None:
            raise UserError(f"{path}: unknown kind of file {path.suffix!r}; use {_KINDS}")

    def read() -> Iterator[Piece]:
        for path in files:
            yield from _read_file(path, field)

    packed = any(path.suffix == COMPRESSED_SUFFIX for path in files)
    total = None if packed else sum(path.stat().st_size for path in files)
    return Corpus(spec, _fingerprint(field, files), total, read)


def _fingerprint(text: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{text}\0pieces of {PIECE_CHARACTERS} characters".encode())
    for path in files:
        status = path.stat()
        facts = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _read_file(path: Path, field: str) -> Iterator[Piece]:
    """Yield the pieces of one file. Each line of `.jsonl` is a document, as is any other file."""
    opener: Any = gzip.open if path.suffix == COMPRESSED_SUFFIX else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            if text_kind(path) != ".jsonl":
                yield from split_into_pieces(iter(partial(file.read, _BLOCK_CHARACTERS), ""))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    text = _json_text(line, field, f"{path}, line {number}")
                    yield from split_into_pieces([text])
    except UnicodeDecodeError as error:
        remedy = "convert it, as with iconv, or leave it out if it is no text"
        raise UserError(f"{path} is not UTF-8 ({error}): {remedy}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        remedy = f"copy it again, or rename it if it is not compressed ({COMPRESSED_SUFFIX})"
        raise UserError(f"cannot read {path}: {error}: {remedy}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}: check the file and its disk") from error


def _json_text(line: str, field: str, where: str) -> str:
    try:
        return _text_field(json.loads(line), field, where)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(
            f"{where}: not JSON ({error}): correct or delete the line. Each line of a .jsonl file "
            f'is an object with its text in "{field}"; other text belongs in a .txt file'
        ) from error


def _text_field(record: Any, field: str, where: str) -> str:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        whole = text is not None or not isinstance(record, dict)
        found = f"{record!r:.60}" if whole else sorted(record)
        raise UserError(
            f'{where}: no field "{field}" with a string in {found}: prepare it with --text-field'
        )
    # A JSON escape may be half of a pair, which is no Unicode.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- Hugging Face datasets ---


class Dataset(NamedTuple):
    """A dataset of Hugging Face, as `hf:` names it."""

    arguments: list[str]
    """Of `datasets.load_dataset`."""
    split: str
    is_folder: bool

    @staticmethod
    def parse(spec: str) -> "Dataset":
        location, _, split = spec.removeprefix(HUGGING_FACE_PREFIX).partition(":")
        split = split or "train"
        if location.startswith(("/", ".", "~")):
            return Dataset([str(Path(location).expanduser())], split, is_folder=True)
        owner, *names = location.split("/")
        if not all((owner, *names)) or len(names) > 2:
            raise UserError(f'"{spec}" is no name of a dataset: write {DATASETS}')
        return Dataset(["/".join([owner, *names[:1]]), *names[1:]], split, is_folder=False)


def _hugging_face_dataset(spec: str, field: str) -> Corpus:
    dataset, files = Dataset.parse(spec), list[Path]()
    if dataset.is_folder:
        found = Path(dataset.arguments[0]).rglob("*")
        files = sorted(path for path in found if path.is_file())

    def read() -> Iterator[Piece]:
        for number, row in enumerate(_rows(spec, dataset)):
            text = _text_field(row, field, f"the corpus {spec!r}, row {number}")
            yield from split_into_pieces([text])

    # Changes of a dataset on the hub are not detected: there are no files.
    return Corpus(spec, _fingerprint(f"{spec}\0{dataset.split}\0{field}", files), None, read)


def _rows(spec: str, dataset: Dataset) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{spec} needs the package datasets: {install_command('c4')}") from error
    try:
        return datasets.load_dataset(*dataset.arguments, split=dataset.split, streaming=True)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(
            f"cannot open {spec!r} ({type(error).__name__}: {error}): write {DATASETS}, and check "
            "the network"
        ) from error
