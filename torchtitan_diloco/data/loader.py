"""Batches of token sequences, for training and for validation.

Sequence i of a corpus is its tokens i*L ... i*L + L: L inputs, and the L targets that follow them by one. Neighbours
share one token, so that every token but the first is a target exactly once.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_diloco.data.order import Indices
from torchtitan_diloco.data.shards import TokenShards
from torchtitan_diloco.data.splits import open_split, open_tokenizer
from torchtitan_diloco.data.stream import MicroBatches, Place, StreamIdentity
from torchtitan_diloco.data.worker_shards import WorkerShards, WorkerTokens

__all__ = [
    "IGNORE_INDEX",
    "TrainLoader",
    "ValidationBatches",
    "build_train_loader",
    "build_validation_batches",
    "open_split",
    "open_tokenizer",
]

IGNORE_INDEX = -100
"""Target of a place that counts for nothing; the default of torch's cross-entropy."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [sequences, sequence_length]."""


class SequenceReader(Dataset[Batch]):
    """Sequences of a fixed length out of shards, by number."""

    def __init__(self, shards: TokenShards | WorkerTokens, sequence_length: int) -> None:
        self._shards = shards
        self._length = sequence_length
        self.sequences = (len(shards) - 1) // sequence_length
        if self.sequences < 1:
            raise ValueError(
                f"{shards.name} is shorter than one sequence: it has {len(shards)} tokens, training.sequence_length = "
                f"{sequence_length} needs {sequence_length + 1}. Use a larger corpus"
                f"{', a larger data.validation_fraction' if shards.split == 'validation' else ''} or a smaller "
                f"training.sequence_length."
            )

    def __getitem__(self, indices: Indices) -> Batch:
        batch = np.empty((2, len(indices), self._length), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            tokens = self._shards.read(index * self._length, (index + 1) * self._length + 1)
            batch[0, row] = tokens[:-1]
            batch[1, row] = tokens[1:]
        inputs, targets = torch.from_numpy(batch)
        return inputs, targets


class TrainLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A StatefulDataLoader whose state is a place in the order of samples, and nothing else.

    The order is a pure function of the position, so neither torchdata's snapshots nor the state of the processes that
    read ahead need saving: a state can be loaded with any number of them, and every rank's is the same. Iterating
    again goes on where the last iterator stopped.
    """

    def __init__(
        self,
        reader: SequenceReader,
        stream: StreamIdentity,
        rank: int,
        processes: int,
        place: Place,
        streams: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self._stream = stream
        self._place = place
        self._streams = streams
        self._iterators_started = 0
        self._micro_batches = MicroBatches(stream, rank, reader.sequences, place)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="'set_vital' is deprecated"
            )  # torchdata's affair, not the user's
            super().__init__(
                reader,
                batch_size=None,  # the reader makes whole batches
                sampler=self._micro_batches,
                num_workers=processes,
                pin_memory=pin_memory,
                generator=torch.Generator(),  # its own, so that reading draws nothing from the run's random numbers
                snapshot_every_n_steps=None,
            )

    @property
    def position(self) -> int:
        """Global position of the first sample of the current step: how many samples all ranks took before it."""
        return self._place.step_start * self._streams

    def __iter__(self) -> Iterator[Batch]:
        self._drop_iterator()
        return self._batches(self._iterators_started)

    def _batches(self, iterator: int) -> Iterator[Batch]:
        for batch in super().__iter__():
            if iterator != self._iterators_started:
                break
            self._place = self._place.after(1, self._stream)
            yield batch
        raise RuntimeError(
            "this iterator is out of date: another one was started or a state was loaded; take iter(loader) again"
        )

    def _drop_iterator(self) -> None:
        """Forgets what was read ahead; the next iterator starts at the current place."""
        self._iterators_started += 1
        super().load_state_dict({})
        self._micro_batches.place = self._place

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._stream) | asdict(self._place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stream.check(state_dict)
        self._place = Place(int(state_dict["step_start"]), int(state_dict["micro_batch"]))
        self._drop_iterator()


def build_train_loader(
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
) -> TrainLoader:
    """An endless stream of this rank's micro-batches, epoch after epoch.

    A step of the run takes the next ranks * accumulation * batch_size samples of one global order, so which samples
    are in it does not depend on how many ranks share it. `start` is the global position of the first step.

    Where the workers have shards of their own, each has an order of its own, which its ranks share in the same way.
    `pin_memory` is for training on a GPU.
    """
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    assert start >= 0, start
    own = worker_shards.parts if worker_shards else ()
    sources: Sequence[TokenShards | WorkerTokens] = own or [shards]
    # Those of all workers, so that every rank sees when one is too short.
    readers = [SequenceReader(one, sequence_length) for one in sources]
    streams = len(readers)
    ranks //= streams
    worker, rank = divmod(rank, ranks)
    stream = StreamIdentity(
        corpus=sources[worker].fingerprint,
        sequence_length=sequence_length,
        batch_size=batch_size,
        accumulation=accumulation,
        ranks=ranks,
        seed=seed,
        shuffle=shuffle,
    )
    return TrainLoader(
        readers[worker], stream, rank, processes, Place(start // streams), streams, pin_memory
    )


class ValidationBatches:
    """The first sequences of a split, shared out over the ranks, the same each time it is iterated."""

    def __init__(
        self, reader: SequenceReader, batch_size: int, rank: int, ranks: int, sequences: int
    ) -> None:
        self._reader, self._batch_size, self._rank, self._ranks = reader, batch_size, rank, ranks
        self.sequences = min(sequences, reader.sequences)
        """Sequences that all ranks together read: fewer than asked for if the split has fewer."""

    def __len__(self) -> int:
        """Batches of each rank."""
        return -(-self.sequences // (self._batch_size * self._ranks))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            first = (number * self._ranks + self._rank) * self._batch_size
            wanted = np.arange(first, first + self._batch_size)
            # Past the end any sequence will do: it fills the shape, and its targets count for nothing.
            inputs, targets = self._reader[np.minimum(wanted, self.sequences - 1)]
            targets[torch.from_numpy(wanted >= self.sequences)] = IGNORE_INDEX
            yield inputs, targets


def build_validation_batches(
    shards: TokenShards,
    *,
    sequence_length: int,
    batch_size: int,
    rank: int,
    ranks: int,
    sequences: int,
) -> ValidationBatches:
    """The first `sequences` sequences as batches, equally many of equal shape on every rank, as collectives need it.
    Where sequences are missing, the targets are IGNORE_INDEX, so that nothing is counted twice."""
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    return ValidationBatches(
        SequenceReader(shards, sequence_length), batch_size, rank, ranks, sequences
    )
