"""Text out of files, a block at a time: decompressed, decoded strictly, cut into pieces of bounded size."""

import codecs
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from torchtitan_diloco.utils import install_command

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
COMPRESSED_SUFFIXES = (".gz", ".zst")

PIECE_CHARACTERS = 32 * 1024
_BLOCK_BYTES = 1 << 18
_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib's way of saying: expect a gzip header


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    bytes_read: int
    """Bytes of the corpus' files read so far: how far we are. 0 where that is not known."""


def text_kind(path: Path) -> str | None:
    """The suffix that says how to read a file, without that of its compression; None: it cannot be read."""
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    return suffix if suffix in TEXT_SUFFIXES else None


def documents_of_file(path: Path, bytes_before: int = 0) -> Iterator[Piece]:
    """The pieces of one file: a line is a document in `.jsonl`, the file is one otherwise."""
    raw = _RawBlocks(path)
    blocks = _decompressed(path, raw)
    documents = (
        _json_lines(path, blocks) if text_kind(path) == ".jsonl" else [_decoded(path, blocks)]
    )
    for document in documents:
        for text, ends_document in split_into_pieces(document):
            yield Piece(text, ends_document, bytes_before + raw.bytes_read)


def split_into_pieces(
    blocks: Iterable[str], limit: int = PIECE_CHARACTERS
) -> Iterator[tuple[str, bool]]:
    """A document cut behind the last line end within every `limit` characters, or at `limit` where there is none.

    Yields (piece, is it the document's last one). Where it is cut depends on the text alone, not on how it arrives in
    blocks. Nothing comes of an empty document.
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


class _RawBlocks:
    """The bytes of a file as it lies on disk, counted as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    self.bytes_read += len(block)
                    yield block
        except OSError as error:
            raise ValueError(f"cannot read {self._path}: {error}") from error


class _Decompressor(Protocol):
    """What zlib and zstandard have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _decompressed(path: Path, raw: Iterable[bytes]) -> Iterator[bytes]:
    if path.suffix == ".gz":
        return _decompress(path, raw, lambda: zlib.decompressobj(_GZIP_WINDOW), zlib.error)
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                f"reading {path} needs the package zstandard: {install_command('zstd')}"
            ) from error
        return _decompress(
            path, raw, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
        )
    return iter(raw)


def _decompress(
    path: Path, raw: Iterable[bytes], new: Callable[[], _Decompressor], broken: type[Exception]
) -> Iterator[bytes]:
    """Frame after frame: both formats allow several in one file."""
    frame: _Decompressor | None = None
    for compressed in raw:
        while compressed:
            frame = frame or new()
            try:
                block = frame.decompress(compressed)
            except broken as error:
                raise ValueError(f"{path} is not a whole {path.suffix} file: {error}") from error
            compressed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
            yield block
    if frame is not None:
        raise ValueError(
            f"{path} is not a whole {path.suffix} file: it ends in the middle; was a copy interrupted?"
        )


def _decoded(path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    bytes_before, lines_before = 0, 0
    for block in _with_end(blocks):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # error.object is what the decoder kept of the previous block, and this block
            offset = bytes_before + len(block) - len(error.object) + error.start
            line = lines_before + error.object[: error.start].count(b"\n") + 1
            raise ValueError(_not_utf8(path, line, f"byte {offset}", error)) from error
        bytes_before += len(block)
        lines_before += block.count(b"\n")
        yield text


def _with_end(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks, then one empty block, which only comes at the end."""
    yield from (block for block in blocks if block)
    yield b""


def _json_lines(path: Path, blocks: Iterable[bytes]) -> Iterator[tuple[str]]:
    """The field `text` of each line. Blank lines are no documents."""
    for number, line in enumerate(_lines(blocks), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                _not_utf8(path, number, f"byte {error.start} of the line", error)
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}): {line[:60]!r}") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = (
                f"its fields are {sorted(record)}"
                if isinstance(record, dict)
                else f"it is {line[:60]!r}"
            )
            raise ValueError(f'{path}, line {number}: no field "text" with a string; {found}')
        yield (text,)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    pending: list[
        bytes
    ] = []  # joined once a line is whole, so that a line of many blocks stays linear
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*pending, line])
            pending = []
        pending.append(rest)
    yield b"".join(pending)


def _not_utf8(path: Path, line: int, where: str, error: UnicodeDecodeError) -> str:
    return (
        f"{path}, line {line} ({where}) is not UTF-8: {error.reason}, {error.object[error.start : error.start + 8]!r}. "
        f"Convert the file, for example with `iconv -f latin1 -t utf-8`."
    )
