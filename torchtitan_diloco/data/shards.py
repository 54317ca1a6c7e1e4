"""Token shards: their format, writing them, and reading them through memory maps.

A corpus is a folder of shards `train-00000.tokens`, `validation-00000.tokens`, ... and an index
`corpus.json`, without which it is not finished. A shard is an array of tokens, little-endian.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shlex
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from torchtitan_diloco.base.formatting import counted, progress_options
from torchtitan_diloco.base.hardware import available_cores, write_whole
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.data.pieces import Position
from torchtitan_diloco.data.tokenizer import Tokenizer

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32

INDEX_NAME = "corpus.json"
STARTED_NAME = "prepare.json"
"""Index of a folder that is not finished. It lists the finished shards."""
FORMAT_VERSION = 3
_READ_BYTES = 2**24


class Shard(msgspec.Struct, frozen=True):
    file: str
    tokens: int
    checksum: int
    """CRC-32 of the file."""
    last_piece: int = -1
    """Number of its last piece in the corpus: `prepare` continues after it."""


class Partial(msgspec.Struct, frozen=True):
    """What is on the disk of a shard that is not finished."""

    tokens: int
    documents: int
    checksum: int
    last_piece: int


class SplitIndex(msgspec.Struct):
    tokens: int = 0
    documents: int = 0
    shards: list[Shard] = []
    partial: Partial | msgspec.UnsetType = msgspec.UNSET
    """What is on the disk of the next shard. A finished corpus has none."""


class Index(msgspec.Struct):
    """Content of `corpus.json`."""

    format_version: int
    settings: dict[str, Any]
    splits: dict[Split, SplitIndex]
    position: Position | msgspec.UnsetType = msgspec.UNSET
    """Where `prepare` continues, except for pieces that a split has already. Not in a finished
    corpus."""


NEEDED_SETTINGS = {
    "source": str,
    "tokenizer": str,
    "tokenizer_fingerprint": str,
    "vocab_size": int,
}
"""Settings that an index must have, as other programs may write one, and their types."""


def token_type(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def describe_missing(folder: Path) -> str:
    """Say why a folder is no finished folder of token shards, as the end of a sentence about it."""
    if not folder.exists():
        return "does not exist"
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    return f"has no token shards ({INDEX_NAME})" if names - {".lock"} else "is empty"


def describe_unfinished(folder: Path) -> str:
    """Say that a folder is not finished, and of which source, or return an empty string."""
    if not (folder / STARTED_NAME).exists():
        return ""
    try:
        settings = msgspec.json.decode((folder / STARTED_NAME).read_bytes(), type=Index).settings
        source = f" of {settings['source']} with the tokenizer {settings['tokenizer']}"
    except (OSError, msgspec.MsgspecError, KeyError):
        source = ""
    return (
        f"is not finished ({STARTED_NAME}): `prepare`{source} still writes it, or was interrupted; "
        "to continue it, run the same `prepare` command again"
    )


def read_index(path: Path) -> Index:
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except FileNotFoundError as error:
        if unfinished := describe_unfinished(path.parent):
            raise UserError(f"{path.parent} {unfinished}") from error
        reason = f"{path.parent} {describe_missing(path.parent)}"
        raise UserError(f"{reason}: give the folder that `prepare` wrote as --out") from error
    except (OSError, msgspec.MsgspecError) as error:
        remedy = "copy the folder again, or delete it and prepare the corpus again"
        raise UserError(f"{path} cannot be read ({error}): {remedy}") from error
    if index.format_version != FORMAT_VERSION:
        problem = f"has version {index.format_version} of the format instead of {FORMAT_VERSION}"
        raise UserError(f"{path} {problem}; prepare the corpus again")
    for key, kind in NEEDED_SETTINGS.items():
        if not isinstance(index.settings.get(key), kind):
            expected = "a whole number" if kind is int else "a text"
            value = index.settings.get(key)
            problem = f"settings.{key} is {value!r} instead of {expected}"
            raise UserError(f"{path}: {problem}: prepare the corpus again, or add what is missing")
    for split in SPLITS:
        index.splits.setdefault(split, SplitIndex())
    return index


def read_or_begin_index(folder: Path, settings: dict[str, Any]) -> Index:
    """Return the index of a folder, which must have the same settings, or write a new one if it
    lists no tokens."""
    paths = [folder / name for name in (INDEX_NAME, STARTED_NAME) if (folder / name).exists()]
    if not paths:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if names:
            reason = f"is not empty ({', '.join(names[:3])}); choose a new folder"
            raise UserError(f"{folder} {reason}")
        return _begin_index(folder, settings)
    index = read_index(paths[0])
    if changes := _changes(index.settings, settings):
        state = "was prepared"
        use = "use the same ones"
        if paths[0].name == STARTED_NAME:
            if not _lists_tokens(index):  # such as after a mistake in the command, now corrected
                return _begin_index(folder, settings)
            state = "was begun"
            use = "continue it with the same ones"
        raise UserError(
            f"{folder} {state} with other settings ({'; '.join(changes)}): {use}, or use another "
            "folder"
        )
    return index


def _begin_index(folder: Path, settings: dict[str, Any]) -> Index:
    """Write an index without tokens. Delete files of tokens that a killed start has not listed."""
    index = Index(FORMAT_VERSION, settings, {split: SplitIndex() for split in SPLITS})
    write_index(folder / STARTED_NAME, index)
    for split in SPLITS:
        _shard_path(folder, split, 0).unlink(missing_ok=True)
    return index


def _lists_tokens(index: Index) -> bool:
    """Return whether a folder has tokens that `prepare` would keep."""
    return any(
        split.shards or split.partial is not msgspec.UNSET for split in index.splits.values()
    )


def _shard_path(folder: Path, split: Split, number: int) -> Path:
    return folder / f"{split}-{number:05d}.tokens"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return how the settings of a folder differ, each difference once."""
    different = [key for key, value in before.items() if value != now.get(key)]
    changes = {key: f"{key} was {before[key]!r} and is {now.get(key)!r}" for key in different}
    if "source" in changes:
        changes.pop("source_fingerprint", None)
    elif "source_fingerprint" in changes:
        of_files = f"names, sizes or times of the files of {before['source']}"
        changes["source_fingerprint"] = f"{of_files}, or the field of the text, have changed"
    if "tokenizer_fingerprint" not in changes:
        changes.pop("tokenizer", None)  # another path to the same tokenizer
    elif "tokenizer" in changes:
        changes.pop("tokenizer_fingerprint")
        changes.pop("vocab_size", None)
    return [*changes.values()]


