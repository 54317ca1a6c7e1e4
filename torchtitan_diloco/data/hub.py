"""Read a dataset of Hugging Face as a stream, and continue it without reading all of it again.

A place holds the state of the stream before the row that was read last, and a checksum of that row.
Reading continues with this row. If the stream can't be set to its state, or if another row comes,
all rows before it are read again and dropped.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from torchtitan_diloco.base.user import UserError, install_command
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

HUGGING_FACE_PREFIX = "hf:"
DATASETS = "hf:OWNER/DATASET[/SUBSET][:SPLIT] or hf:/FOLDER[:SPLIT]"
_REVISION_LENGTH = 40


class Dataset(NamedTuple):
    """A dataset of Hugging Face, as `hf:` names it."""

    arguments: list[str]
    """What `datasets.load_dataset` is called with."""
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
            raise UserError(f'"{spec}" is not the name of a dataset: write {DATASETS}')
        return Dataset(["/".join([owner, *names[:1]]), *names[1:]], split, is_folder=False)


def open_dataset(spec: str, field: str) -> Corpus:
    dataset = Dataset.parse(spec)
    files = list[Path]()
    if dataset.is_folder:
        paths = Path(dataset.arguments[0]).rglob("*")
        files = sorted(path for path in paths if path.is_file())

    def read(place: Place) -> Reading:
        return _DatasetReader(spec, dataset, field=field, place=place).read()

    # A dataset on the hub has no files here: a place holds its revision.
    return Corpus(spec, corpus_fingerprint(f"{spec}\0{dataset.split}\0{field}", files), read)


class _Row(NamedTuple):
    number: int
    text: str
    state: dict[str, Any] | None
    """State of the stream before this row, if it has one."""

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.text.encode())


class _DatasetReader:
    def __init__(self, spec: str, dataset: Dataset, field: str, place: Place) -> None:
        self._spec = spec
        self._dataset = dataset
        self._field = field
        self._place = place
        self._revision = place.revision

    def read(self) -> Reading:
        """Open the stream, and return its pieces from the place on."""
        stream = self._load()
        rows = self._rows(stream, 0)
        how = ""
        if self._place != BEGINNING:
            rows, how = self._continued(stream)
        splits = stream.info.splits or {}
        documents = splits[self._dataset.split].num_examples if self._dataset.split in splits else 0
        return Reading(self._pieces(rows), documents=documents or None, how=how)

    def _pieces(self, rows: Iterator[_Row]) -> Iterator[Located]:
        done = self._place.pieces
        size = self._place.bytes
        for row in rows:
            at_row = Place(
                row=row.number, state=row.state, checksum=row.checksum, revision=self._revision
            )
            for count, piece in enumerate(split_into_pieces([row.text]), start=1):
                if count <= done:
                    continue
                size += utf8_size(piece.text)
                yield Located(piece, replace(at_row, bytes=size, pieces=count))
            done = 0

    def _continued(self, stream: Any) -> tuple[Iterator[_Row], str]:
        """Return the rows from that of the place on, and how they were found."""
        place = self._place
        where = f"row {place.row:,} of {self._spec}"
        if place.state is not None and hasattr(stream, "load_state_dict"):
            stream.load_state_dict(place.state)
            with suppress(UserError):
                if rows := self._expected(self._rows(stream, place.row)):
                    again = "the rows before in its data file are read again"
                    return rows, f"reading continues at {where}; {again}"
            stream = self._load()
        if rows := self._expected(islice(self._rows(stream, 0), place.row, None)):
            return rows, f"reading can't begin at {where}: all rows before are read again"
        raise UserError(
            f"{where} is not the one that was read before: the dataset has changed; delete the "
            "unfinished folder, or choose another one, to prepare it from the beginning"
        )

    def _expected(self, rows: Iterator[_Row]) -> Iterator[_Row] | None:
        """Return the rows if the first one is that of the place, else None."""
        first = next(rows, None)
        if first is None or first.checksum != self._place.checksum:
            return None
        return chain([first], rows)

    def _rows(self, stream: Any, number: int) -> Iterator[_Row]:
        """Yield the rows of a stream, whose first one has this number."""
        rows = iter(stream)
        has_state = _has_state(stream)
        loaded = self._place.state if number else None  # a stream has it only after its first row
        while True:
            try:
                state = loaded or (stream.state_dict() if has_state else None)
                row = next(rows, None)
            except Exception as error:  # of the network, of files, of what they hold
                raise UserError(
                    f"cannot read row {number:,} of {self._spec} ({type(error).__name__}: {error}):"
                    " check the network and the dataset; the same command continues"
                ) from error
            if row is None:
                return
            where = f"the corpus {self._spec!r}, row {number}"
            yield _Row(number, text_field(row, self._field, where), state)
            number += 1
            loaded = None

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            install = install_command("c4")
            raise UserError(f"{self._spec} needs the package datasets: {install}") from error
        arguments = self._dataset.arguments
        split = self._dataset.split
        try:
            builder = datasets.load_dataset_builder(*arguments, revision=self._revision)
            stream = builder.as_streaming_dataset(split=split)
        except (OSError, ValueError, LookupError) as error:
            raise UserError(
                f"cannot open {self._spec!r} ({type(error).__name__}: {error}): write {DATASETS}, "
                "and check the network"
            ) from error
        commit = builder.hash or ""
        if not self._dataset.is_folder and len(commit) == _REVISION_LENGTH:
            self._revision = commit  # a later start reads the same one
        return stream


def _has_state(stream: Any) -> bool:
    """Return whether a stream has a state that can be written down."""
    if not hasattr(stream, "state_dict"):
        return False
    state = stream.state_dict()
    try:
        return bool(json.loads(json.dumps(state)) == state)
    except (TypeError, ValueError):
        return False
