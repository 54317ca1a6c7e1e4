"""Where a rank's values of a fragment lie, for any number of ranks that share the fragment."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchtitan_diloco.diloco.fragments import Fragment

BLOCK = 65_536
"""Values whose checksum is computed at once, so that they stay in cache."""


@dataclass(frozen=True)
class Span:
    """Values that lie together in a rank's flat buffer and in the whole fragment."""

    local: int
    whole: int
    size: int


class Layout:
    """Flat order of all values of a fragment: its parameters in order, their rows in order."""

    def __init__(self, fragment: Fragment) -> None:
        self._parts = [
            (part.rows, part.parameter.numel() // max(1, part.rows), part.run, part.runs)
            for part in fragment.parts
        ]
        self.values = sum(rows * width for rows, width, _, _ in self._parts)
        self.depends_on_ranks = any(runs > 1 for *_, runs in self._parts)
        """A run of rows is cut from those on each rank, so with other ranks it has other rows."""
        self._spans: dict[tuple[int, int], tuple[Span, ...]] = {}

    def spans(self, ranks: int, rank: int) -> tuple[Span, ...]:
        """Return the spans of a rank. FSDP2 gives each the same number of rows, rounded up."""
        if (ranks, rank) not in self._spans:
            found, local, base = [], 0, 0
            for rows, width, run, runs in self._parts:
                most = -(-rows // ranks)
                first, last = min(rank * most, rows), min((rank + 1) * most, rows)
                each, larger = divmod(last - first, runs)  # as tensor_split cuts
                start = first + run * each + min(run, larger)
                size = (each + (run < larger)) * width
                found.append(Span(local, base + start * width, size))
                local, base = local + size, base + rows * width
            self._spans[ranks, rank] = tuple(span for span in found if span.size)
        return self._spans[ranks, rank]

    def size(self, ranks: int, rank: int) -> int:
        return sum(span.size for span in self.spans(ranks, rank))

    def sizes(self, ranks: int) -> list[int]:
        return [self.size(ranks, rank) for rank in range(ranks)]


@dataclass(frozen=True)
class Place:
    """Place of a rank in a layout."""

    layout: Layout
    ranks: int
    rank: int

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return self.layout.spans(self.ranks, self.rank)

    def overlap(self, ranks: int, rank: int) -> list[tuple[slice, slice]]:
        """Return slices of another rank's flat buffer, and of this one's for the same values."""
        found = []
        for theirs in self.layout.spans(ranks, rank):
            for mine in self.spans:
                start = max(theirs.whole, mine.whole)
                end = min(theirs.whole + theirs.size, mine.whole + mine.size)
                if start < end:
                    source, target = start - theirs.whole + theirs.local, start - mine.whole
                    size = end - start
                    target += mine.local
                    found.append((slice(source, source + size), slice(target, target + size)))
        return found

    def scatter(self, whole: Tensor, values: Tensor) -> None:
        """Copy this rank's values out of the whole fragment."""
        for span in self.spans:
            values[span.local :][: span.size].copy_(whole[span.whole :][: span.size])

    def checksum(self, values: Tensor) -> int:
        """Return this rank's share of the checksum of a fragment: the shares add up, mod 2**64.

        Each word is weighted by its place in the whole fragment. No single change of bits keeps
        the sum, as the weights are odd.
        """
        total = 0
        for span in self.spans:
            words = values[span.local :][: span.size].view(torch.int32)
            for number, block in enumerate(words.split(BLOCK)):
                start = 2 * (span.whole + number * BLOCK) + 1
                end = start + 2 * block.numel()
                weights = torch.arange(start, end, 2, dtype=torch.int64, device=block.device)
                total += int(weights.mul_(block).sum())
        return total % 2**64
