"""The endless stream of training samples: who reads which positions of the global order, and where one stands."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from torchtitan_diloco.data.order import Indices, sequence_indices

_MICRO_BATCHES_AT_ONCE = (
    64  # the order is computed for so many at once, which makes it cheap next to reading
)

_KEYS = {
    "corpus": "the fingerprint of the corpus",
    "sequence_length": "training.sequence_length",
    "batch_size": "training.batch_size",
    "accumulation": "micro-batches per step and rank (from training.global_batch_size)",
    "ranks": "the number of ranks",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
}


@dataclass(frozen=True)
class StreamIdentity:
    """What two streams must have in common for the one to continue the other."""

    corpus: str
    """Fingerprint of the tokens."""
    sequence_length: int
    batch_size: int
    """Sequences of a micro-batch."""
    accumulation: int
    """Micro-batches of a step, per rank."""
    ranks: int
    seed: int
    shuffle: bool

    def step_size(self) -> int:
        """Samples of one step, all ranks together."""
        return self.ranks * self.accumulation * self.batch_size

    def check(self, state: dict[str, Any]) -> None:
        """Raises, with every difference, if the state is not one of this stream."""
        mine = asdict(self)
        missing = [key for key in mine if key not in state]
        if missing:
            raise ValueError(
                f"this is no state of the training data: it has no {', '.join(missing)}"
            )
        differences = [
            f"{_KEYS[key]} was {state[key]} and is {value}"
            for key, value in mine.items()
            if state[key] != value
        ]
        if differences:
            raise ValueError(
                f"the saved position is one in another stream of training data: {'; '.join(differences)}. Resume with "
                f"the settings and the corpus of the run that saved it, or start a new run."
            )


@dataclass(frozen=True)
class Place:
    """The micro-batch that comes next, on every rank."""

    step_start: int
    """Global position of the first sample of its step."""
    micro_batch: int = 0
    """Its number within the step."""

    def after(self, micro_batches: int, stream: StreamIdentity) -> "Place":
        steps, micro_batch = divmod(self.micro_batch + micro_batches, stream.accumulation)
        return Place(self.step_start + steps * stream.step_size(), micro_batch)

    def positions(self, micro_batches: int, stream: StreamIdentity, rank: int) -> Indices:
        """Global positions [micro_batches, batch_size] of what a rank reads from here on.

        A step is ranks * accumulation * batch_size consecutive positions; rank r takes the r-th equal slice of it.
        """
        steps, within = np.divmod(self.micro_batch + np.arange(micro_batches), stream.accumulation)
        starts = (
            steps * stream.step_size() + (rank * stream.accumulation + within) * stream.batch_size
        )
        positions: Indices = self.step_start + starts[:, None] + np.arange(stream.batch_size)
        return positions


class MicroBatches(Sampler[Indices]):
    """For each micro-batch of one rank, from `place` on: the numbers of its sequences. Without end."""

    def __init__(self, stream: StreamIdentity, rank: int, sequences: int, place: Place) -> None:
        self.place = place
        self._stream, self._rank, self._sequences = stream, rank, sequences

    def __iter__(self) -> Iterator[Indices]:
        place = self.place
        while True:
            positions = place.positions(_MICRO_BATCHES_AT_ONCE, self._stream, self._rank)
            indices = sequence_indices(
                positions.ravel(),
                sequences=self._sequences,
                seed=self._stream.seed,
                shuffle=self._stream.shuffle,
            )
            yield from indices.reshape(positions.shape)
            place = place.after(_MICRO_BATCHES_AT_ONCE, self._stream)
