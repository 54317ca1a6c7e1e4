"""Token shards: how tokens lie on disk, and reading them through memory maps.

A corpus is a folder of shards `train-00000.tokens`, `validation-00000.tokens`, ... and a manifest `corpus.json`, which
is written last: a folder without it is not finished. A shard is a header of 128 bytes and its tokens, little-endian.
"""

import hashlib
import json
import struct
import zlib
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.files import write_whole
from torchtitan_diloco.data.tokenizer import Tokenizer

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

MANIFEST_NAME = "corpus.json"
MAGIC = b"TDTOKENS"
FORMAT_VERSION = 1
HEADER_BYTES = 128

Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32

# Magic, version, then the fields of ShardHeader in their order; the crc32 of all that; zeros up to HEADER_BYTES.
_FIELDS = struct.Struct("<8sIIIIQQQQ8s")
_HEADER_CHECKSUM = struct.Struct("<I")

_MAPS_AT_ONCE = 256  # every map holds a file descriptor, of which a process commonly has 1024
_CHECKSUM_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class ShardHeader:
    """What the first 128 bytes of a shard say."""

    token_bytes: int
    """2 or 4."""
    vocab_size: int
    checksum: int
    """crc32 of the payload."""
    tokens: int
    documents: int
    """Documents that end in this shard."""
    first_piece: int
    end_piece: int
    """Of the source's pieces first_piece ... end_piece - 1, those of this split are in this shard."""
    tokenizer: str
    """Fingerprint of the tokenizer, 16 hexadecimal digits."""

    def pack(self) -> bytes:
        *numbers, tokenizer = asdict(self).values()
        fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, *numbers, bytes.fromhex(tokenizer))
        return (fields + _HEADER_CHECKSUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def read_header(path: Path) -> ShardHeader:
    """The header of a shard whose size agrees with it. Reads 128 bytes, whatever the size of the shard."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except OSError as error:
        raise ValueError(f"cannot read the token shard {path}: {error}") from error
    if len(head) < HEADER_BYTES:
        raise ValueError(
            f"{path} is too short for a token shard: {size} bytes, its header alone has {HEADER_BYTES}"
        )
    magic, version, *numbers, tokenizer = _FIELDS.unpack(head[: _FIELDS.size])
    if magic != MAGIC:
        raise ValueError(
            f"{path} is not a token shard: it begins with {magic!r} instead of {MAGIC!r}"
        )
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version} of the shard format, this code reads version {FORMAT_VERSION}; prepare the "
            f"corpus again"
        )
    (checksum,) = _HEADER_CHECKSUM.unpack_from(head, _FIELDS.size)
    if checksum != zlib.crc32(head[: _FIELDS.size]):
        raise ValueError(
            f"the header of {path} is damaged (its checksum is wrong); prepare the corpus again"
        )
    header = ShardHeader(*(*numbers, tokenizer.hex()))
    expected = HEADER_BYTES + header.tokens * header.token_bytes
    if size != expected:
        kind = "truncated" if size < expected else "followed by something else"
        raise ValueError(
            f"{path} is {kind}: {size} bytes where {header.tokens} tokens of {header.token_bytes} bytes and the header "
            f"make {expected}; copy it or prepare the corpus again"
        )
    return header


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes a token wherever the vocabulary allows it."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def shard_name(split: Split, number: int) -> str:
    return f"{split}-{number:05d}.tokens"


def write_manifest(folder: Path, settings: dict[str, Any]) -> None:
    """Lists the shards of the folder. Its presence says that the corpus is complete."""
    splits = {}
    for split in SPLITS:
        paths = sorted(folder.glob(f"{split}-*.tokens"))
        headers = {path.name: read_header(path) for path in paths}
        splits[split] = {
            "tokens": sum(header.tokens for header in headers.values()),
            "documents": sum(header.documents for header in headers.values()),
            "shards": [
                {"file": name, "tokens": header.tokens, "checksum": header.checksum}
                for name, header in headers.items()
            ],
        }
    manifest = {"format_version": FORMAT_VERSION, "settings": settings, "splits": splits}
    write_whole(folder / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} is not a finished folder of token shards: it has no {MANIFEST_NAME}, which is written last. If "
            f"preparing it was interrupted, run the same command again: it continues."
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the manifest {path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} is not a manifest of version {FORMAT_VERSION}; prepare the corpus again"
        )
    return manifest


class TokenShards:
    """All tokens of one split as one long array that is never loaded."""

    def __init__(
        self, folder: Path | str, split: Split, tokenizer: Tokenizer | None = None
    ) -> None:
        self.folder = Path(folder)
        self.split = split
        manifest = read_manifest(self.folder)
        self.settings: dict[str, Any] = manifest["settings"]
        listed = manifest["splits"][split]["shards"]
        if not listed:
            raise ValueError(self._explain_empty())
        self._paths = [self.folder / shard["file"] for shard in listed]
        self._headers = [read_header(path) for path in self._paths]
        for path, header, shard in zip(self._paths, self._headers, listed, strict=True):
            if (header.tokens, header.checksum) != (shard["tokens"], shard["checksum"]):
                raise ValueError(
                    f"{path} is not the shard that {MANIFEST_NAME} lists: {header.tokens} tokens with checksum "
                    f"{header.checksum:#010x} instead of {shard['tokens']} with {shard['checksum']:#010x}"
                )
            self._check_tokenizer(path, header, tokenizer)
        self.vocab_size = self._headers[0].vocab_size
        self.documents = sum(header.documents for header in self._headers)
        self._ends = np.cumsum([header.tokens for header in self._headers])
        self._maps: OrderedDict[int, Tokens] = OrderedDict()
        identity = [(h.tokens, h.checksum, h.vocab_size, h.tokenizer) for h in self._headers]
        self.fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        """The same for two corpora exactly if they hold the same tokens, wherever they lie."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"the {self.split} split of {self.folder}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"TokenShards({str(self.folder)!r}, {self.split!r}): {len(self):,} tokens"

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens start ... stop - 1, also across shards. Read-only: within one shard it is the mapped file itself."""
        assert 0 <= start < stop <= len(self), f"{start}:{stop} of {len(self)} tokens"
        first, last = (int(i) for i in np.searchsorted(self._ends, [start, stop - 1], side="right"))
        parts = []
        for shard in range(first, last + 1):
            begin = int(self._ends[shard]) - self._headers[shard].tokens
            part = self._map(shard)[max(start - begin, 0) : stop - begin]
            if part.max() >= self.vocab_size:
                position = max(start - begin, 0) + int(np.argmax(part >= self.vocab_size))
                raise ValueError(
                    f"{self._paths[shard]} is damaged: token {position} is {self._map(shard)[position]}, the "
                    f"vocabulary ends at {self.vocab_size - 1}; copy the shard or prepare the corpus again"
                )
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def verify(self) -> None:
        """Reads every byte and compares the checksums that were computed when the shards were written."""
        for path, header in zip(self._paths, self._headers, strict=True):
            checksum = 0
            with path.open("rb") as file:
                file.seek(HEADER_BYTES)
                while chunk := file.read(_CHECKSUM_CHUNK_BYTES):
                    checksum = zlib.crc32(chunk, checksum)
            if checksum != header.checksum:
                raise ValueError(
                    f"{path} is damaged: its tokens have checksum {checksum:#010x}, its header says "
                    f"{header.checksum:#010x}; copy it or prepare the corpus again"
                )

    def _map(self, shard: int) -> Tokens:
        mapped = self._maps.pop(shard, None)
        if mapped is None:
            dtype = token_dtype(self.vocab_size)
            mapped = np.asarray(
                np.memmap(self._paths[shard], dtype=dtype, mode="r", offset=HEADER_BYTES)
            )
            if len(self._maps) >= _MAPS_AT_ONCE:
                self._maps.popitem(last=False)
        self._maps[shard] = mapped
        return mapped

    def _check_tokenizer(
        self, path: Path, header: ShardHeader, tokenizer: Tokenizer | None
    ) -> None:
        first = self._headers[0]
        if (header.vocab_size, header.tokenizer) != (first.vocab_size, first.tokenizer):
            raise ValueError(f"{path} was written with another tokenizer than {self._paths[0]}")
        if tokenizer is not None and header.tokenizer != tokenizer.fingerprint:
            raise ValueError(
                f'data.tokenizer = "{tokenizer.name}" ({tokenizer.vocab_size} tokens, fingerprint '
                f'{tokenizer.fingerprint}) is not what {self.folder} was prepared with: "{self.settings["tokenizer"]}" '
                f"({header.vocab_size} tokens, fingerprint {header.tokenizer}). Set data.tokenizer to that one, or "
                f"prepare the corpus with yours in another folder."
            )

    def _explain_empty(self) -> str:
        fraction = self.settings["validation_fraction"]
        if self.split == "validation":
            return (
                f"{self.folder} holds out nothing for validation (share {fraction:g} of "
                f"{self.settings['source']!r}): raise data.validation_fraction (for a shard folder: prepare it with a "
                f"larger --validation-fraction), or set data.validation_corpus"
            )
        return f"{self.folder} has no tokens to train on; its source is {self.settings['source']!r}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_maps": OrderedDict()
        }  # a reading process maps the files again: nothing is copied
