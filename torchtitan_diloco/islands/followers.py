"""Ranks of an island, of which only the first one talks to the store.

Each rank has its shard of the shared copies. The first one hands the others the bytes that they
need of a download, and collects their deltas. Each process group is used in one thread at a time,
so that its collectives have the same order on all ranks:

| group | first rank | other ranks | for |
|---|---|---|---|
| decisions | training thread | training thread | what is due (instructions.py) |
| uploads | background thread | background thread | norms and encoded deltas |
| copies | threads of `Link`, under a lock | thread of `follow` | downloads, P of a founder |

A buffer `delta` is used for a delta of this island, from `take_delta` to the end of
`collect_part`, and for the next P, from `prepare` until it is applied. The first rank keeps the two
apart: it calls `prepare` only when no rank uses the buffer for a delta. Another rank may apply a
copy later than the first one, so `follow` waits for that before it writes to the buffer again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.messages import TransferError, transfers
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.islands.instructions import rank_lost, share
from torchtitan_diloco.islands.layout import Layout, Ranks, collect, hexadecimal
from torchtitan_diloco.islands.payload import (
    HEADER_BYTES,
    PartHeader,
    codec_for,
    cut,
    cut_sizes,
    decode_cut,
    encode_into,
    read_header,
    write_header,
)
from torchtitan_diloco.islands.rules.names import Object
from torchtitan_diloco.store.store import Buffer

UNANSWERED_SECONDS = 1.0
"""Seconds for which the end waits for a call in progress, which a lost rank may never answer."""


class BufferTakenError(Exception):
    """Training needs the buffer for its own delta."""


class Request(msgspec.Struct, array_like=True, frozen=True):
    """What the first rank asks the others to do with it."""

    task: Literal["prepare", "gather", "stop"]
    fragment: int = 0
    taken: int = 0
    """Number of copies of the fragment that training has applied before."""
    header: bytes = b""


class Claim(Enum):
    """Use of the buffer `delta` of a fragment."""

    FREE = "free"
    SENDING = "sending"
    PREPARING = "preparing"
    PREPARED = "prepared"


class Prepared(NamedTuple):
    """The next P of a fragment, in its buffer."""

    source: Object
    at: float
    """Time of `time.perf_counter` since when it is there."""
    size: int
    """Bytes that were downloaded."""
    checksum: str


class SharedCopies:
    """The shared copies P on all ranks of an island, each with its shard.

    The first rank calls `prepare`, `gather` and `stop`, from any thread. The others answer in
    `follow`.
    """

    def __init__(
        self, states: Sequence[OuterState], layouts: Sequence[Layout], ranks: Ranks
    ) -> None:
        self._states = states
        self._layouts = layouts
        self._ranks = ranks
        self._group = ranks.copies
        self._calls = threading.Lock()
        self._changed = threading.Condition()
        self._taken = [0] * len(states)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._states)

    def values(self, fragment: int) -> int:
        """Return the number of values of a whole fragment."""
        return self._layouts[fragment].values

    # --- training thread --------------------------------------------------------------------------

    def on_taken(self, fragment: int) -> None:
        """Take note that training has applied the prepared copy."""
        with self._changed:
            self._taken[fragment] += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let `follow` end if the first rank is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # --- first rank -------------------------------------------------------------------------------

    def prepare(self, fragment: int, content: Buffer, is_claimed: Callable[[], bool]) -> str | None:
        """Write the next P to `delta` on all ranks, and return its checksum.

        `content`: a version or a copy. Return None if training needs the buffer (`is_claimed`).
        """
        layout = self._layouts[fragment]
        header = read_header(content)
        mine, *others = (cut(content, layout, rank) for rank in range(self._ranks.size))
        with self._calls:
            call = Request("prepare", fragment, self._taken[fragment], header.pack())
            share(call, Request, self._group)
            for rank, shards in enumerate(others, start=1):
                for shard in shards:
                    _send(shard, rank, self._group)
            return self._prepare(call, mine, is_claimed)

    def gather(self, fragment: int) -> Tensor:
        """Return P of a whole fragment, in host memory."""
        with self._calls:
            share(Request("gather", fragment), Request, self._group)
            return self._gather(fragment)

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        if self._calls.acquire(timeout=UNANSWERED_SECONDS):
            with suppress(WorkerLostError):
                share(Request("stop"), Request, self._group)
            self._calls.release()

    # --- other ranks ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what the first rank asks for, until it stops."""
        while True:
            call = share(None, Request, self._group)
            match call.task:
                case "prepare":
                    self._follow(call)
                case "gather":
                    self._gather(call.fragment)
                case _:
                    return
            if self._is_closed:
                return

    def _follow(self, call: Request) -> None:
        layout = self._layouts[call.fragment]
        sizes = cut_sizes(read_header(call.header), layout, self._ranks.rank)
        shards = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for shard in shards:
            _receive(shard, 0, self._group)
        with self._changed:
            self._changed.wait_for(
                lambda: self._taken[call.fragment] == call.taken or self._is_closed
            )
            if self._is_closed:
                return
        self._prepare(call, shards, lambda: False)

    # --- all ranks --------------------------------------------------------------------------------

    def _prepare(
        self, call: Request, shards: Sequence[Tensor], is_claimed: Callable[[], bool]
    ) -> str | None:
        state = self._states[call.fragment]
        layout = self._layouts[call.fragment]
        header = read_header(call.header)
        device = state.delta.device

        def pieces() -> Iterator[Tensor]:
            for values in decode_cut(shards, header, layout):
                if is_claimed():
                    raise BufferTakenError
                yield values.to(device)

        checksum = torch.zeros((), dtype=torch.int64)
        is_whole = True
        try:
            with state.background(state.record_event()):
                state.prepare(pieces(), replaces=header.codec == "fp32")
                checksum = layout.checksum(state.delta).cpu()
        except BufferTakenError:
            is_whole = False
        sums = torch.stack([checksum, torch.tensor(int(is_whole))])
        _add_up(sums, self._group)
        return hexadecimal(sums[0]) if int(sums[1]) == self._ranks.size else None

    def _gather(self, fragment: int) -> Tensor:
        layout = self._layouts[fragment]
        sizes = layout.sizes(self._ranks.size)
        with _of_this_island():
            collected = collect(self._states[fragment].outer.cpu(), sizes, self._group)
        if not self._ranks.is_first:
            return collected
        whole = torch.empty(layout.values)
        for rank, values in enumerate(collected.split(sizes)):
            for span in layout.spans(self._ranks.size, rank):
                whole[span.whole :][: span.size] = values[span.local :][: span.size]
        return whole

    def checksums(self) -> list[str]:
        """Return the checksums of P of all fragments. Training threads call this, on all ranks."""
        pairs = zip(self._states, self._layouts, strict=True)
        sums = torch.stack([layout.checksum(state.outer).cpu() for state, layout in pairs])
        _add_up(sums, self._ranks.decisions)
        return [hexadecimal(total) for total in sums]


