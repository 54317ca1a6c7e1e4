"""Read a corpus in pieces of text: the standard library, files, or another source."""

import argparse
import codecs
import glob
import gzip
import io
import json
import math
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from msgspec.structs import replace

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.registry import OneOf, find
from torchtitan_diloco.base.user import NOT_UTF8, UserError, is_utf8
from torchtitan_diloco.config.parts import SOURCES
from torchtitan_diloco.data.pieces import (
    BEGINNING,
    Corpus,
    Located,
    Place,
    Reading,
    corpus_fingerprint,
    split_into_pieces,
    text_field,
    utf8_size,
)

TEXT_FIELD = "text"
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
COMPRESSED_SUFFIX = ".gz"

_KINDS = f"{' '.join(TEXT_SUFFIXES)}, each also with {COMPRESSED_SUFFIX}"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK_CHARACTERS = 1 << 18


def open_corpus(spec: str, field: str = TEXT_FIELD) -> Corpus:
    """Open a source by its name, or comma-separated files, folders and globs.

    `field`: field of the text in JSON lines and in rows of datasets.
    """
    if not is_utf8(spec):
        raise UserError(f"{spec!r} {NOT_UTF8}")
    if source := find(SOURCES, spec):
        corpus: Corpus = source[0].load()(spec, field)
        return corpus
    name = spec.removesuffix(":")
    if name != spec and name in SOURCES:
        raise UserError(
            f'"{spec}" names nothing after the colon: write {name}:{SOURCES[name].takes}'
        )
    patterns = [pattern.strip() for pattern in spec.split(",") if pattern.strip()]
    if not patterns:
        raise UserError(f'the corpus "{spec}" names no file: give files, folders or globs')
    for pattern in patterns:
        if is_url(pattern):
            raise UserError(
                f'"{pattern}" is a URL: only files and hf:{SOURCES["hf"].takes} are read: download '
                "it, and give its files"
            )
        if find(SOURCES, pattern) and not Path(pattern).exists():
            reason = "cannot be in a list of files: give it a weight in data.mixture"
            raise UserError(f"{pattern} {reason}")
    paths = [path for pattern in patterns for path in _find_files(pattern)]
    return _corpus_of_files(spec, paths, field)


def is_url(spec: str) -> bool:
    """Return whether a corpus is written as a URL, such as s3://bucket/path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", spec) is not None


def open_standard_library(spec: str, field: str) -> Corpus:
    return _corpus_of_files(spec, standard_library(Path(sysconfig.get_path("stdlib"))), field)


def sources_text() -> str:
    """Return the help of the option --source."""
    return f"{'; '.join(OneOf(SOURCES).choices())}; or files, folders, globs with commas"


def open_source(spec: str, field: str) -> Corpus:
    """Open the corpus of the option --source."""
    try:
        return open_corpus(spec, field)
    except UserError as error:
        raise UserError(f"--source {spec}: {error}") from error


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


# --- files ---


def standard_library(folder: Path) -> list[Path]:
    """Return the source files of the running Python, except tests and installed packages."""
    files: list[Path] = []
    for inside, folders, names in os.walk(folder):
        folders[:] = {*folders} - _NOT_STDLIB  # not searched, as there may be many packages
        files += (Path(inside, name) for name in names if name.endswith(".py"))
    return sorted(files)


def text_kind(path: Path) -> str | None:
    """Return the suffix of a text file without that of compression, None for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [COMPRESSED_SUFFIX]:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in TEXT_SUFFIXES else None


def _find_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if "/." not in f"/{file.relative_to(path)}")
        files = sorted(file for file in inside if _is_text_or_warn(file))
    elif glob.has_magic(pattern) and not path.exists():
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207  (Path.glob: relative only)
        files = sorted(Path(name) for name in names if not Path(name).is_dir())
    else:
        files = [path]
    if not files:
        why = "; no file matches it" if glob.has_magic(pattern) else ""
        problem = f"{path.absolute()} has no text ({_KINDS}) and no token shards{why}"
        raise UserError(f"{problem}: give a path that has one of them")
    return files


def _is_text_or_warn(path: Path) -> bool:
    """Return whether a path in a folder is a text. Warn about a link to a folder."""
    if path.is_symlink() and path.is_dir():
        logger.warning(
            f"{path} is a link to a folder, which is not followed: name it as well, if its text "
            "belongs to the corpus"
        )
    return text_kind(path) is not None and path.is_file()


