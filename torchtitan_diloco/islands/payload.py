"""Bytes of the objects with tensors: a header, and encoded values.

| object | values |
|---|---|
| part | delta of a fragment, P - theta: those of each rank, one after the other |
| version | change of the published copy P; with fp32 the next P itself |
| copy, and that of a founding | P in fp32 |
| outer | Theta in fp32, then the state of the outer optimizer |

P, Theta and versions are in the flat order of the whole fragment (layout.py). All are encoded in
pieces of a fixed number of values, so a range of them can be decoded alone.
"""

import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs import Codec, build_codec
from torchtitan_diloco.diloco.codecs.base import UNIT
from torchtitan_diloco.diloco.config import BLOCK_SIZES, Quantization
from torchtitan_diloco.diloco.exchange import GPU_CHUNK, PIECE
from torchtitan_diloco.diloco.formats import NAME_BYTES, island_formats
from torchtitan_diloco.islands.layout import Layout, Shapes
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.note import MOST_RANKS, Part
from torchtitan_diloco.store.store import Buffer

_MAGIC = b"tdv1"
_HEADER = struct.Struct(f"<4sI{NAME_BYTES}sIIQ")
HEADER_BYTES = _HEADER.size


class PartHeader(NamedTuple):
    """The header of a part, or of another object with tensors."""

    codec: str = "fp32"
    block_size: int = 64
    ranks: int = 1
    """Number of ranks whose values follow each other."""
    steps: int = 0
    """Of an outer state: number of steps of the optimizer."""

    def pack(self) -> bytes:
        codec = self.codec.encode()
        return _HEADER.pack(_MAGIC, self.ranks, codec, self.block_size, 0, self.steps)


def read_header(content: Buffer) -> PartHeader:
    """Return the header of a content. Raise a MalformedError if it is not one."""
    if len(content) < HEADER_BYTES:
        raise MalformedError("it is shorter than its header")
    magic, ranks, codec, block_size, _, steps = _HEADER.unpack_from(content)
    header = PartHeader(codec.rstrip(b"\0").decode("ascii", "replace"), block_size, ranks, steps)
    is_known = magic == _MAGIC and header.codec in island_formats() and block_size in BLOCK_SIZES
    if not is_known or not 1 <= ranks <= MOST_RANKS:
        raise MalformedError("its header is unknown")
    return header


def bytes_of(content: Buffer) -> Tensor:
    """Return the memory of a content as a tensor of bytes."""
    return torch.frombuffer(content, dtype=torch.uint8)


