"""Text of a corpus: the standard library, files, or a Hugging Face dataset, as pieces."""

import codecs
import contextlib
import difflib
import glob
import gzip
import hashlib
import importlib
import json
import math
import os
import stat
import sys
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tqdm import tqdm

from torchtitan_diloco.utils import install_command

STDLIB = "stdlib"
HUGGING_FACE_PREFIX = "hf:"
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
COMPRESSED_SUFFIXES = (".gz", ".zst")
PIECE_CHARACTERS = 32 * 1024

_KINDS = f"{' '.join(TEXT_SUFFIXES)}, each also with {' or '.join(COMPRESSED_SUFFIXES)}"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK_BYTES = 1 << 18
_ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_SAVED_DATASET = ("dataset_dict.json", "state.json")  # written by Dataset.save_to_disk


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    bytes_read: int
    """Bytes of the corpus read so far, for the progress bar."""


@dataclass(frozen=True)
class Corpus:
    """Stream of pieces that is the same each time it is read."""

    spec: str
    """The setting that it was opened from."""
    name: str
    """Short name, fit for a folder."""
    fingerprint: str
    """Changes when the text may have changed. Computed without reading the text."""
    total_bytes: int | None
    """Bytes of all files on disk; None if not known."""
    read: Callable[[], Iterator[Piece]]

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces in order. A corpus without any is an error."""
        empty = True
        for piece in self.read():
            empty = False
            yield piece
        if empty:
            raise ValueError(f"the corpus {self.spec!r} has no text: all of it is empty")

    def progress_bar(self, label: str) -> "tqdm[Any]":
        """Return a bar over the bytes of the corpus, which a log file gets every 10 seconds."""
        every = 0.2 if sys.stderr.isatty() else 10.0
        shown = {"desc": f"{label} {self.spec}", "total": self.total_bytes, "unit": "B"}
        return tqdm(**shown, unit_scale=True, leave=False, mininterval=every, delay=every)


def open_corpus(spec: str) -> Corpus:
    """Open `stdlib`, `hf:NAME[/SUBSET][:SPLIT]`, or comma-separated files, folders and globs."""
    if spec == STDLIB:
        return standard_library(Path(sysconfig.get_path("stdlib")))
    if spec.startswith(HUGGING_FACE_PREFIX):
        return _hugging_face_dataset(spec)
    return _text_files(spec)


def is_held_out(piece: int, fraction: float) -> bool:
    """Return whether a piece is for validation: an even spread that depends on its number only."""
    return math.floor((piece + 1) * fraction + 0.5) > math.floor(piece * fraction + 0.5)


def standard_library(folder: Path) -> Corpus:
    """Open the source of the running Python, without its tests and installed packages."""
    paths = [
        path for path in folder.rglob("*.py") if not _NOT_STDLIB & {*path.relative_to(folder).parts}
    ]
    if not paths:
        raise ValueError(
            f'the corpus "{STDLIB}": {folder} has no .py file; set data.corpus to other text files'
        )
    paths.sort(key=lambda path: path.relative_to(folder).parts)
    return _corpus_of_files(STDLIB, STDLIB, paths, _read_source)


def _read_source(path: Path) -> Iterator[Piece]:
    try:
        with tokenize.open(path) as file:  # old modules declare other encodings than UTF-8
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} of the standard library: {error}") from error
    for piece, ends_document in split_into_pieces([text]):
        yield Piece(piece, ends_document, len(text))


# --- files ---


def text_kind(path: Path) -> str | None:
    """Return the suffix that says how to read a file, without compression; None: no text file."""
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    return suffix if suffix in TEXT_SUFFIXES else None


def _text_files(spec: str) -> Corpus:
    patterns = [pattern.strip() for pattern in spec.split(",") if pattern.strip()]
    if not patterns:
        raise ValueError(
            f'the corpus "{spec}" names no file; give files, folders or globs of {_KINDS}'
        )
    # A dictionary keeps the order, and reads a file that is named twice only once.
    paths = list(dict.fromkeys(path for pattern in patterns for path in _find_files(pattern)))
    first = Path(patterns[0]).expanduser()
    stem = first.name.split(".")[0].replace("*", "").strip("-_") or first.absolute().parent.name
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in stem or "text")[:40]
    return _corpus_of_files(spec, name, paths, read_file)


def _find_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = (file.relative_to(path) for file in path.rglob("*") if text_kind(file))
        visible = [path / file for file in inside if not any(p.startswith(".") for p in file.parts)]
        files = sorted(file for file in visible if file.is_file())
        if not files:
            raise ValueError(f"the folder {path.absolute()} has no text ({_KINDS}) and no shards")
    elif path.exists():
        files = [path]
    elif glob.has_magic(pattern):
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207  (Path.glob: relative only)
        files = sorted(Path(name) for name in found if not Path(name).is_dir())
        if not files:
            raise ValueError(f"no file matches {path.absolute()}{_nearest_names(path)}")
    else:
        raise ValueError(f"the text file {path.absolute()} does not exist{_nearest_names(path)}")
    for file in files:
        if text_kind(file) is None:
            raise ValueError(f"{file}: unknown kind of file {file.suffix!r}; use {_KINDS}")
    return files


def _nearest_names(path: Path) -> str:
    folder, wanted = path.absolute().parent, path.name
    while not folder.is_dir():
        folder, wanted = folder.parent, folder.name
    names = sorted(entry.name for entry in folder.iterdir())
    nearest = ", ".join(difflib.get_close_matches(wanted, names, n=3, cutoff=0.4))
    return f"; nearest in {folder}: {nearest or 'nothing of a similar name'}"


def _corpus_of_files(
    spec: str, name: str, paths: Sequence[Path], read: Callable[[Path], Iterator[Piece]]
) -> Corpus:
    stats = [_stat(path) for path in paths]

    def pieces() -> Iterator[Piece]:
        bytes_before = 0
        for path, status in zip(paths, stats, strict=True):
            for piece in read(path):
                yield piece._replace(bytes_read=bytes_before + piece.bytes_read)
            bytes_before += status.st_size

    total = sum(status.st_size for status in stats)
    return Corpus(spec, name, _fingerprint("", zip(paths, stats, strict=True)), total, pieces)


def _stat(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"cannot read {path}, a file of the corpus: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a pipe or a device; a corpus is made of regular files")
    return status


def _fingerprint(text: str, files: Iterable[tuple[Path, os.stat_result]]) -> str:
    digest = hashlib.sha256(f"{text}pieces of {PIECE_CHARACTERS} characters".encode())
    for path, status in files:
        facts = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def read_file(path: Path) -> Iterator[Piece]:
    """Yield the pieces of one file: a line of `.jsonl` is a document, any other file is one."""
    try:
        with path.open("rb") as raw, _decompressed(path, raw) as file:
            lines = text_kind(path) == ".jsonl"
            for document in _json_lines(path, file) if lines else [_decoded(path, file)]:
                for text, ends_document in split_into_pieces(document):
                    yield Piece(text, ends_document, raw.tell())
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a compressed file is cut off
        raise ValueError(f"cannot read {path}: {error}") from error


@contextlib.contextmanager
def _decompressed(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    elif path.suffix != ".zst":
        yield raw
    else:
        try:
            zstd = importlib.import_module(_ZSTD_MODULE)
        except ImportError as error:
            raise ValueError(
                f"reading {path} needs the package {_ZSTD_MODULE}: {install_command('zstd')}"
            ) from error
        try:
            yield zstd.open(raw)
        except zstd.ZstdError as error:
            raise ValueError(f"cannot read {path}: {error}") from error


def split_into_pieces(
    blocks: Iterable[str], limit: int = PIECE_CHARACTERS
) -> Iterator[tuple[str, bool]]:
    """Cut a document behind the last line end within every `limit` characters, else at `limit`.

    Yields (piece, is it the last one). The cuts depend on the text, not on how it comes in blocks.
    An empty document has no piece.
    """
    text = ""
    for block in blocks:
        text += block
        start = 0
        while len(text) - start > limit:  # more follows, so this cannot be the last piece
            end = text.rfind("\n", start, start + limit) + 1 or start + limit
            yield text[start:end], False
            start = end
        text = text[start:]
    if text:
        yield text, True


def _decoded(path: Path, file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    for block in chain(iter(partial(file.read, _BLOCK_BYTES), b""), [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise ValueError(_not_utf8(path, line, error)) from error
        line += block.count(b"\n")


def _json_lines(path: Path, file: BinaryIO) -> Iterator[tuple[str]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(_not_utf8(path, number, error)) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}): {line[:60]!r}") from error
        yield (_text_field(record, f"{path}, line {number}"),)


def _text_field(record: Any, where: str) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = sorted(record) if isinstance(record, dict) else f"{record!r:.60}"
        raise ValueError(f'{where}: no field "text" with a string in {found}')
    return text


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> str:
    found = error.object[error.start : error.start + 8]
    return (
        f"{path}, line {line} is not UTF-8: {error.reason}, {found!r}. Convert the file, for "
        f"example with `iconv -f latin1 -t utf-8`."
    )


# --- Hugging Face datasets ---


def _hugging_face_dataset(spec: str) -> Corpus:
    location, _, split = spec.removeprefix(HUGGING_FACE_PREFIX).partition(":")
    split, parts = split or "train", location.split("/")
    files: list[Path] = []
    if location.startswith(("/", ".", "~")):
        folder = Path(location).expanduser()
        if not folder.is_dir():
            raise ValueError(f"the corpus {spec!r}: there is no folder {folder.absolute()}")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        name, source = folder.name, [str(folder)]
    elif len(parts) not in (2, 3) or not all(parts):
        raise ValueError(
            f"the corpus {spec!r} is not hf:OWNER/DATASET[/SUBSET][:SPLIT] or hf:/FOLDER[:SPLIT]"
        )
    else:
        name, source = parts[1], ["/".join(parts[:2]), *parts[2:]]

    def pieces() -> Iterator[Piece]:
        characters = 0
        for number, row in enumerate(_rows(spec, source, split)):
            text = _text_field(row, f"the corpus {spec!r}, row {number}")
            characters += len(text)
            for piece, ends_document in split_into_pieces([text]):
                yield Piece(piece, ends_document, characters)

    # Whether a dataset on the hub has changed is not known: its fingerprint is that of its name.
    fingerprint = _fingerprint(f"{spec}\0{split}\0", [(path, path.stat()) for path in files])
    return Corpus(spec, name, fingerprint, None, pieces)


def _rows(spec: str, source: list[str], split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"the corpus {spec!r} needs the package datasets: {install_command('hf')}"
        ) from error
    try:
        if any((Path(source[0]) / name).exists() for name in _SAVED_DATASET):
            saved = datasets.load_from_disk(source[0])
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(*source, split=split, streaming=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"cannot open the corpus {spec!r} ({type(error).__name__}: {error}). Check the name, "
            f'the subset, the split ("{split}"), and the network or the folder.'
        ) from error