def collect_part(delta: Tensor, header: PartHeader, layout: Layout, ranks: Ranks) -> Tensor | None:
    """Encode the delta of each rank. Return the part on the first rank, in host memory that nothing
    else uses, and None on the others.

    Background threads call this, on all ranks. When it returns on the first one, all deltas are
    encoded.
    """
    codec = codec_for(header.codec, header.block_size)
    sizes = [codec.wire_bytes(size) for size in layout.sizes(ranks.size)]
    if not ranks.is_first:
        shard = torch.empty(sizes[ranks.rank], dtype=torch.uint8)
        encode_into(shard, codec, delta)
        _send(shard, 0, ranks.uploads)
        return None
    part = torch.empty(HEADER_BYTES + sum(sizes), dtype=torch.uint8)
    write_header(part, header)
    mine, *others = part[HEADER_BYTES:].split(sizes)
    encode_into(mine, codec, delta)
    for rank, shard in enumerate(others, start=1):
        _receive(shard, rank, ranks.uploads)
    return part


def _send(values: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    if values.numel():
        with _of_this_island():
            dist.send(values, group_dst=rank, group=group)


def _receive(values: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
    if values.numel():
        with _of_this_island():
            dist.recv(values, group_src=rank, group=group)


def _add_up(values: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with _of_this_island():
            dist.all_reduce(values, group=group)


@contextmanager
def _of_this_island() -> Iterator[None]:
    """Raise a WorkerLostError if a rank of this island is lost."""
    try:
        with transfers():
            yield
    except TransferError as error:
        raise rank_lost(error) from error
