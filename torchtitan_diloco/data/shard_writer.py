"""Writes the shards of one split, each aside and then renamed, so that a restart finds only whole ones."""

import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.files import aside_path, force_to_disk
from torchtitan_diloco.data.shards import (
    HEADER_BYTES,
    ShardHeader,
    Split,
    read_header,
    shard_name,
    token_dtype,
)
from torchtitan_diloco.data.tokenizer import Tokenizer


class ShardWriter:
    """Takes the pieces of a split in order. A shard is closed with the piece that fills it."""

    def __init__(self, folder: Path, split: Split, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._folder, self._split, self._tokenizer, self._shard_tokens = (
            folder,
            split,
            tokenizer,
            shard_tokens,
        )
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._file: BinaryIO | None = None
        self._number = 0
        self.tokens = 0
        """Tokens of the split so far, those of an interrupted run included."""
        self.end_piece = 0
        """No piece before this one is wanted any more."""
        self._take_over_finished_shards()

    def _take_over_finished_shards(self) -> None:
        for partial in self._folder.glob(f".{self._split}-*.partial"):
            partial.unlink()
        while (path := self._folder / shard_name(self._split, self._number)).exists():
            header = read_header(path)
            self._number += 1
            self.tokens += header.tokens
            self.end_piece = header.end_piece

    def add(self, piece: int, tokens: npt.NDArray[np.integer], ends_document: bool) -> None:
        assert piece >= self.end_piece
        if self._file is None:
            self._file = aside_path(self._path()).open("wb")
            self._file.write(bytes(HEADER_BYTES))  # room for the header, which is known at the end
            self._checksum = self._tokens = self._documents = 0
            self._first_piece = piece
        payload = tokens.astype(self._dtype).tobytes()
        self._file.write(payload)
        self._checksum = zlib.crc32(payload, self._checksum)
        self._tokens += len(tokens)
        self._documents += ends_document
        self.tokens += len(tokens)
        self.end_piece = piece + 1
        if self._tokens >= self._shard_tokens:
            self.finish_shard()

    def finish_shard(self) -> None:
        """Closes the shard that is being written, if there is one."""
        if self._file is None:
            return
        header = ShardHeader(
            token_bytes=self._dtype.itemsize,
            vocab_size=self._tokenizer.vocab_size,
            checksum=self._checksum,
            tokens=self._tokens,
            documents=self._documents,
            first_piece=self._first_piece,
            end_piece=self.end_piece,
            tokenizer=self._tokenizer.fingerprint,
        )
        with self._file as file:
            file.seek(0)
            file.write(header.pack())
            file.flush()
            force_to_disk(file.fileno())
        aside_path(self._path()).replace(self._path())
        self._file = None
        self._number += 1

    def discard_partial(self) -> None:
        """Gives up the shard that is being written, after an error."""
        if self._file is not None:
            self._file.close()
            aside_path(self._path()).unlink()
            self._file = None

    def _path(self) -> Path:
        return self._folder / shard_name(self._split, self._number)
