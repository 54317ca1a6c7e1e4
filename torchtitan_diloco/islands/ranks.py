"""The ranks of one island: the first one decides and talks to the server, the others follow."""

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.object_collectives import broadcast_object

Value = TypeVar("Value")
PATIENCE = timedelta(days=365)
"""Ranks wait for the first one, which may wait for other islands. A death is seen elsewhere."""


class Ranks:
    """Process groups of an island, one for each thread that uses them. One rank needs none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Create the groups. `group` joins the ranks of the island, which call this together."""
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0
        if group is None or self.size == 1:
            self.decisions = self.copies = self.uploads = None
            return
        members = dist.get_process_group_ranks(group)
        self.decisions, self.copies, self.uploads = (
            dist.new_group(
                members, timeout=PATIENCE, backend="gloo", use_local_synchronization=True
            )
            for _ in range(3)
        )


def share(value: Value | None, kind: Any, group: dist.ProcessGroup | None) -> Value:
    """Return the value of the first rank, which only that one gives. `kind`: its type."""
    if group is None:
        assert value is not None
        return value
    shared: Value = broadcast_object(value, kind, group)
    return shared


def share_bytes(content: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Broadcast bytes in place from the first rank; all know their number."""
    if group is not None and content.numel():
        dist.broadcast(content, group_src=0, group=group)
    return content


def sum_modulo(value: int, group: dist.ProcessGroup | None) -> int:
    """Return the sum over the ranks, modulo 2**64."""
    total = torch.tensor(to_signed(value), dtype=torch.int64)
    if group is not None:
        dist.all_reduce(total, group=group)
    return int(total) % 2**64


def to_signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def collect(mine: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks, one behind the other, on the first rank; empty elsewhere.

    `sizes`: elements of each rank's.
    """
    if group is None:
        return mine
    if group.rank():
        if mine.numel():
            dist.send(mine, group_dst=0, group=group)
        return mine[:0]
    pieces = [mine.new_empty(size) for size in sizes]
    for rank, piece in enumerate(pieces):
        if rank and piece.numel():
            dist.recv(piece, group_src=rank, group=group)
    pieces[0] = mine
    return torch.cat(pieces)
