"""The syncer's arithmetic: from the parts of a round to the next version of a fragment.

Parts are averaged in fp32 in the order of slots, Theta makes an outer step, and the change from P
to Theta is encoded. P takes the decoded change, as on all islands; what is rounded away stays in
Theta - P. Nothing here depends on the number of ranks or islands, and with fp32, P is Theta: such a
run has the bits of one job.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.arithmetic import outer_step, slot_count
from torchtitan_diloco.diloco.codecs import add_to_mean
from torchtitan_diloco.diloco.codecs.base import Codec
from torchtitan_diloco.diloco.config import OuterOptimizer
from torchtitan_diloco.diloco.exchange import PIECE
from torchtitan_diloco.islands.layout import Layout, Shapes
from torchtitan_diloco.islands.payload import (
    HEADER_BYTES,
    Buffer,
    Header,
    Piece,
    codec_for,
    decode,
    read_header,
    write_header,
)
from torchtitan_diloco.islands.rules.changes import CODECS
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.scratch import FragmentState


def outer_optimizer(settings: Settings) -> OuterOptimizer:
    """Return the outer optimizer of a run. Raise a UserError if it or the codec is unknown."""
    if settings.codec not in CODECS:
        raise UserError(f"the run uses the codec {settings.codec}: give one of {', '.join(CODECS)}")
    try:
        chosen = OuterOptimizer(
            name=settings.outer_optimizer,  # type: ignore[arg-type]
            lr=settings.outer_lr,
            **settings.outer_numbers,
        )
        slot_count(chosen)
    except TypeError as error:
        raise UserError(f"the outer optimizer of the run is unknown: {error}") from None
    return chosen


def header_of(settings: Settings) -> Header:
    """Return the header of the versions of a run."""
    return Header(settings.codec, settings.block_size)


class Mean:
    """The weighted mean of parts, whose ranks may have other shards."""

    def __init__(self, shapes: Shapes, out: Tensor) -> None:
        self._shapes = shapes
        self._out = out
        self._total = 0

    def add(self, content: Buffer, weight: int) -> None:
        """Add a part. The first one becomes the mean."""
        self._total += weight
        share = weight / self._total
        layout = Layout(self._shapes, read_header(content).ranks)
        spans = [layout.spans(layout.ranks, rank) for rank in range(layout.ranks)]
        for piece in decode(content, layout.sizes(layout.ranks)):
            for span in spans[piece.rank]:
                self._add_piece(piece, span.local, span.whole, span.size, share)

    def _add_piece(self, piece: Piece, local: int, whole: int, size: int, share: float) -> None:
        """Add the values of a piece that are in a span."""
        first = max(piece.start, local)
        last = min(piece.start + piece.values.numel(), local + size)
        if first >= last:
            return
        values = piece.values[first - piece.start : last - piece.start]
        mean = self._out[whole + first - local : whole + last - local]
        if share == 1.0:
            mean.copy_(values)
        else:
            add_to_mean(mean, values, share)


@torch.no_grad()
def merge(
    before: FragmentState,
    after: FragmentState,
    layout: Layout,
    parts: Sequence[tuple[Buffer, int]],
    settings: Settings,
    weight_of_all: int,
) -> Tensor | None:
    """Write the next version to `after`, and return the content of its object.

    `parts`: contents and weights in the order of slots. Return None if the version would not be
    finite; `after` is then undefined.
    """
    counted = [(content, weight) for content, weight in parts if weight]
    weight = sum(weight for _, weight in counted)
    optimizer = outer_optimizer(settings)
    if weight != weight_of_all and weight_of_all:
        optimizer = replace(optimizer, lr=optimizer.lr * (weight / weight_of_all))
    delta = after.theta  # the step replaces the mean with the next Theta
    mean = Mean(layout.shapes, delta)
    for content, own in counted:
        mean.add(content, own)
    steps = before.steps + bool(counted)
    header = header_of(settings)
    codec = codec_for(header.codec, header.block_size)
    payload = torch.empty(HEADER_BYTES + codec.wire_bytes(layout.values), dtype=torch.uint8)
    write_header(payload, header)
    encoded = payload[HEADER_BYTES:].split(codec.wire_bytes(PIECE))
    room = torch.empty(min(PIECE, layout.values), dtype=torch.float32)
    largest = list[Tensor]()
    for number, start in enumerate(range(0, layout.values, PIECE)):
        end = start + PIECE
        theta = after.theta[start:end]
        slots = [slot[start:end] for slot in after.slots]
        for slot, old in zip(slots, before.slots, strict=True):
            slot.copy_(old[start:end])
        if counted:
            outer_step(optimizer, before.theta[start:end], theta, slots, count=steps)
        else:
            theta.copy_(before.theta[start:end])
        largest += [torch.linalg.vector_norm(one, ord=torch.inf) for one in (theta, *slots)]
        _publish(
            codec,
            theta,
            published=before.published[start:end],
            next_copy=after.published[start:end],
            encoded=encoded[number],
            room=room,
        )
    if not bool(torch.stack(largest).isfinite().all()):
        return None
    after.complete(steps)
    return payload


def _publish(
    codec: Codec,
    theta: Tensor,
    *,
    published: Tensor,
    next_copy: Tensor,
    encoded: Tensor,
    room: Tensor,
) -> None:
    """Encode a piece of the next version, and write to `next_copy` what it makes of `published`."""
    if codec.is_fp32:
        codec.encode(theta, encoded)
        next_copy.copy_(theta)
        return
    change = room[: theta.numel()]
    torch.sub(theta, published, out=change)
    codec.encode(change, encoded)
    codec.decode(encoded, change)
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
