"""Shared copies of the fragments on each rank of an island, computed from the entries of the log.

All ranks call the same methods in the same order, each on its own shard: the first rank through
`Copies.run`, the others in `Copies.follow`.
"""

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.messages import broadcast_object
from torchtitan_diloco.base.settings import flat_settings
from torchtitan_diloco.diloco import arithmetic
from torchtitan_diloco.diloco.arithmetic import outer_step
from torchtitan_diloco.diloco.codecs import CODECS, Codec, add_to_mean, build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.exchange import GPU_CHUNK, PIECE
from torchtitan_diloco.diloco.fragments import describe_layout
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.islands.changes import SPARSE
from torchtitan_diloco.islands.layout import Layout, Ranks, collect, hexadecimal, shapes_of

MAY_DIFFER = re.compile(r"diloco\.(link\.|workers|measure_every)")
"""Settings in which islands may differ."""

ARITHMETIC = "arithmetic."
"""Begins the names of fingerprints of what machines compute."""
Result = TypeVar("Result")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A method of `Copies` and its arguments, the same on all ranks."""

    method: str
    arguments: list[Any]
    sizes: list[list[int]]
    """Bytes of each tensor of the content: one, or one for each rank."""


class SharedCopy:
    """Versions of a fragment on this rank. Only the newest one can be advanced."""

    def __init__(self, state: OuterState, layout: Layout) -> None:
        self.state, self.layout = state, layout
        self._spare = deque[Tensor](maxlen=1)
        self.declare(0)

    def declare(self, version: int) -> None:
        """Declare the outer state to be this version."""
        self.versions = {version: self.state.outer}
        """The last applied version, and those not applied yet, at most four in all."""
        self.newest = version

    def buffers(self) -> list[Tensor]:
        """Return the newest version and the optimizer state."""
        return [self.versions[self.newest], *self.state.slots]

    def drop_before(self, version: int) -> None:
        for old in [one for one in list(self.versions) if one < version]:
            self.versions.pop(old, None)  # two threads drop versions

    def recycle(self, buffer: Tensor) -> None:
        """Keep an unused buffer for the next version.

        On a CPU, the first write to fresh memory costs more than the arithmetic on it.
        """
        if buffer.device.type == "cpu":
            self._spare.append(buffer)

    def free_buffer(self) -> Tensor:
        return self._spare.pop() if self._spare else torch.empty_like(self.state.outer)


class Copies:
    def __init__(self, states: Sequence[OuterState], config: DiLoCoConfig, ranks: Ranks) -> None:
        self.ranks, self._optimizer = ranks, config.outer_optimizer
        self._quantization = config.quantization
        self.fragments = [
            SharedCopy(state, Layout(shapes_of(state.fragment), ranks.size, ranks.rank))
            for state in states
        ]
        self.saves: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        """Tasks of `save` on this rank, in order."""
        self._content: Sequence[Tensor] = ()
        """Tensors from the first rank for the current call."""
        self._stopped = False
        self._decoder = cache(self.checked_codec)  # with scratch buffers, so only for one thread
        self._decoder(config.quantization.codec)

    def checked_codec(self, name: str) -> Codec:
        """Build a codec after a check of the GPU. A run may change its format."""
        device = self.fragments[0].state.outer.device
        arithmetic.check_device(device, [name, self._optimizer.name])
        return self.build_codec(name)

    def build_codec(self, name: str) -> Codec:
        return build_codec(replace(self._quantization, codec=name))  # type: ignore[arg-type]

    def run(
        self,
        method: Callable[..., Result],
        *arguments: Any,
        content: Sequence[Sequence[Tensor]] = (),
    ) -> Result:
        """Call a method on all ranks and return this rank's result. Only the first rank may call
        this.

        `content`: tensors for all ranks, or with one for each rank.
        """
        sizes = [[one.numel() for one in tensors] for tensors in content]
        call = Call(method.__name__, list(arguments), sizes)
        result: Result = self._call(broadcast_object(call, Call, self.ranks.copies), content)
        return result

    def follow(self) -> None:
        """Call the methods that the first rank calls, until `stop`."""
        while not self._stopped:
            call = broadcast_object(None, Call, self.ranks.copies)
            self._call(call, [[] for _ in call.sizes])

    def _call(self, call: Call, content: Sequence[Sequence[Tensor]]) -> Any:
        pairs = zip(content, call.sizes, strict=True)
        self._content = [self._share(tensors, sizes) for tensors, sizes in pairs]
        try:
            return getattr(self, call.method)(*call.arguments)
        finally:
            self._content = ()

    def _share(self, tensors: Sequence[Tensor], sizes: list[int]) -> Tensor:
        """Return this rank's tensor. `tensors`: those of all ranks, on the first one."""
        rank, group = self.ranks.rank, self.ranks.copies
        mine = tensors[0] if tensors else torch.empty(sizes[rank % len(sizes)], dtype=torch.uint8)
        if group is None or not any(sizes):
            return mine
        if len(sizes) == 1:
            dist.broadcast(mine, group_src=0, group=group)
        elif rank and mine.numel():
            dist.recv(mine, group_src=0, group=group)
        for number, shard in enumerate(tensors):
            if number and shard.numel():
                dist.send(shard, group_dst=number, group=group)
        return mine

    def shards(self, fragment: int, payload: Tensor, ranks: int, codec: str) -> Sequence[Tensor]:
        """Return the shards of a part if each rank needs only its own, otherwise the whole part."""
        if ranks != self.ranks.size:
            return [payload]
        shards: Sequence[Tensor] = payload.split(self.payload_sizes(fragment, ranks, codec))
        return shards

    def stop(self) -> None:
        self._stopped = True

    def save_soon(self, task: Callable[[], Result]) -> "Future[Result]":
        """Run a task in the thread that computes the copies, while no copy changes."""
        future: Future[Result] = Future()
        self.saves.put((future, task))
        return future

    def save(self) -> None:
        """Run the next task in `saves`. An error ends the thread, which the other threads
        notice."""
        future, task = self.saves.get()
        future.set_result(task())

    def declare(self, fragment: int, version: int, fresh: bool = False) -> str:
        """Declare the outer state to be this version, and return its checksum.

        The content, if any, is a whole copy and its optimizer state, which are loaded first.
        `fresh`: zero the optimizer state, because a loaded one may belong to another run.
        """
        copy = self.fragments[fragment]
        with copy.state.background(copy.state.moment()):
            for content in self._content:
                whole = content.view(torch.float32).view(-1, copy.layout.values)
                for buffer, values in zip(copy.buffers(), whole, strict=True):
                    copy.layout.scatter(values, buffer)
            for slot in copy.state.slots if fresh else []:
                slot.zero_()
            copy.declare(version)
            return self._checksum(copy)

    def _checksum(self, copy: SharedCopy) -> str:
        total = copy.layout.checksum(copy.versions[copy.newest]).cpu()
        if self.ranks.copies is not None:
            dist.all_reduce(total, group=self.ranks.copies)
        return hexadecimal(total)

    def write_model(self, versions: list[int]) -> None:
        """Write these versions of the fragments to the model, and drop those before them."""
        for copy, version in zip(self.fragments, versions, strict=True):
            copy.drop_before(version)
            copy.state.outer = copy.versions[version]
            copy.state.write_model()

    def drop(self, fragment: int, version: int) -> None:
        """Drop a version that no rank will apply, unless training has passed it already."""
        copy = self.fragments[fragment]
        if (dropped := copy.versions.pop(version, None)) is not None:
            copy.recycle(dropped)

    def payload_sizes(self, fragment: int, ranks: int, codec: str) -> list[int]:
        """Return the encoded bytes of each rank's shard of a fragment, for this number of ranks."""
        sizes, encoded = self.fragments[fragment].layout.sizes(ranks), self.build_codec(codec)
        return [encoded.wire_bytes(size) for size in sizes]

    def cycle_bytes(self, codec: str) -> int:
        """Return the bytes that this island sends in a cycle."""
        numbers = range(len(self.fragments))
        return sum(sum(self.payload_sizes(one, self.ranks.size, codec)) for one in numbers)

    def snapshot_bytes(self, fragment: int) -> int:
        copy = self.fragments[fragment]
        return 4 * copy.layout.values * len(copy.buffers())

    def norm(self, fragment: int, payload: Tensor, ranks: int, codec: str) -> float:
        """Return the norm of a part, NaN or infinite if a value is. Any thread may call this."""
        decoder, sizes = self.build_codec(codec), self.payload_sizes(fragment, ranks, codec)
        lengths = self.fragments[fragment].layout.sizes(ranks)
        shards = zip(payload.split(sizes), lengths, strict=True)
        pieces = (piece for shard in shards for piece in _decoded_pieces(decoder, *shard))
        return math.hypot(*(float(torch.linalg.vector_norm(piece)) for piece in pieces))

    @torch.no_grad()
    def advance(
        self,
        fragment: int,
        version: int,
        lr: float,
        weights: list[int],
        ranks: list[int],
        codecs: list[str],
        only_newest: bool = False,
    ) -> str:
        """Compute a version from the content, the payloads of parts. Return its checksum.

        Args:
            ranks: number of ranks of the island that sent each part.
            codecs: wire format of each part.
            only_newest: drop all older versions, because none will be applied.
        """
        copy = self.fragments[fragment]
        with copy.state.background(copy.state.moment()):
            theta, optimizer = copy.versions[copy.newest], replace(self._optimizer, lr=lr)
            new = copy.free_buffer()
            if not weights:
                new.copy_(theta)
            named = enumerate(zip(self._content, ranks, codecs, strict=True))
            parts = [self.decode(fragment, *part, out=None if n else new) for n, part in named]
            is_sparse = any(self._decoder(codec).is_sparse for codec in codecs)
            buffers = [one.split(piece_of(new)) for one in (theta, new, *copy.state.slots)]
            for before, mean, *slots in zip(*buffers, strict=True) if weights else ():
                _average(parts, weights, is_sparse, out=mean)
                outer_step(optimizer, before, mean, slots, version)
            copy.versions[version] = new
            copy.newest = version
            if only_newest:
                copy.drop_before(version)
            return self._checksum(copy)

    def decode(
        self, fragment: int, payload: Tensor, ranks: int, codec: str, *, out: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield this rank's values of a part from an island with `ranks` ranks, in pieces.

        `out`: where to write all of them. Otherwise they may share memory: use each piece before
        the next. `payload`: see `shards`.
        """
        copy, lengths = self.fragments[fragment], self.fragments[fragment].layout.sizes(ranks)
        layout, device, decoder = copy.layout, copy.state.outer.device, self._decoder(codec)
        if ranks == layout.ranks:
            yield from _decoded_pieces(decoder, payload.to(device), lengths[layout.rank], out)
            return
        shards = payload.split(self.payload_sizes(fragment, ranks, codec))
        values = torch.empty_like(copy.state.outer) if out is None else out
        for rank, shard in enumerate(shards):
            if slices := layout.overlap(ranks, rank):
                pieces = _decoded_pieces(decoder, shard.to(device), lengths[rank])
                decoded = torch.cat([piece.clone() for piece in pieces])
                for source, target in slices:
                    values[target].copy_(decoded[source])
        yield from values.split(piece_of(values))

    def collect(self, fragment: int) -> Tensor:
        """Return a whole copy and its optimizer state on the first rank."""
        copy, wholes = self.fragments[fragment], []
        layout, sizes = copy.layout, copy.layout.sizes(self.ranks.size)
        for buffer in copy.buffers():
            collected = collect(buffer.cpu(), sizes, self.ranks.copies)
            whole = torch.zeros(layout.values)
            if self.ranks.is_first:
                for rank, values in enumerate(collected.split(sizes)):
                    for local, start, size in layout.spans(self.ranks.size, rank):
                        whole[start:][:size] = values[local:][:size]
            wholes.append(whole)
        return torch.cat(wholes)


def piece_of(values: Tensor) -> int:
    """Return how many values are processed at once."""
    return PIECE if values.device.type == "cpu" else GPU_CHUNK


def _decoded_pieces(
    decoder: Codec, payload: Tensor, size: int, out: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield the decoded values of a rank's payload, a piece at a time, in `out` or in the same
    memory."""
    piece = piece_of(payload)
    room = torch.empty(min(size, piece), device=payload.device) if out is None else out
    for number, encoded in enumerate(payload.split(decoder.wire_bytes(piece))):
        start = number * piece
        values = room[: size - start] if out is None else out[start:][:piece]
        decoder.decode(encoded, values)
        yield values


def _average(
    parts: Sequence[Iterator[Tensor]], weights: list[int], is_sparse: bool, *, out: Tensor
) -> None:
    """Write the weighted mean of the next piece of all parts to `out`, where the first one is
    decoded, with the bits of `Codec.average`: a mean of sparse parts leaves out those that do not
    send a value."""
    total, totals = 0, torch.zeros_like(out) if is_sparse else None
    for part, weight in zip(parts, weights, strict=True):
        is_first, total, values = total == 0, total + weight, next(part)
        share: float | Tensor = weight / total
        if totals is not None:
            sent = (values != 0).float().mul_(weight)
            share = (sent / totals.add_(sent)).nan_to_num_(0.0)
        if not is_first:
            add_to_mean(out, values, share)


@torch.no_grad()
def encode_delta(codec: Codec, delta: Tensor) -> Tensor:
    """Return the payload of this rank's delta. No other thread may use the codec during the call.

    The payload of fp32 is the memory of the delta, which is only written again when the part is no
    longer needed.
    """
    if codec.is_fp32:
        return delta.view(torch.uint8).cpu()
    payload = torch.empty(codec.wire_bytes(delta.numel()), dtype=torch.uint8, device=delta.device)
    pieces = payload.split(codec.wire_bytes(piece_of(delta)))
    for values, encoded in zip(delta.split(piece_of(delta)), pieces, strict=True):
        codec.encode(values, encoded)
    return payload.cpu()


# --- what must be equal on all islands of a run ---------------------------------------------------


def fingerprints(
    config: DiLoCoConfig, states: Sequence[OuterState], facts: Mapping[str, str]
) -> dict[str, str]:
    settings = flat_settings(config, "diloco.")
    found = {key: str(value) for key, value in settings.items() if not MAY_DIFFER.match(key)}
    model = "\n".join(describe_layout([state.fragment for state in states]))
    found |= {"model": model, **named(arithmetic_of(config)), **facts}
    return {key.replace(" ", "-"): _short(value) for key, value in found.items()}


def arithmetic_of(config: DiLoCoConfig) -> arithmetic.Results:
    """Return digests of what this machine computes in a run, whose format may change."""
    codec = config.quantization.codec
    codecs = [codec] if codec == SPARSE else [name for name in CODECS if name != SPARSE]
    return arithmetic.compute_all([*codecs, config.outer_optimizer.name])


def named(results: arithmetic.Results) -> dict[str, str]:
    """Return digests by the names that they have among the fingerprints."""
    return {ARITHMETIC + key.replace(" ", "-"): digest for key, digest in results.items()}


def _short(value: str) -> str:
    """Return the value, or its hash if it is not a valid `Name` of a record."""
    fits = re.fullmatch(r"[\x21-\x7e]{1,100}", value)
    return value if fits else hashlib.sha256(value.encode()).hexdigest()[:16]
