"""Batches of token sequences, for training and for validation.

Sequence i of a corpus is its tokens i*L ... i*L + L: L inputs, and the L targets one behind them.
Neighbours share one token, so every token but the first is a target exactly once.
"""

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_diloco.data.order import Indices, sequence_indices
from torchtitan_diloco.data.shards import TokenArray, TokenShards
from torchtitan_diloco.data.worker_shards import WorkerShards
from torchtitan_diloco.utils import IGNORE_INDEX, available_cores

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [sequences, sequence_length]."""

_MICRO_BATCHES_AT_ONCE = 64  # computing the order of so many at once makes it cheap


class SequenceReader(Dataset[Batch]):
    """Sequences of a fixed length, by number."""

    def __init__(self, tokens: TokenArray, sequence_length: int) -> None:
        self._tokens, self._length = tokens, sequence_length
        self.sequences = (len(tokens) - 1) // sequence_length
        if self.sequences < 1:
            more = ", a larger data.validation_fraction" if tokens.split == "validation" else ""
            raise ValueError(
                f"{tokens.name} is shorter than one sequence: it has {len(tokens)} tokens, "
                f"training.sequence_length = {sequence_length} needs {sequence_length + 1}. Use a "
                f"larger corpus{more} or a smaller training.sequence_length."
            )

    def __getitem__(self, indices: Indices) -> Batch:
        batch = np.empty((2, len(indices), self._length), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            tokens = self._tokens.read(index * self._length, (index + 1) * self._length + 1)
            batch[0, row] = tokens[:-1]
            batch[1, row] = tokens[1:]
        inputs, targets = torch.from_numpy(batch)
        return inputs, targets


@dataclass
class SampleStream:
    """Numbers of the sequences in each micro-batch of one rank, without end.

    A step takes ranks * accumulation * batch_size consecutive positions of the global order, and
    rank r the r-th equal part of them.
    """

    sequences: int
    seed: int
    shuffle: bool
    rank: int
    ranks: int
    accumulation: int
    batch_size: int
    start: int
    """Position of the first sample of the first step."""
    taken: int = 0
    """Micro-batches that this rank has taken."""

    def position(self) -> int:
        """Return the position of the first sample of the current step."""
        step_size = self.ranks * self.accumulation * self.batch_size
        return self.start + self.taken // self.accumulation * step_size

    def __iter__(self) -> Iterator[Indices]:
        for first in itertools.count(self.taken, _MICRO_BATCHES_AT_ONCE):
            numbers = first + np.arange(_MICRO_BATCHES_AT_ONCE)
            steps, within = np.divmod(numbers, self.accumulation)
            parts = (steps * self.ranks + self.rank) * self.accumulation + within
            positions = self.start + parts[:, None] * self.batch_size + np.arange(self.batch_size)
            yield from sequence_indices(
                positions.ravel(), sequences=self.sequences, seed=self.seed, shuffle=self.shuffle
            ).reshape(positions.shape)


class TrainLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """Endless stream of this rank's micro-batches, epoch after epoch.

    A step takes the next ranks * accumulation * batch_size samples of one global order, so its
    samples do not depend on how many ranks share it. Workers with shards of their own each have an
    order of their own, which their ranks share in the same way.

    The state is one integer, the position in the order of samples. torchdata's own state describes
    its reading processes and fits no other number of them, of ranks or of samples in a batch.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        sequence_length: int,
        batch_size: int,
        accumulation: int,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool,
        processes: int,
        start: int = 0,
        worker_shards: WorkerShards | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Begin at the global position `start`."""
        if processes > available_cores():
            raise ValueError(
                f"data.loader_processes = {processes} is more than the {available_cores()} cores "
                f"of this machine; 0 or 1 is enough for memory-mapped tokens"
            )
        sources: list[TokenArray] = [*(worker_shards.parts if worker_shards else ())] or [shards]
        # Readers for all workers, so that every rank sees if the shard of one is too short.
        readers = [SequenceReader(source, sequence_length) for source in sources]
        self._streams = len(readers)
        ranks //= self._streams
        worker, rank = divmod(rank, ranks)
        self._stream = SampleStream(
            sequences=readers[worker].sequences,
            seed=seed,
            shuffle=shuffle,
            rank=rank,
            ranks=ranks,
            accumulation=accumulation,
            batch_size=batch_size,
            start=start // self._streams,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # in torchdata
            super().__init__(
                readers[worker],
                batch_size=None,  # the reader makes whole batches
                sampler=self._stream,
                num_workers=processes,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # draws nothing from the random numbers of the run
                snapshot_every_n_steps=None,
            )

    @property
    def position(self) -> int:
        """Position of the first sample of the current step: samples that all ranks took before."""
        return self._stream.position() * self._streams

    def __iter__(self) -> Iterator[Batch]:
        """Continue where the last iterator stopped."""
        super().load_state_dict({})  # drops the last iterator, and what it has read ahead
        for batch in super().__iter__():
            self._stream.taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position. Take a new iterator afterwards."""
        self._stream.start, self._stream.taken = state_dict["position"] // self._streams, 0


class ValidationBatches:
    """First sequences of a split, the same each time they are iterated.

    Every rank has equally many batches of equal shape, as collectives need it. Where sequences are
    missing, the targets are IGNORE_INDEX.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        sequence_length: int,
        batch_size: int,
        rank: int,
        ranks: int,
        sequences: int,
    ) -> None:
        self._reader = SequenceReader(shards, sequence_length)
        self._batch_size, self._rank, self._ranks = batch_size, rank, ranks
        self.sequences = min(sequences, self._reader.sequences)
        """Sequences that all ranks together read."""

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return -(-self.sequences // (self._batch_size * self._ranks))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            first = (number * self._ranks + self._rank) * self._batch_size
            wanted = np.arange(first, first + self._batch_size)
            # Past the end any sequence fills the shape; its targets do not count.
            inputs, targets = self._reader[np.minimum(wanted, self.sequences - 1)]
            targets[torch.from_numpy(wanted >= self.sequences)] = IGNORE_INDEX
            yield inputs, targets