def _corpus_of_files(spec: str, paths: Iterable[Path], field: str) -> Corpus:
    by_place = dict[str, Path]()
    for path in paths:  # without those that are named twice, however they are spelled
        by_place.setdefault(os.path.abspath(path), path)  # noqa: PTH100  (resolve follows links)
    files = list(by_place.values())
    for path in files:
        if not path.is_file():
            raise UserError(f"cannot read {path.absolute()}: no such regular file; check its path")
        if text_kind(path) is None:
            raise UserError(f"{path}: unknown kind of file {path.suffix!r}; use {_KINDS}")

    def read(place: Place) -> Reading:
        total = sum(path.stat().st_size for path in files)
        return Reading(_read_files(files, field, place), total, how=_how(files, place))

    return Corpus(spec, corpus_fingerprint(field, files), read)


def _how(files: Sequence[Path], place: Place) -> str:
    if place == BEGINNING or place.file == len(files):
        return ""
    path = files[place.file]
    unpacked = ", which is unpacked again" if path.suffix.lower() == COMPRESSED_SUFFIX else ""
    return f"reading continues at byte {place.offset:,} of {path}{unpacked}"


def _read_files(files: Sequence[Path], field: str, place: Place) -> Iterator[Located]:
    before = sum(path.stat().st_size for path in files[: place.file])
    for number, path in islice(enumerate(files), place.file, None):
        start = place if number == place.file else Place(file=number)
        yield from _read_file(path, field, start=start, bytes_before=before)
        before += path.stat().st_size


def _read_file(path: Path, field: str, *, start: Place, bytes_before: int) -> Iterator[Located]:
    """Yield the pieces of one file. Each line of `.jsonl` is a document, as is any other file."""
    try:
        with path.open("rb") as file:
            packed = path.suffix.lower() == COMPRESSED_SUFFIX
            content = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
            if start.offset == 0 and content.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                start = replace(start, offset=len(codecs.BOM_UTF8))
            content.seek(start.offset)
            if text_kind(path) == ".jsonl":
                located = _read_lines(content, field, start=start, path=path)
            else:
                located = _read_text(content, start)
            for piece, after in located:
                yield Located(piece, replace(after, bytes=bytes_before + file.tell()))
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), error) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        remedy = f"copy it again, or rename it if it is not compressed ({COMPRESSED_SUFFIX})"
        raise UserError(f"cannot read {path}: {error}: {remedy}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}: check the file and its disk") from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> UserError:
    remedy = "convert the file, as with iconv, or leave it out if it is no text"
    return UserError(f"{where} is not UTF-8 ({error}): {remedy}")


def _read_text(content: BinaryIO, start: Place) -> Iterator[Located]:
    offset = start.offset
    with io.TextIOWrapper(content, encoding="utf-8", newline="\n") as text:
        for piece in split_into_pieces(iter(partial(text.read, _BLOCK_CHARACTERS), "")):
            offset += utf8_size(piece.text)
            after = Place(file=start.file, offset=offset)
            if piece.ends_document:
                after = Place(file=start.file + 1)
            yield Located(piece, after)


def _read_lines(content: BinaryIO, field: str, start: Place, path: Path) -> Iterator[Located]:
    offset = start.offset
    done = start.pieces
    for row, line in enumerate(content, start=start.row):
        where = f"{path}, line {row + 1}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(where, error) from error
        if text.strip():
            document = _json_text(text, field, where)
            for count, piece in enumerate(split_into_pieces([document]), start=1):
                if count <= done:
                    continue
                after = Place(file=start.file, offset=offset, row=row, pieces=count)
                yield Located(piece, after)
        offset += len(line)
        done = 0


def _json_text(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({error})"
        if isinstance(error, RecursionError):
            problem = "cannot be read, as it is nested too deep"
        elif not isinstance(error, json.JSONDecodeError):
            problem = "cannot be read, as a number in it has too many digits"
        raise UserError(
            f"{where}: {problem}: correct or delete the line. Each line of a .jsonl file "
            f'is an object with its text in "{field}"; other text belongs in a .txt file'
        ) from error
    return text_field(record, field, where)
