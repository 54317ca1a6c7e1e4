"""Shared copies of the fragments on each rank of an island, made by replaying entries of the log.

All ranks do the same jobs in the same order, each on its own shard. The first rank starts a job by
calling a method; the others are in `follow`.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs import Codec, Position, build_codec, random_key
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.exchange import PIECE
from torchtitan_diloco.diloco.outer_optimizer import BLOCK, UPDATES, OuterStep, outer_lr
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.islands.layout import Layout, Place
from torchtitan_diloco.islands.ranks import Ranks, collect, share, share_bytes, sum_modulo


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    fragment: int = 0
    version: int = 0


class Advance(Job, frozen=True):
    """Make a version from the payloads of parts, and return its checksum."""

    lr: float
    weights: list[int]
    ranks: list[int]
    """Ranks of the island that has sent each part."""
    only_newest: bool = False
    """Drop the versions before: nobody will apply this one."""


class Declare(Job, frozen=True):
    """Let what the outer state holds be this version, and return its checksum."""

    rounds: int = 0
    fresh: bool = False
    """The optimizer state is zero: what was loaded of it is of another run."""


class Load(Declare, frozen=True):
    """Take a whole copy and its optimizer state first."""


class Give(Job, frozen=True):
    """Return a whole copy and its optimizer state, as one flat tensor."""


class Save(Job, frozen=True):
    """Copy all fragments to host memory, for a checkpoint."""


class Stop(Job, frozen=True):
    """End `follow`."""


AnyJob: TypeAlias = Advance | Declare | Load | Give | Save | Stop


@dataclass
class SavedCopy:
    version: int
    rounds: int
    theta: Tensor
    slots: list[Tensor]


class SharedCopy:
    """Versions of a fragment on this rank. Only the newest can be advanced."""

    def __init__(self, state: OuterState, place: Place) -> None:
        self.state, self.place = state, place
        self.versions = {0: state.outer}
        """Those that are not applied yet, and the last one that is."""
        self.newest = self.rounds = 0
        """`rounds`: outer steps taken. An entry without weight takes none."""

    def declare(self, version: int, rounds: int) -> None:
        """Let what the outer state holds be this version."""
        self.versions, self.newest, self.rounds = {version: self.state.outer}, version, rounds

    def buffers(self) -> list[Tensor]:
        """Return the newest version and the optimizer state."""
        return [self.versions[self.newest], *self.state.slots]

    def drop_before(self, version: int) -> None:
        for old in [one for one in list(self.versions) if one < version]:
            del self.versions[old]


class Copies:
    def __init__(self, states: Sequence[OuterState], config: DiLoCoConfig, ranks: Ranks) -> None:
        self._ranks, self._optimizer = ranks, config.outer_optimizer
        self._quantization = config.quantization
        self.threads = config.quantization.threads
        layouts = [Layout(state.fragment) for state in states]
        self.fragments = [
            SharedCopy(state, Place(layout, ranks.size, ranks.rank))
            for state, layout in zip(states, layouts, strict=True)
        ]
        for one in self.fragments:
            assert one.place.layout.size(ranks.size, ranks.rank) == one.state.values
        self.saves: SimpleQueue[Future[list[SavedCopy]]] = SimpleQueue()
        """Results of the jobs Save to come."""
        self._decoder = build_codec(config.quantization)

    # --- jobs -------------------------------------------------------------------------------------

    def run(self, job: AnyJob, content: Tensor | None = None) -> str:
        """Do a job on all ranks and return the checksum. Only the first rank calls this."""
        share(job, AnyJob, self._ranks.copies)
        return self._do(job, content)

    def give(self, fragment: int) -> Tensor:
        """Return the newest copy of a fragment and its optimizer state."""
        share(Give(fragment=fragment), AnyJob, self._ranks.copies)
        return self._give(self.fragments[fragment])

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        share(Stop(), AnyJob, self._ranks.copies)

    def follow(self) -> None:
        """Do the jobs that the first rank starts, until Stop."""
        while True:
            job: AnyJob = share(None, AnyJob, self._ranks.copies)
            if isinstance(job, Stop):
                return
            if isinstance(job, Give):
                self._give(self.fragments[job.fragment])
            else:
                self._do(job, None)

    def _do(self, job: AnyJob, content: Tensor | None) -> str:
        if isinstance(job, Save):
            self.saves.get().set_result([self._saved(one) for one in self.fragments])
            return ""
        copy = self.fragments[job.fragment]
        if content is None:
            content = torch.empty(self._content_bytes(job), dtype=torch.uint8)
        share_bytes(content, self._ranks.copies)
        with copy.state.background(copy.state.moment()):
            if isinstance(job, Advance):
                self._advance(copy, job, content)
            elif isinstance(job, Load):
                whole = content.view(torch.float32).view(-1, copy.place.layout.values)
                for buffer, values in zip(copy.buffers(), whole, strict=True):
                    copy.place.scatter(values, buffer)
            if isinstance(job, Declare):
                for slot in copy.state.slots if job.fresh else []:
                    slot.zero_()
                copy.declare(job.version, job.rounds)
            return self._checksum(copy)

    def _content_bytes(self, job: AnyJob) -> int:
        if isinstance(job, Advance):
            return sum(sum(self.payload_sizes(job.fragment, ranks)) for ranks in job.ranks)
        return self.snapshot_bytes(job.fragment) if isinstance(job, Load) else 0

    def _checksum(self, copy: SharedCopy) -> str:
        mine = copy.place.checksum(copy.versions[copy.newest])
        return f"{sum_modulo(mine, self._ranks.copies):016x}"

    @staticmethod
    def _saved(copy: SharedCopy) -> SavedCopy:
        theta, *slots = (buffer.to("cpu", copy=True) for buffer in copy.buffers())
        return SavedCopy(copy.newest, copy.rounds, theta, slots)

    def payload_sizes(self, fragment: int, ranks: int) -> list[int]:
        """Return the bytes that each rank of an island encodes its shard of a fragment into."""
        sizes = self.fragments[fragment].place.layout.sizes(ranks)
        return [self._decoder.wire_bytes(size) for size in sizes]

    def snapshot_bytes(self, fragment: int) -> int:
        copy = self.fragments[fragment]
        return 4 * copy.place.layout.values * len(copy.buffers())

    def is_finite(self, fragment: int, payload: Tensor, ranks: int) -> bool:
        """Return whether all values of a part are. Any thread may ask."""
        decoder, layout = build_codec(self._quantization), self.fragments[fragment].place.layout
        for rank, shard in enumerate(payload.split(self.payload_sizes(fragment, ranks))):
            values = torch.empty(layout.size(ranks, rank))
            _decode(decoder, shard, values)
            if not values.isfinite().all():
                return False
        return True

    def next_lr(self, fragment: int) -> float:
        return outer_lr(self._optimizer, self.fragments[fragment].rounds + 1)

    @torch.no_grad()
    def _advance(self, copy: SharedCopy, job: Advance, content: Tensor) -> None:
        new = torch.empty_like(copy.versions[copy.newest])
        parts = content.split([sum(self.payload_sizes(job.fragment, one)) for one in job.ranks])
        heard = [
            (payload, ranks, weight)
            for payload, ranks, weight in zip(parts, job.ranks, job.weights, strict=True)
            if weight
        ]
        total = 0
        for payload, ranks, weight in heard:
            total += weight
            if total == weight:
                self.decode(job.fragment, payload, ranks, new)
            else:
                decoded = torch.empty_like(new)
                self.decode(job.fragment, payload, ranks, decoded)
                new.lerp_(decoded, weight / total)
        theta = copy.versions[copy.newest]
        if heard:
            copy.rounds += 1
            update = UPDATES[self._optimizer.name]
            step = OuterStep(self._optimizer, copy.rounds, job.lr)
            block = BLOCK if new.device.type == "cpu" else max(1, new.numel())
            buffers = theta, new, *copy.state.slots
            for before, mean, *slots in zip(*(one.split(block) for one in buffers), strict=True):
                update(before, mean, slots, step)
        else:
            new.copy_(theta)
        copy.versions[job.version] = new
        copy.newest = job.version
        if job.only_newest:
            copy.drop_before(job.version)

    @torch.no_grad()
    def decode(self, fragment: int, payload: Tensor, ranks: int, values: Tensor) -> None:
        """Decode this rank's values out of a part that was sent by an island of `ranks` ranks."""
        place, sizes = self.fragments[fragment].place, self.payload_sizes(fragment, ranks)
        for rank, shard in enumerate(payload.split(sizes)):
            if ranks == place.ranks:
                if rank == place.rank and values.numel():
                    _decode(self._decoder, shard, values)
                continue
            if slices := place.overlap(ranks, rank):
                decoded = torch.empty(place.layout.size(ranks, rank), device=values.device)
                _decode(self._decoder, shard, decoded)
                for source, target in slices:
                    values[target].copy_(decoded[source])

    def _give(self, copy: SharedCopy) -> Tensor:
        place, group = copy.place, self._ranks.copies
        sizes = place.layout.sizes(place.ranks)
        wholes = []
        for buffer in copy.buffers():
            collected = collect(buffer.cpu(), sizes, group)
            whole = torch.zeros(place.layout.values)
            if self._ranks.is_first:
                for rank, values in enumerate(collected.split(sizes)):
                    for span in place.layout.spans(place.ranks, rank):
                        whole[span.whole :][: span.size] = values[span.local :][: span.size]
            wholes.append(whole)
        return torch.cat(wholes)


