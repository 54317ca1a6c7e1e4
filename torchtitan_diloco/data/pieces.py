"""Pieces of text, and places between them: what a corpus is read in, and where reading continues.

A place is small and can be written down. Reading from it gives the same pieces as reading from the
beginning gives after it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from torchtitan_diloco.base.formatting import counted, progress_options
from torchtitan_diloco.base.user import UserError

PIECE_CHARACTERS = 32 * 1024


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool


class Place(msgspec.Struct, frozen=True):
    """Where to continue reading a corpus: of files, or of a dataset."""

    bytes: int = 0
    """Bytes that come before: of files as they are on the disk, or of the text of a dataset."""
    file: int = 0
    """Number of the file."""
    offset: int = 0
    """Bytes of the file, unpacked, before the place or before its line."""
    row: int = 0
    """Number of the row of the dataset, or lines of the file before."""
    pieces: int = 0
    """Pieces of the line, or of the row, that come before."""
    state: dict[str, Any] | None = None
    """State of the stream before the row. None if it has none that can be written down."""
    checksum: int | None = None
    """CRC-32 of the text of the row, to find it again."""
    revision: str | None = None
    """Revision of a dataset on the hub."""


BEGINNING = Place()


class Position(msgspec.Struct, frozen=True):
    """How far a corpus is read: up to a place between two pieces."""

    place: Place = BEGINNING
    pieces: int = 0
    """Number of the next piece."""
    documents: int = 0
    """Documents that have ended before."""
    begins_document: bool = True
    """Whether the next piece begins a document."""


class EmptyCorpus(UserError):
    """A corpus without text."""


class Located(NamedTuple):
    """A piece, and the place after it."""

    piece: Piece
    after: Place


@dataclass(frozen=True)
class Reading:
    """A corpus that is being read from a place on."""

    pieces: Iterator[Located]
    bytes: int | None = None
    """Size of the whole corpus, None if unknown."""
    documents: int | None = None
    """Documents of the whole corpus, None if unknown."""
    how: str = ""
    """How it comes to its place, if that is not the beginning."""


@dataclass(frozen=True)
class Corpus:
    """Stream of pieces that can be read repeatedly, and from any place on."""

    spec: str
    """The setting that it was opened from."""
    fingerprint: str
    """Changes when the text may have changed, judging by names, sizes and times of the files."""
    read: Callable[[Place], Reading]

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces in order, with a progress bar. A corpus without any is an error."""
        reading = self.read(BEGINNING)
        piece = None
        with tqdm(total=reading.bytes, **progress_options(f"read {self.spec}")) as bar:
            for piece, after in reading.pieces:
                yield piece
                bar.update(after.bytes - bar.n)
        if piece is None:
            raise self.is_empty()

    def is_empty(self) -> UserError:
        """Return the error for a corpus without text."""
        return EmptyCorpus(
            f'the corpus "{self.spec}" has no text, as all of it is empty: give other text'
        )


def corpus_of_documents(
    spec: str, documents: Callable[[], Iterable[str]], *, version: str = ""
) -> Corpus:
    """Return a corpus of documents, which the function must yield alike each time.

    Reading continues after it has yielded the earlier ones again. `version`: changes when the text
    does, so that its tokens are not taken from the cache.
    """

    def located(place: Place) -> Iterator[Located]:
        done = place.pieces
        size = place.bytes
        for row, document in enumerate(islice(documents(), place.row, None), start=place.row):
            pieces = islice(enumerate(split_into_pieces([document]), start=1), done, None)
            for count, piece in pieces:
                size += utf8_size(piece.text)
                yield Located(piece, Place(row=row, pieces=count, bytes=size))
            done = 0

    def read(place: Place) -> Reading:
        if place == BEGINNING:
            return Reading(located(place))
        return Reading(located(place), how=f"{counted(place.row, 'document')} must be read again")

    return Corpus(spec, corpus_fingerprint(f"{spec}\0{version}", []), read)


def is_held_out(piece: int, fraction: float, *, is_last: bool = False) -> bool:
    """Return whether a piece is for validation. The held-out pieces are evenly spaced.

    `is_last`: whether no piece follows. The last of several is held out if no other is, and an only
    piece is not.
    """
    held_out_before = math.floor(piece * fraction + 0.5)
    if is_last and not held_out_before:
        return piece > 0 and fraction > 0
    return math.floor((piece + 1) * fraction + 0.5) > held_out_before


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


def utf8_size(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def text_field(record: Any, field: str, where: str) -> str:
    """Return the text of a record, such as a line of JSON or a row of a dataset."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        fields = f"it is {record!r:.60}"
        if isinstance(record, dict):
            fields = f"its fields are: {', '.join(sorted(record))}"
        remedy = "Set --text-field of the command prepare or tokenizer"
        raise UserError(f'{where}: there is no field "{field}" with a string; {fields}. {remedy}')
    # A JSON escape may be half of a pair, which is no Unicode.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def corpus_fingerprint(text: str, files: Iterable[Path]) -> str:
    """Return a digest of a text, and of the names, sizes and times of files."""
    digest = hashlib.sha256(f"{text}\0pieces of {PIECE_CHARACTERS} characters".encode())
    for path in files:
        status = path.stat()
        facts = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(facts.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
