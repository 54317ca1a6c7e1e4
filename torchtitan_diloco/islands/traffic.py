"""What islands and their syncer transfer: bytes, and requests to the store in which they meet.

Parts, versions and copies are counted to the byte, without the seals of a store. The requests
follow from the pauses of the loops that make them, in link.py, syncing.py and heard.py, as if calls
took no time: calls of many milliseconds make them fewer, and waiting for others makes an island
read more, except in a provider's bucket. Notes and decisions, of some kB each, are counted as
requests only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_diloco.base.usage import Usage
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.islands.payload import HEADER_BYTES
from torchtitan_diloco.islands.rules.commit import LIST_SECONDS
from torchtitan_diloco.islands.rules.copies import COPY_SECONDS
from torchtitan_diloco.islands.rules.settings import NOTE_PAUSES, RATES, Rates
from torchtitan_diloco.islands.rules.writer import DECISION_SECONDS
from torchtitan_diloco.islands.syncing import LISTING_SECONDS, SWEEP_SECONDS, SWEPT
from torchtitan_diloco.store import Kind
from torchtitan_diloco.store.large import CHUNK_BYTES

DECISIONS_OF_ROUND = 3
"""A round is opened, closed and published, each by a decision."""
WRITES_OF_DECISION = 2
"""A decision is created, and the ones after it are listed. Old ones are deleted by the sweep."""


@dataclass(frozen=True)
class Meeting:
    """Islands that meet in a store. All have steps of the same length, and none is late."""

    fragments: Sequence[int]
    """Numbers of parameters, in the order in which fragments are sent."""
    config: DiLoCoConfig
    islands: int
    kind: Kind
    step_seconds: float

    # --- an island --------------------------------------------------------------------------------

    def of_island(self, steps: int) -> Usage:
        """Return what an island transfers in a run in which it makes so many steps: its first
        copies, parts, versions, notes, and decisions that it reads."""
        usage = self._island_polls.times(steps * self.step_seconds)
        for values, rounds in zip(self.fragments, self._rounds(steps), strict=True):
            usage = usage.plus(_fetched(_copy_bytes(values)))
            usage = usage.plus(self._of_part_and_version(values).times(rounds))
        return usage

    @property
    def island_a_second(self) -> Usage:
        """What an island transfers per second once it trains."""
        usage = self._island_polls
        for values in self.fragments:
            usage = usage.plus(self._of_part_and_version(values).times(1 / self._cycle_seconds))
        return usage

    def _of_part_and_version(self, values: int) -> Usage:
        """Return the usage of an island that stores a part, and reads a version of its size."""
        size = self.message_bytes(values)
        return _stored(size).plus(_fetched(size))

    @property
    def _island_polls(self) -> Usage:
        """Requests for decisions and notes of an island per second."""
        polls = 1 / self._rates.poll_seconds
        read = min(self._decisions, polls)  # the others are older when it looks again
        notes = min(1 / NOTE_PAUSES[self.kind], self._decisions + 1 / self.step_seconds)
        return Usage(reads=polls + read, writes=notes + max(read, 1 / LIST_SECONDS))

    # --- the syncer -------------------------------------------------------------------------------

    def of_syncer(self, steps: int) -> Usage:
        """Return what the syncer transfers in a run in which an island makes so many steps."""
        seconds = steps * self.step_seconds
        usage = self._syncer_polls.times(seconds)
        for values, rounds in zip(self.fragments, self._rounds(steps), strict=True):
            usage = usage.plus(self._of_merge(values).times(rounds))
            usage = usage.plus(self._of_copy(values).times(math.ceil(seconds / self._copy_seconds)))
        return usage

    @property
    def syncer_a_second(self) -> Usage:
        """What the syncer transfers per second while islands train."""
        usage = self._syncer_polls
        for values in self.fragments:
            usage = usage.plus(self._of_merge(values).times(1 / self._cycle_seconds))
            usage = usage.plus(self._of_copy(values).times(1 / self._copy_seconds))
        return usage

    def _of_merge(self, values: int) -> Usage:
        """Return the usage of a syncer that reads a part of each island, and stores a version."""
        size = self.message_bytes(values)
        return _fetched(size).times(self.islands).plus(_stored(size))

    def _of_copy(self, values: int) -> Usage:
        """Return the usage of a syncer that stores a copy and the state of the outer optimizer."""
        slots = len(self.config.outer_optimizer.rule.slots)
        return _stored(_copy_bytes(values)).plus(_stored(_copy_bytes((1 + slots) * values)))

    @property
    def _syncer_polls(self) -> Usage:
        """Requests for notes, changes, decisions and garbage per second."""
        poll_seconds = self._rates.poll_seconds
        lists = 2 / max(LISTING_SECONDS, poll_seconds) + len(SWEPT) / SWEEP_SECONDS
        writes = lists + WRITES_OF_DECISION * self._decisions
        return Usage(reads=self.islands / poll_seconds, writes=writes)

    # --- both -------------------------------------------------------------------------------------

    def message_bytes(self, values: int) -> int:
        """Return the size of a part or a version of a fragment."""
        return HEADER_BYTES + build_codec(self.config.quantization).wire_bytes(values)

    @property
    def _rates(self) -> Rates:
        return RATES[self.kind]

    @property
    def _cycle_seconds(self) -> float:
        return self.config.sync_every * self.step_seconds

    @property
    def _copy_seconds(self) -> float:
        """Seconds between two copies of a fragment: some versions, and at most `COPY_SECONDS`
        unless a version takes longer."""
        several = self._rates.copies_every * self._cycle_seconds
        return max(self._cycle_seconds, min(several, COPY_SECONDS))

    @property
    def _decisions(self) -> float:
        """Decisions per second."""
        rounds = len(self.fragments) / self._cycle_seconds
        wanted = 1 / DECISION_SECONDS + DECISIONS_OF_ROUND * rounds
        return min(1 / self._rates.commit_seconds, wanted)

    def _rounds(self, steps: int) -> list[int]:
        """Return the rounds of each fragment in so many steps. At the end of a run, an island sends
        what it has not sent before."""
        schedule = build_schedule(self.config, len(self.fragments))
        return [
            max(1, math.ceil((steps - schedule.offset(fragment)) / self.config.sync_every))
            for fragment in range(len(self.fragments))
        ]


def _copy_bytes(values: int) -> int:
    """Return the size of values in fp32."""
    return HEADER_BYTES + 4 * values


def _stored(size: int) -> Usage:
    """Return the usage of a process that stores a content. The description of one in chunks is
    another object."""
    chunks = math.ceil(size / CHUNK_BYTES)
    return Usage(sent=size, writes=1 if size < CHUNK_BYTES else chunks + 1)


def _fetched(size: int) -> Usage:
    chunks = math.ceil(size / CHUNK_BYTES)
    return Usage(received=size, reads=1 if size < CHUNK_BYTES else chunks + 1)
