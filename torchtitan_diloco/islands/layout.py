"""Ranks of an island, and the values of a fragment on each of them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.tensors import shard_rows
from torchtitan_diloco.diloco.checksums import ROW, row_sums
from torchtitan_diloco.diloco.fragments import Fragment

NO_TIMEOUT = timedelta(days=365)
"""Ranks wait for the first one, which may wait for other islands. `Liveness` detects failures."""
SUMMED_VALUES = 2**20
"""Values of a block of whole rows, whose sums are computed together for a checksum."""


class Ranks:
    """Process groups of an island, one per thread that uses them. A single rank needs none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Create the groups collectively. `group`: all ranks of the island."""
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0
        self.decisions, self.copies, self.uploads = (
            dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=NO_TIMEOUT,
                backend="gloo",
                use_local_synchronization=True,
            )
            if self.size > 1
            else None
            for _ in range(3)
        )


def collect(mine: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the concatenated tensors of all ranks on the first rank, and an empty one elsewhere.

    `sizes`: elements of each rank's tensor.
    """
    if group is None:
        return mine
    if group.rank():
        if mine.numel():
            dist.send(mine, group_dst=0, group=group)
        return mine[:0]
    pieces = [mine, *(mine.new_empty(size) for size in sizes[1:])]
    for rank, piece in enumerate(pieces):
        if rank and piece.numel():
            dist.recv(piece, group_src=rank, group=group)
    return torch.cat(pieces)


class Span(NamedTuple):
    """Values that are contiguous in a rank's flat buffer and in the whole fragment."""

    local: int
    whole: int
    size: int


Shapes: TypeAlias = Sequence[tuple[int, int]]
"""Rows, and values per row, of each parameter of a fragment."""


def shapes_of(fragment: Fragment) -> list[tuple[int, int]]:
    """Return the shapes of the whole parameters, which ranks share by rows."""
    shapes = list[tuple[int, int]]()
    for part in fragment.parts:
        rows = part.parameter.shape[0] if part.parameter.dim() else 1
        shapes.append((rows, part.parameter.numel() // max(1, rows)))
    return shapes


class Layout:
    """Flat order of all values of a fragment: its parameters in order, their rows in order.

    Other islands may have a different number of ranks.
    """

    def __init__(self, shapes: Shapes, ranks: int = 1, rank: int = 0) -> None:
        self.shapes = shapes
        self.values = sum(rows * width for rows, width in shapes)
        self.ranks = ranks
        self.rank = rank
        self.mine = self.spans(ranks, rank)

    def spans(self, ranks: int, rank: int) -> list[Span]:
        """Return the spans of a rank in order, as few as possible."""
        spans = list[Span]()
        local = 0
        base = 0
        for rows, width in self.shapes:
            mine = shard_rows(rows, rank, ranks)
            span = Span(local, base + mine.start * width, len(mine) * width)
            local += span.size
            base += rows * width
            if spans and spans[-1].whole + spans[-1].size == span.whole:
                span = Span(spans[-1].local, spans[-1].whole, spans[-1].size + span.size)
                spans.pop()
            if span.size:
                spans.append(span)
        return spans

    def sizes(self, ranks: int) -> list[int]:
        """Return the number of values of each of `ranks` ranks."""
        return [sum(span.size for span in self.spans(ranks, rank)) for rank in range(ranks)]

    def checksum(self, values: Tensor) -> Tensor:
        """Return this rank's summand of the checksum of a fragment, a sum of int64 that wraps. The
        sum over all ranks is written as `hexadecimal`.

        The sum of a row is weighted by the place of the row in the whole fragment. The weights are
        odd, so any change of a single word changes the sum.
        """
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        for span in self.mine:
            words = values[span.local :][: span.size].view(torch.int32)
            place = span.whole
            head = -place % ROW  # the rest of a row that another rank begins
            for block in (words[:head], *words[head:].split(SUMMED_VALUES)):
                sums = row_sums(block, place % ROW)
                weight = 2 * (place // ROW) + 1
                weights = torch.arange(weight, weight + 2 * len(sums), 2, device=values.device)
                total += weights.mul_(sums).sum()
                place += block.numel()
        return total


def hexadecimal(total: Tensor) -> str:
    """Return a checksum as decisions contain it."""
    return f"{int(total) % 2**64:016x}"
