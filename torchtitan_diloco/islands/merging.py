"""The syncer's arithmetic: from the parts of a round to the next version of a fragment.

Parts are averaged in fp32 in the order of slots, Theta makes an outer step, and the change from P
to Theta is encoded. P takes the decoded change, as on all islands; what is rounded away stays in
Theta - P. Nothing here depends on the number of ranks or islands, and with fp32, P is Theta: such a
run has the bits of one job.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.codecs import add_to_mean
from torchtitan_diloco.diloco.config import OuterOptimizer
from torchtitan_diloco.diloco.formats import island_formats
from torchtitan_diloco.diloco.outer_step import STEP_VALUES, outer_step
from torchtitan_diloco.islands.layout import Layout, Shapes
from torchtitan_diloco.islands.payload import (
    HEADER_BYTES,
    PartHeader,
    PartReader,
    codec_for,
    decode,
    memory_of,
    read_header,
    write_header,
)
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.scratch import FragmentState
from torchtitan_diloco.store.store import Buffer

MERGE_PIECE = 4 * STEP_VALUES
"""Values that are merged at once, in a hundred calls of torch for four parts. Smaller pieces would
fit into a faster cache, which saves less than the calls cost on a busy machine."""


def outer_optimizer(settings: Settings) -> OuterOptimizer:
    """Return the outer optimizer of a run. Raise a UserError if it or the codec is unknown."""
    if settings.codec not in island_formats():
        known = ", ".join(island_formats())
        raise UserError(f"the run uses the codec {settings.codec}: give one of {known}")
    try:
        return OuterOptimizer(
            name=settings.outer_optimizer, lr=settings.outer_lr, **settings.outer_numbers
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"the outer optimizer of the run is unknown: {error}") from None


class Mean:
    """The weighted mean of parts, whose ranks may have other shards."""

    def __init__(self, shapes: Shapes, parts: Sequence[tuple[Buffer, int]]) -> None:
        """Open the parts. `parts`: their contents and weights."""
        self._readers = [PartReader(content, shapes) for content, _ in parts]
        self._squares = [0.0 for _ in parts]
        """Sum of the squares of the values of each part that were read."""
        self._shares = list[float]()
        """Weight of each part in the mean of those up to it."""
        total = 0
        for _, weight in parts:
            total += weight
            self._shares.append(weight / total if weight else 0.0)
        self._room = torch.empty(MERGE_PIECE)

    @property
    def norms(self) -> list[float]:
        """Return the norm of each part that was read, NaN or infinite if a value is."""
        return [math.sqrt(square) for square in self._squares]

    def read(self, start: int, out: Tensor) -> None:
        """Write at most MERGE_PIECE values of the mean from an index of the whole fragment on.
        Nothing is written if no part has a weight."""
        room = self._room[: out.numel()]
        for number, (reader, share) in enumerate(zip(self._readers, self._shares, strict=True)):
            values = out if share == 1.0 else room
            reader.read(start, values)
            self._squares[number] += _square(values)
            if 0.0 < share < 1.0:
                add_to_mean(out, values, share)


def _square(values: Tensor) -> float:
    """Return the sum of the squares of values, NaN or infinite if a value is."""
    square = float(torch.dot(values, values))
    if not math.isfinite(square):  # or too large for fp32, in which it is far faster
        square = float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
    return square


class Merged(NamedTuple):
    """Result of a merge."""

    norms: list[float]
    """Norm of each part, NaN or infinite if a value is."""
    content: memoryview | None
    """Content of the object of the version, or None if it would not be finite."""


@torch.no_grad()
def merge(
    before: FragmentState,
    after: FragmentState,
    layout: Layout,
    parts: Sequence[tuple[Buffer, int]],
    settings: Settings,
    *,
    weight_of_all: int,
    clock: int,
) -> Merged:
    """Write the next version to `after`. The content of its object may be in this memory.

    `parts`: contents and weights in the order of slots. `clock`: tokens of the fragment with them.
    If the version would not be finite, `after` is undefined.
    """
    weight = sum(weight for _, weight in parts)
    optimizer = outer_optimizer(settings)
    lr = optimizer.lr_after(clock)
    if weight != weight_of_all and weight_of_all:
        lr *= weight / weight_of_all
    mean = Mean(layout.shapes, parts)
    steps = before.steps + bool(weight)
    version = _Version(settings, before.published, after.published)
    squares = list[Tensor]()
    for start in range(0, layout.values, MERGE_PIECE):
        end = start + MERGE_PIECE
        theta = after.theta[start:end]
        slots = [slot[start:end] for slot in after.slots]
        for slot, old in zip(slots, before.slots, strict=True):
            slot.copy_(old[start:end])
        mean.read(start, theta)
        if weight:  # the step replaces the mean with the next Theta
            outer_step(optimizer, before.theta[start:end], theta, slots, count=steps, lr=lr)
        else:
            theta.copy_(before.theta[start:end])
        squares += [torch.dot(values, values) for values in (theta, *slots)]
        version.publish(theta, start)
    is_finite = bool(torch.stack(squares).isfinite().all())  # far faster than each value
    buffers = (after.theta, *after.slots)
    if not is_finite and not all(bool(buffer.isfinite().all()) for buffer in buffers):
        return Merged(mean.norms, None)
    after.complete(steps)
    content = after.copy_content() if version.is_copy else memory_of(version.payload)
    return Merged(mean.norms, content)


class _Version:
    """The content of a version, and what it makes of P."""

    def __init__(self, settings: Settings, published: Tensor, next_copy: Tensor) -> None:
        header = PartHeader(settings.codec, settings.block_size)
        self._codec = codec_for(header.codec, header.block_size)
        self.is_copy = self._codec.is_fp32
        """Whether the content is that of the next copy. It has no payload then."""
        self._published = published
        self._next_copy = next_copy
        values = 0 if self.is_copy else published.numel()
        size = HEADER_BYTES + self._codec.wire_bytes(values)
        self.payload = torch.empty(size, dtype=torch.uint8)
        write_header(self.payload, header)
        self._room = torch.empty(min(MERGE_PIECE, values), dtype=torch.float32)

    def publish(self, theta: Tensor, start: int) -> None:
        """Encode a piece of the version, and write the next P.

        `theta`: the next one. `start`: a multiple of MERGE_PIECE.
        """
        end = start + theta.numel()
        next_copy = self._next_copy[start:end]
        if self.is_copy:
            next_copy.copy_(theta)
            return
        published = self._published[start:end]
        encoded = self.payload[HEADER_BYTES:][
            self._codec.wire_bytes(start) : self._codec.wire_bytes(end)
        ]
        change = self._room[: theta.numel()]
        torch.sub(theta, published, out=change)
        self._codec.encode(change, encoded)
        self._codec.decode(encoded, change)
        torch.add(published, change, out=next_copy)


@torch.no_grad()
def apply_version(published: Tensor, content: Buffer) -> None:
    """Make P the next version, in place: add its change, or replace P."""
    replaces = read_header(content).codec == "fp32"
    for piece in decode(content, [published.numel()]):
        target = published[piece.start :][: piece.values.numel()]
        if replaces:
            target.copy_(piece.values)
        else:
            target.add_(piece.values)


@torch.no_grad()
def read_copy(content: Buffer, published: Tensor) -> None:
    """Read the content of a copy. Raise a MalformedError if it is not one in fp32."""
    if read_header(content).codec != "fp32":
        raise MalformedError("a copy is not in fp32")
    apply_version(published, content)


@torch.no_grad()
def read_outer(content: Buffer, state: FragmentState) -> int:
    """Read Theta and the state of the optimizer, and return the number of its steps."""
    buffers = (state.theta, *state.slots)
    header = read_header(content)
    if header.codec != "fp32":
        raise MalformedError("the state of an outer optimizer is not in fp32")
    for piece in decode(content, [len(buffers) * state.values]):
        start = piece.start
        values = piece.values
        while values.numel():
            number, offset = divmod(start, state.values)
            target = buffers[number][offset : offset + values.numel()]
            target.copy_(values[: target.numel()])
            start += target.numel()
            values = values[target.numel() :]
    return header.steps
