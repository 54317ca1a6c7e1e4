"""What the state of a run is made of: slots with their ledgers, fragments, and their entries."""

from dataclasses import dataclass
from enum import Enum

import msgspec

from torchtitan_diloco.islands.records import AnyRecord, Close, Open, Part


@dataclass(frozen=True)
class Entry:
    """Valid close and the parts that it names."""

    close: Close
    parts: tuple[Part, ...]
    outliers: tuple[Part, ...] = ()  # left out for their norms

    def part_of(self, incarnation: str) -> Part | None:
        """Return the part of this owner that the entry merges or declares lost."""
        parts = *self.parts, *self.outliers
        return next((part for part in parts if part.incarnation == incarnation), None)

    def is_lost(self, part: Part) -> bool:
        """Return whether the work in a part of this entry is lost."""
        return part in self.outliers or not part.finite


@dataclass(frozen=True)
class Outcome:
    """Effect of a record."""

    record: AnyRecord | None
    void: str = ""  # reason for skipping it; empty if it is valid
    disputed: bool = False  # void because its writer has a different checksum of a version
    entry: Entry | None = None
    evicts: bool = False  # whether it is the vote that evicts an island


class Ledger(msgspec.Struct):
    """Fate of the samples of a slot in a fragment."""

    merged: int = 0
    lost: int = 0
    merged_in: int = 0  # version of the last entry with a part of the slot
    good_in: int = 0  # and of the last one that has merged its work
    number: int = 0  # of the owner's last valid part
    since: int = 0  # version when the owner took the slot
    entries: int = 0  # with a part of the owner

    @property
    def taken_to(self) -> int:
        """Sample at which the next part must start: those before it are merged or lost."""
        return self.merged + self.lost

    def lose(self, end: int) -> None:
        """Count the samples up to `end` that are not taken yet as lost."""
        self.lost += max(0, end - self.taken_to)


class Slot(msgspec.Struct):
    ledgers: list[Ledger]  # one per fragment
    owner: str | None = None
    start: int = 0  # first sample of the owner
    read_to: int = 0  # end of the samples in the owner's parts
    read_twice: int = 0  # samples in parts of an owner that the next owner reads again
    done: bool = False
    votes: list[str] = []  # of islands to evict the owner


class Fragment(msgspec.Struct):
    head: str
    """Hash of the last entry, initially of the facts."""
    checksums: dict[int, str]
    """Checksums of the latest versions, as computed by this island."""
    version: int = 0
    clock: int = 0
    last: int = 0
    """Sequence number of the last valid record. Closes could make each other void if void ones
    counted."""
    open: Open | None = None
    waiting: dict[int, Part] = {}
    """Valid parts that are in no entry yet, by sequence number."""
    norms: list[float] = []
    """Norms of the parts merged last."""

    def waiting_of(self, slot: int) -> Part | None:
        return next((part for part in self.waiting.values() if part.slot == slot), None)


LATE_MIXING = 0.5
"""Minimum share of the local parameters when a part was late."""


class Mode(Enum):
    """How an entry changes the parameters theta, given the shared copies Theta before and after."""

    MIX = "mix"
    """theta = alpha theta + (1 - alpha) Theta_new: the own part, in its own round and in time."""
    MIX_LATE = "mix late"
    """The same with an alpha of at least LATE_MIXING, to keep the work since the send."""
    ADD = "add"
    """theta += Theta_new - Theta_old: the entry has no own part."""
    RESET = "reset"
    """theta = Theta_new: the own part was not finite."""

    def share(self, alpha: float) -> float:
        """Return the share of the local parameters when they are mixed."""
        return max(alpha, LATE_MIXING) if self is Mode.MIX_LATE else alpha


class Due(msgspec.Struct):
    """A version to apply to the parameters, or several without an own part at once."""

    fragment: int
    version: int
    clock: int
    own: Part | None
    """The own part in it."""
    is_lost: bool
    participants: int
    received: int
    """Bytes of the parts of other islands."""
    mode: Mode = Mode.ADD
    waited: float = 0.0
    """Seconds for which training has waited."""