def memory_of(values: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes on the host."""
    return memoryview(values.numpy())  # type: ignore[arg-type] # a buffer from Python 3.12 on


class _Codecs(threading.local):
    """Codecs of a thread: they have scratch buffers."""

    def __init__(self) -> None:
        self.built = dict[tuple[str, int], Codec]()


_codecs = _Codecs()


def codec_for(name: str, block_size: int) -> Codec:
    """Return a codec for use in this thread."""
    key = name, block_size
    if key not in _codecs.built:
        _codecs.built[key] = build_codec(Quantization(codec=name, block_size=block_size))
    return _codecs.built[key]


# --- encode ---------------------------------------------------------------------------------------


def encode(values: Tensor, header: PartHeader) -> Tensor:
    """Return a header and encoded values, in host memory that nothing else uses."""
    codec = codec_for(header.codec, header.block_size)
    payload = torch.empty(HEADER_BYTES + codec.wire_bytes(values.numel()), dtype=torch.uint8)
    write_header(payload, header)
    encode_into(payload[HEADER_BYTES:], codec, values)
    return payload


def encode_into(payload: Tensor, codec: Codec, values: Tensor) -> None:
    """Encode values on their device, and write them to host memory."""
    if values.device == payload.device:
        encode_values(codec, values, payload)
        return
    encoded = torch.empty_like(payload, device=values.device)
    encode_values(codec, values, encoded)
    payload.copy_(encoded)


def write_header(payload: Tensor, header: PartHeader) -> None:
    """Write a header to the beginning of a tensor of bytes."""
    payload[:HEADER_BYTES].copy_(bytes_of(bytearray(header.pack())))


def encode_values(codec: Codec, values: Tensor, payload: Tensor) -> None:
    """Encode values piece by piece, without a header."""
    piece = GPU_CHUNK if values.is_cuda else PIECE
    pieces = payload.split(codec.wire_bytes(piece))
    for part, encoded in zip(values.split(piece), pieces, strict=True):
        codec.encode(part, encoded)


# --- decode ---------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Decoded values."""

    rank: int
    start: int
    """Index of the first value among those of the rank."""
    values: Tensor
    """To be read until the next piece: a scratch buffer, or the content itself."""


def decode(content: Buffer, sizes: Sequence[int]) -> Iterator[Piece]:
    """Yield the decoded values of each rank in turn.

    `sizes`: number of values of each rank. Raise a MalformedError if the content has another size.
    """
    codec, shards = _shards_of(content, sizes)
    room = torch.empty(min(PIECE, max(sizes, default=0)), dtype=torch.float32)
    for rank, (size, shard) in enumerate(zip(sizes, shards, strict=True)):
        for start, values in _decode_pieces(codec, shard, room, range(size)):
            yield Piece(rank, start, values)


def _shards_of(content: Buffer, sizes: Sequence[int]) -> tuple[Codec, Sequence[Tensor]]:
    """Return the codec of a content, and the encoded values of each rank."""
    header = read_header(content)
    codec = codec_for(header.codec, header.block_size)
    shards = [codec.wire_bytes(size) for size in sizes]
    if len(sizes) != header.ranks or len(content) != HEADER_BYTES + sum(shards):
        raise MalformedError(f"it has {len(content)} bytes, of {header.ranks} ranks")
    return codec, bytes_of(content)[HEADER_BYTES:].split(shards)


class PartReader:
    """Decodes a part in the order of the whole fragment, in one thread."""

    def __init__(self, content: Buffer, shapes: Shapes) -> None:
        """Raise a MalformedError if the content has another size."""
        ranks = read_header(content).ranks
        layout = Layout(shapes, ranks)
        self._sizes = layout.sizes(ranks)
        self._codec, self._shards = _shards_of(content, self._sizes)
        self._spans = sorted(
            ((span, rank) for rank in range(ranks) for span in layout.spans(ranks, rank)),
            key=lambda pair: pair[0].whole,
        )
        self._room = torch.empty(0)

    def read(self, start: int, out: Tensor) -> None:
        """Decode the values from an index of the whole fragment on."""
        number = bisect_right(self._spans, start, key=lambda pair: pair[0].whole) - 1
        while out.numel():
            span, rank = self._spans[number]
            offset = start - span.whole
            part = out[: span.size - offset]
            self._decode(rank, span.local + offset, part)
            start += part.numel()
            out = out[part.numel() :]
            number += 1

    def _decode(self, rank: int, start: int, out: Tensor) -> None:
        """Decode the values of a rank from an index on, with those of whole units."""
        codec = self._codec
        end = start + out.numel()
        first = start // UNIT * UNIT
        last = min(self._sizes[rank], -(-end // UNIT) * UNIT)
        encoded = self._shards[rank][codec.wire_bytes(first) : codec.wire_bytes(last)]
        if encoded.data_ptr() % 4:  # codecs view bytes as words
            encoded = encoded.clone()
        if (first, last) == (start, end):
            codec.decode(encoded, out)
            return
        if self._room.numel() < last - first:
            self._room = torch.empty(last - first)
        values = self._room[: last - first]
        codec.decode(encoded, values)
        out.copy_(values[start - first : end - first])


# --- the bytes of a version that a rank needs -----------------------------------------------------


def _covers(layout: Layout, rank: int) -> list[range]:
    """Return which values contain the spans of a rank and can be decoded alone."""
    return [
        range(
            span.whole // UNIT * UNIT,
            min(layout.values, -(-(span.whole + span.size) // UNIT) * UNIT),
        )
        for span in layout.spans(layout.ranks, rank)
    ]


def cut(content: Buffer, layout: Layout, rank: int) -> list[Tensor]:
    """Return the bytes of a version, or a copy, that a rank needs for each of its spans.

    Raise a MalformedError if the content has another size.
    """
    header = read_header(content)
    codec = codec_for(header.codec, header.block_size)
    payload = bytes_of(content)[HEADER_BYTES:]
    if header.ranks != 1 or payload.numel() != codec.wire_bytes(layout.values):
        raise MalformedError(f"it has {len(content)} bytes, of {header.ranks} ranks")
    return [
        payload[codec.wire_bytes(cover.start) : codec.wire_bytes(cover.stop)]
        for cover in _covers(layout, rank)
    ]


def cut_sizes(header: PartHeader, layout: Layout, rank: int) -> list[int]:
    """Return the sizes of what `cut` returns."""
    codec = codec_for(header.codec, header.block_size)
    return [
        codec.wire_bytes(cover.stop) - codec.wire_bytes(cover.start)
        for cover in _covers(layout, rank)
    ]


def decode_cut(encoded: Sequence[Tensor], header: PartHeader, layout: Layout) -> Iterator[Tensor]:
    """Yield the values of this rank in order, to be read until the next ones.

    `encoded`: what `cut` returns for it.
    """
    codec = codec_for(header.codec, header.block_size)
    covers = _covers(layout, layout.rank)
    room = torch.empty(min(PIECE, max(map(len, covers), default=0)), dtype=torch.float32)
    for span, cover, shard in zip(layout.mine, covers, encoded, strict=True):
        first = span.whole
        last = span.whole + span.size
        for start, values in _decode_pieces(codec, shard, room, cover):
            yield values[max(0, first - start) : last - start]


def _decode_pieces(
    codec: Codec, payload: Tensor, room: Tensor, places: range
) -> Iterator[tuple[int, Tensor]]:
    """Yield decoded values, and the place of the first one. `room`: memory for a piece."""
    if payload.data_ptr() % 4:  # codecs view bytes as words
        payload = payload.clone()
    encoded = payload.split(codec.wire_bytes(PIECE))
    for number, start in enumerate(range(places.start, places.stop, PIECE)):
        if codec.is_fp32:
            yield start, encoded[number].view(torch.float32)
            continue
        values = room[: min(PIECE, places.stop - start)]
        codec.decode(encoded[number], values)
        yield start, values


def check_part(content: Buffer, part: Part, layout: Layout, block_size: int) -> None:
    """Raise a MalformedError if the bytes of a part are not what its note says.

    `layout`: that of its ranks. Its values are looked at when they are merged.
    """
    if read_header(content) != PartHeader(part.codec, block_size, part.ranks):
        raise MalformedError("its header differs from its note")
    if len(content) != part.size:
        raise MalformedError(f"it has {len(content)} bytes, and its note says {part.size}")
    _shards_of(content, layout.sizes(part.ranks))