def _decode(decoder: Codec, payload: Tensor, values: Tensor) -> None:
    size = decoder.wire_bytes(PIECE)
    for encoded, piece in zip(payload.split(size), values.split(PIECE), strict=True):
        decoder.decode(encoded.to(values.device), piece)


class Encoder:
    """Encodes this rank's deltas, in a thread of its own."""

    def __init__(self, config: DiLoCoConfig, seed: int, shard: int) -> None:
        self._codec, self._where = build_codec(config.quantization), (seed, shard)

    @torch.no_grad()
    def encode(self, delta: Tensor, fragment: int, number: int, slot: int) -> Tensor:
        key = random_key(*self._where, fragment, number, slot)
        payload = torch.empty(
            self._codec.wire_bytes(delta.numel()), dtype=torch.uint8, device=delta.device
        )
        size = self._codec.wire_bytes(PIECE)
        pieces = zip(delta.split(PIECE), payload.split(size), strict=True)
        for index, (values, encoded) in enumerate(pieces):
            self._codec.encode(values, encoded, Position(key, index * PIECE))
        return payload.cpu()


@torch.no_grad()
def add_change(state: OuterState, new: Tensor, old: Tensor) -> None:
    """Add the change of the shared copy to the parameters."""
    changes = state.views(torch.sub(new, old))
    for part, added in zip(state.fragment.parts, changes, strict=True):
        local = part.local()
        if local.dtype == torch.float32:
            local.add_(added)
        else:  # add in fp32 and round once
            local.copy_(added.add_(local))
