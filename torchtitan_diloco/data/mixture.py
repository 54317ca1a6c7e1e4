"""The order in which several corpora take turns, and how it changes during a run.

A stream of samples is a pure function: from a position to a corpus, and to the number of a sample
of that corpus. After any number of samples since the last change, each corpus has had its share of
them up to less than one sample. Samples of a corpus are numbered through its epochs, so a change of
the weights skips and repeats nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.weights import Weights, turns_of

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """A part of a stream in which the weights do not change."""

    start: int
    """Position of its first sample."""
    weights: dict[str, float]
    """By the name of the corpus."""
    read: dict[str, int] = field(default_factory=dict)
    """Samples of each corpus that are read before it. Corpora that are left out have none."""


@dataclass(frozen=True)
class SavedPosition:
    """Position of a worker in its stream, as a checkpoint holds it."""

    samples: int
    """Position of the next sample in the order of samples."""
    segment: Segment
    """The part of the mixture that it is in, which knows what was read before it."""
    order: dict[str, Any]
    """The settings that the order of the samples depends on."""
    corpora: dict[str, str]
    """Fingerprints of the corpora by their names."""


@lru_cache(maxsize=64)
def _period(turns: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Return for each sample of a period its corpus, and the earlier samples of that corpus.

    This is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980):
    of the corpora that lag behind their share enough, the one whose next sample is due first has
    the turn. No corpus is ever ahead of or behind its share by more than 1 - 1/(2k - 2) samples.
    """
    corpora = [place for place, turn in enumerate(turns) if turn]
    period = sum(turns)
    if len(corpora) == 1:
        return np.full(period, corpora[0]), np.arange(period)
    # Everything is multiplied by period * (2k - 2), so that all numbers are whole.
    scale = 2 * len(corpora) - 2
    given = dict.fromkeys(corpora, 0)
    chosen = np.empty((2, period), dtype=np.int64)
    for position in range(period):
        lags = {
            corpus: scale * ((position + 1) * turns[corpus] - period * given[corpus])
            for corpus in corpora
        }
        eligible = [corpus for corpus, lag in lags.items() if lag >= period]
        # The share of a corpus reaches the bound after (bound - lag) / turns more samples.
        bound = (scale - 1) * period
        chosen_corpus = min(
            eligible, key=lambda corpus: Fraction(bound - lags[corpus], turns[corpus])
        )
        chosen[:, position] = chosen_corpus, given[chosen_corpus]
        given[chosen_corpus] += 1
    return chosen[0], chosen[1]


class Mixture:
    """Turns of corpora in a stream that consists of segments, in the order of their starts."""

    def __init__(self, corpora: Sequence[str], segments: Sequence[Segment]) -> None:
        """Build the mixture of a stream.

        `corpora`: names of the corpora, in the order in which `locate` numbers them. Of those whose
        next samples are due at the same time, the first has the turn.

        The first segment says how much was read before it; for the others it is computed.
        """
        assert segments
        self._corpora = list(corpora)
        self.segments = [segments[0]]
        for segment in segments[1:]:
            read = self._read_in(self.segments[-1], segment.start)
            self.segments.append(replace(segment, read=read))

    @cached_property
    def _starts(self) -> Indices:
        return np.array([segment.start for segment in self.segments])

    def _turns(self, segment: Segment) -> tuple[int, ...]:
        turns = turns_of(segment.weights)
        return tuple(turns.get(name, 0) for name in self._corpora)

    def _read_in(self, segment: Segment, position: int) -> dict[str, int]:
        """Return the samples of each corpus before a position, which a segment contains."""
        turns = self._turns(segment)
        periods, within = divmod(position - segment.start, sum(turns))
        chosen = _period(turns)[0][:within]
        counts = np.bincount(chosen, minlength=len(turns)).tolist()
        read = dict(segment.read)  # also of corpora that no segment from here on has
        for name, turn, count in zip(self._corpora, turns, counts, strict=True):
            if turn:
                read[name] = read.get(name, 0) + periods * turn + count
        return read

    def segment_at(self, position: int) -> Segment:
        """Return the segment that contains a position."""
        place = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self.segments[max(place, 0)]

    def read_before(self, position: int) -> dict[str, int]:
        """Return the samples of each corpus before a position."""
        return self._read_in(self.segment_at(position), position)

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the corpus of each position, and the number of the sample of that corpus."""
        corpora = np.empty_like(positions)
        samples = np.empty_like(positions)
        places = np.searchsorted(self._starts, positions, side="right") - 1
        for place in np.unique(places).tolist():
            segment = self.segments[place]
            inside = places == place
            turns = np.array(self._turns(segment))
            before = np.array([segment.read.get(name, 0) for name in self._corpora])
            periods, within = np.divmod(positions[inside] - segment.start, turns.sum())
            chosen, earlier = _period(tuple(turns.tolist()))
            corpora[inside] = chosen[within]
            in_period = periods * turns[chosen[within]] + earlier[within]
            samples[inside] = before[chosen[within]] + in_period
        return corpora, samples


def plan_segments(
    weights: Weights,
    phases: Iterable[tuple[int, Weights]],
    *,
    names: Sequence[str],
    position: int = 0,
    before: Segment | None = None,
) -> list[Segment]:
    """Return the segments of a stream from a position on.

    `phases`: the position at which each begins, and its weights. `names`: names of all corpora, in
    the order in which the stream reads them. `before`: the segment of a checkpoint at this
    position, read in the same order, which goes on if the weights are still those that it has.
    """
    current = dict(weights)
    later = list[Segment]()
    for start, mixed in phases:
        if start <= position:
            current = dict(mixed)
        else:
            later.append(Segment(start, dict(mixed)))
    if before is None:
        return [Segment(position, current), *later]
    if before.start == position:
        return [Segment(position, current, before.read), *later]
    if turns_of(before.weights) == turns_of(current):
        return [before, *later]
    read = Mixture(names, [before]).read_before(position)
    return [Segment(position, current, read), *later]


def check_fingerprints(fingerprints: Mapping[str, str]) -> None:
    """Raise if two corpora of a mixture hold the same tokens."""
    names: dict[str, str] = {}
    for name, fingerprint in fingerprints.items():
        if other := names.get(fingerprint):
            raise UserError(
                f'data.mixture: "{name}" and "{other}" hold the same tokens: name the corpus once, '
                "with the sum of both weights"
            )
        names[fingerprint] = name