def write_index(path: Path, index: Index) -> None:
    content = msgspec.json.format(msgspec.json.encode(index), indent=2)
    write_whole(path, content + b"\n")


@contextlib.contextmanager
def only_writer(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when the process ends, even if killed."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a"))  # created, never emptied
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"another process is writing {folder.absolute()}") from None
        except (FileExistsError, NotADirectoryError):
            obstacle = next(path for path in (folder, *folder.parents) if path.exists())
            raise UserError(
                f"cannot write into {folder}: {obstacle} is a file; choose a folder, or move it"
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot write into {folder.absolute()}: {error}; choose a folder that you may "
                "write to, on a disk with file locks"
            ) from error
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = f"cannot write into {folder.absolute()}: {error.strerror}"
            raise UserError(f"{reason}; make room, and start the same command again") from error


class ShardWriter:
    """Writer of the shards of one split. The piece that fills a shard closes it.

    The index lists a shard once it is whole, and what is recorded of the next one. A restart
    continues after that, and drops what was written later.
    """

    def __init__(self, folder: Path, split: Split, index: Index, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._index = index
        self._done = index.splits[split]
        self._dtype = token_type(index.settings["vocab_size"])
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._documents = 0
        self._checksum = 0
        self.last_piece = self._done.shards[-1].last_piece if self._done.shards else -1
        """Number of the last piece that is written."""
        for shard in self._done.shards:
            if damage := _wrong_size(folder, shard, index.settings["vocab_size"]):
                raise self._damaged(damage)
        if self._done.partial is not msgspec.UNSET:
            self._continue(self._done.partial)

    @property
    def tokens(self) -> int:
        """Tokens of the split so far, with those of an earlier start."""
        return self._done.tokens + self._tokens

    @property
    def _path(self) -> Path:
        return _shard_path(self._folder, self._split, len(self._done.shards))

    def _continue(self, partial: Partial) -> None:
        size = partial.tokens * self._dtype.itemsize
        if not self._path.exists() or self._path.stat().st_size < size:
            raise self._damaged(f"{self._path.name}: it has fewer than {size} bytes")
        self._file = self._path.open("r+b")
        self._file.truncate(size)
        self._file.seek(size)
        self._tokens = partial.tokens
        self._documents = partial.documents
        self._checksum = partial.checksum
        self.last_piece = partial.last_piece

    def _damaged(self, damage: str) -> UserError:
        return UserError(
            f"{self._folder} is damaged: {damage}; delete the folder, and start the same command "
            "again"
        )

    def add(self, piece: int, tokens: npt.NDArray[np.integer], ends_document: bool) -> None:
        assert piece > self.last_piece
        if self._file is None:
            self._file = self._path.open("wb")
        content = tokens.astype(self._dtype).tobytes()
        self._file.write(content)
        self._checksum = zlib.crc32(content, self._checksum)
        self._tokens += len(tokens)
        self._documents += ends_document
        self.last_piece = piece
        if self._tokens >= self._shard_tokens:
            self.finish_shard()

    def record(self) -> None:
        """Record in the index what is written of a shard, which is then on the disk. The caller
        writes the index."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._done.partial = Partial(
            tokens=self._tokens,
            documents=self._documents,
            checksum=self._checksum,
            last_piece=self.last_piece,
        )

    def finish_shard(self) -> None:
        """Close the shard that is being written, if any."""
        if self._file is None:
            return
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        shard = Shard(
            file=self._path.name,
            tokens=self._tokens,
            checksum=self._checksum,
            last_piece=self.last_piece,
        )
        self._done.shards.append(shard)
        self._done.partial = msgspec.UNSET
        self._done.tokens += self._tokens
        self._done.documents += self._documents
        write_index(self._folder / STARTED_NAME, self._index)
        self._file = None
        self._tokens = 0
        self._documents = 0
        self._checksum = 0


class TooLittleText(UserError):
    """A split of a corpus has no tokens, or less than a sequence of them."""


def describe_empty_validation(index: Index) -> str:
    """Say why the validation split of a corpus is empty, and what to do."""
    shards = [shard for split in index.splits.values() for shard in split.shards]
    pieces = 1 + max((shard.last_piece for shard in shards), default=-1)
    candidates = f"the {counted(pieces, 'piece')} of the text"
    if "cluster" in index.settings:  # whose documents have the numbers of those of the whole corpus
        candidates = "the documents of this cluster"
    elif pieces == 1 and (most := index.settings.get("max_tokens")):
        return (
            f"only one piece of the text was read, as --max-tokens is {most:,}, and it is not held "
            "out: raise --max-tokens of `prepare`, or set data.validation_corpus"
        )
    elif pieces == 1:
        return "the text is a single piece: add text, or set data.validation_corpus"
    share = index.settings.get("validation_fraction")
    if share is None:  # of another program
        return f"none of {candidates} is held out: set data.validation_corpus"
    return (
        f"none of {candidates} is held out: raise data.validation_fraction (of `prepare`: "
        f"--validation-fraction), which is {share:g}, or set data.validation_corpus"
    )


class TokenShards:
    """All tokens of one split of a folder, as one memory-mapped array.

    Opening compares the sizes of the shards with the index, and a read looks only at what it
    returns, so training starts without reading a large corpus. `find_damage` reads all of it.
    """

    def __init__(self, folder: Path, split: Split, tokenizer: Tokenizer | None = None) -> None:
        self.folder = folder
        self.name = f"the {split} split of {folder}"
        index = read_index(self.folder / INDEX_NAME)
        self._shards = index.splits[split].shards
        settings = index.settings
        self.documents = index.splits[split].documents
        """Number of documents that end in the split."""
        self._vocab_size = settings["vocab_size"]
        if not self._shards:
            reason = f"{self.name} has no tokens"
            if split == "validation":
                reason = f"{describe_empty_validation(index)}, or set validation.every = 0"
            raise TooLittleText(f"{settings['source']} ({folder}): {reason}")
        self.tokenizer = settings["tokenizer"]
        made_with = settings["tokenizer_fingerprint"]
        if tokenizer and tokenizer.fingerprint != made_with:
            raise UserError(
                f'data.tokenizer = "{tokenizer.name}" ({tokenizer.fingerprint}), but {folder} was '
                f'prepared with "{settings["tokenizer"]}" ({made_with}): set that one'
            )
        for shard in self._shards:
            if damage := _wrong_size(self.folder, shard, self._vocab_size):
                raise self._damaged(damage)
        self.settings = settings
        self._ends = np.cumsum([shard.tokens for shard in self._shards])
        facts = self._vocab_size, made_with
        identity = [(shard.tokens, shard.checksum, *facts) for shard in self._shards]
        self.fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        """Equal for two splits exactly if they hold the same tokens."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def begin_token(self) -> int | None:
        """Token that precedes each document, if any."""
        token: int | None = self.settings.get("begin_token")  # absent if another program wrote it
        return token

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens start to stop - 1, also across pieces. The result may be read-only."""
        assert 0 <= start < stop <= len(self), f"{start}:{stop} of {len(self)} tokens"
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        pieces = []
        for number in range(first, last + 1):
            begin = int(self._ends[number - 1]) if number else 0
            end = min(stop, int(self._ends[number]))
            pieces.append(self._read_piece(number, max(start, begin) - begin, end - begin))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read_piece(self, number: int, start: int, stop: int) -> Tokens:
        shard = self._shards[number]
        tokens = _map_shard(self.folder / shard.file, self._vocab_size)[start:stop]
        if damage := _unknown_token(shard, int(tokens.max()), self._vocab_size):
            raise self._damaged(damage)
        return tokens

    def _damaged(self, damage: str) -> UserError:
        command = f"{command_line('doctor')} --corpus {shlex.quote(str(self.folder))}"
        return UserError(
            f"{self.folder} is damaged: {damage}; copy this file again, or prepare the corpus "
            f"again. This lists all damaged files: {command}"
        )


@functools.lru_cache(maxsize=256)  # each map holds a file descriptor, and a process often has 1024
def _map_shard(path: Path, vocab_size: int) -> Tokens:
    return np.asarray(np.memmap(path, dtype=token_type(vocab_size), mode="r"))


# --- damage ---------------------------------------------------------------------------------------

_WRONG_CHECKSUM = "its checksum is wrong"


def find_damage(folder: Path) -> tuple[str, list[str]]:
    """Read all files of a folder. Return what was read, and each damaged file with the reason."""
    index = read_index(folder / INDEX_NAME)
    shards = [shard for split in SPLITS for shard in index.splits[split].shards]
    vocab_size = index.settings["vocab_size"]
    token_bytes = token_type(vocab_size).itemsize
    total = token_bytes * sum(shard.tokens for shard in shards)
    damages = []
    with (
        ThreadPoolExecutor(available_cores()) as pool,  # computing a checksum releases the GIL
        tqdm(total=total, **progress_options(f"check {folder}")) as bar,
    ):
        results = pool.map(lambda shard: _damage(folder, shard, vocab_size), shards)
        for shard, damage in zip(shards, results, strict=True):
            damages.append(damage)
            bar.update(token_bytes * shard.tokens)
    return f"{len(damages)} files, {total / 1e9:,.2f} GB", [*filter(None, damages)]


def _damage(folder: Path, shard: Shard, vocab_size: int) -> str:
    """Read a whole shard. Return what is wrong with it, or ""."""
    if damage := _wrong_size(folder, shard, vocab_size):
        return damage
    checksum = 0
    largest = 0
    try:
        with (folder / shard.file).open("rb") as file:
            while content := file.read(_READ_BYTES):
                checksum = zlib.crc32(content, checksum)
                largest = max(largest, int(np.frombuffer(content, token_type(vocab_size)).max()))
    except OSError as error:
        return f"{shard.file}: it cannot be read ({error})"
    if checksum != shard.checksum:
        return f"{shard.file}: {_WRONG_CHECKSUM}"
    return _unknown_token(shard, largest, vocab_size)


def _wrong_size(folder: Path, shard: Shard, vocab_size: int) -> str:
    path = folder / shard.file
    expected = shard.tokens * token_type(vocab_size).itemsize
    size = path.stat().st_size if path.exists() else 0
    return "" if size == expected else f"{path.name}: it has {size} bytes instead of {expected}"


def _unknown_token(shard: Shard, largest: int, vocab_size: int) -> str:
    """Return what is wrong with a shard, or "", by the largest of the tokens that were read."""
    if largest < vocab_size:
        return ""
    return f"{shard.file}: it has token {largest}, of a vocabulary of {vocab_size}"
