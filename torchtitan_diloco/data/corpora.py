"""Where text comes from: the standard library, files, or a Hugging Face dataset, all as a stream of pieces."""

import difflib
import glob
import hashlib
import math
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torchtitan_diloco.data.text_files import (
    COMPRESSED_SUFFIXES,
    PIECE_CHARACTERS,
    TEXT_SUFFIXES,
    Piece,
    documents_of_file,
    split_into_pieces,
    text_kind,
)

STDLIB = "stdlib"
HUGGING_FACE_PREFIX = "hf:"

# Not text that a reader of the standard library would read: installed packages and the library's own test suites.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_KINDS = f"{' '.join(TEXT_SUFFIXES)}, each also with {' or '.join(COMPRESSED_SUFFIXES)}"


class Corpus(Protocol):
    """A stream of documents that is the same each time it is read."""

    @property
    def spec(self) -> str:
        """What the user wrote."""

    @property
    def name(self) -> str:
        """Short, fit for a file name."""

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all files, as they lie on disk; None: not known."""

    @property
    def fingerprint(self) -> str:
        """Changes when the text may have changed. Costs no reading of the text."""

    def pieces(self) -> Iterator[Piece]: ...


def open_corpus(spec: str) -> Corpus:
    """`stdlib`, `hf:NAME[/SUBSET][:SPLIT]`, or comma-separated files, folders and globs."""
    if spec == STDLIB:
        return StandardLibrary()
    if spec.startswith(HUGGING_FACE_PREFIX):
        from torchtitan_diloco.data.hugging_face import HuggingFaceDataset

        return HuggingFaceDataset(spec)
    return TextFiles(spec)


def is_held_out(piece: int, fraction: float) -> bool:
    """Whether a piece is for validation: evenly spread over the corpus, by the piece's number alone."""
    return math.floor((piece + 1) * fraction + 0.5) > math.floor(piece * fraction + 0.5)


class _Files:
    """Pieces of a fixed list of files."""

    def __init__(self, spec: str, name: str, paths: Sequence[Path]) -> None:
        self.spec, self.name, self._paths = spec, name, paths
        try:
            self._stats = [path.stat() for path in paths]
        except OSError as error:
            raise ValueError(f"cannot read a file of the corpus {spec!r}: {error}") from error
        self.total_bytes = sum(stat.st_size for stat in self._stats)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"pieces of {PIECE_CHARACTERS} characters".encode())
        for path, stat in zip(self._paths, self._stats, strict=True):
            digest.update(
                f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(
                    errors="surrogateescape"
                )
            )
        return digest.hexdigest()[:16]

    def pieces(self) -> Iterator[Piece]:
        bytes_before, found = 0, False
        for path, stat in zip(self._paths, self._stats, strict=True):
            for piece in self._pieces_of_file(path, bytes_before):
                found = True
                yield piece
            bytes_before += stat.st_size
        if not found:
            shown = ", ".join(str(path) for path in self._paths[:3]) + (
                ", ..." if len(self._paths) > 3 else ""
            )
            raise ValueError(
                f"the corpus {self.spec!r} has no text: all of its {len(self._paths)} files ({shown}) are empty"
            )

    def _pieces_of_file(self, path: Path, bytes_before: int) -> Iterator[Piece]:
        return documents_of_file(path, bytes_before)


class StandardLibrary(_Files):
    """The source of the Python that runs us."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(sysconfig.get_path("stdlib"))
        paths = [
            path for path in self._folder.rglob("*.py") if not _NOT_STDLIB & set(self._parts(path))
        ]
        if not paths:
            raise ValueError(
                f'the corpus "{STDLIB}" needs the standard library\'s source, and {self._folder} has no .py file; '
                f"set data.corpus to text files of your own"
            )
        super().__init__(STDLIB, STDLIB, sorted(paths, key=self._parts))

    def _parts(self, path: Path) -> tuple[str, ...]:
        return path.relative_to(self._folder).parts

    def _pieces_of_file(self, path: Path, bytes_before: int) -> Iterator[Piece]:
        try:
            with tokenize.open(path) as file:  # old modules declare other encodings than UTF-8
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path} of the standard library: {error}") from error
        for piece, ends_document in split_into_pieces([text]):
            yield Piece(piece, ends_document, bytes_before + len(text))


class TextFiles(_Files):
    """Files that the user names."""

    def __init__(self, spec: str) -> None:
        patterns = [pattern.strip() for pattern in spec.split(",") if pattern.strip()]
        if not patterns:
            raise ValueError(
                f'the corpus "{spec}" names no file; give files, folders or globs of {_KINDS}'
            )
        paths: dict[
            Path, None
        ] = {}  # a set in the order of insertion: a file named twice is read once
        for pattern in patterns:
            paths.update(dict.fromkeys(_files_of(pattern)))
        first = Path(patterns[0]).expanduser()
        name = (
            first.name.split(".")[0].replace("*", "").strip("-_")
            or first.absolute().parent.name
            or "text"
        )
        super().__init__(
            spec, "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:40], list(paths)
        )


def _files_of(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = [
            file
            for file in path.rglob("*")
            if text_kind(file) and file.is_file() and not _is_hidden(file, path)
        ]
        if not files:
            raise ValueError(
                f"the folder {path.absolute()} has no text file ({_KINDS}), and it is no folder of token shards either"
            )
        return sorted(files)
    if path.exists():
        files = [path]
    elif glob.has_magic(pattern):
        files = sorted(Path(name) for name in _glob(path) if not Path(name).is_dir())
        if not files:
            raise ValueError(f"no file matches {path.absolute()}{_what_is_there(path)}")
    else:
        raise ValueError(f"the text file {path.absolute()} does not exist{_what_is_there(path)}")
    for file in files:
        if text_kind(file) is None:
            raise ValueError(
                f"{file}: unknown kind of file {file.suffix!r}; a corpus is made of {_KINDS}"
            )
    return files


def _glob(pattern: Path) -> list[str]:
    return glob.glob(str(pattern), recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _what_is_there(path: Path) -> str:
    """The names that come nearest, in the last folder of the path that exists."""
    folder = path.absolute().parent
    wanted = path.name
    while not folder.is_dir():
        folder, wanted = folder.parent, folder.name
    names = sorted(entry.name for entry in folder.iterdir())
    nearest = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    return (
        f"; nearest in {folder}: {', '.join(nearest)}"
        if nearest
        else f"; {folder} has nothing of a similar name"
    )
