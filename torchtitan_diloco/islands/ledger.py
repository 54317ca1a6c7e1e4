"""Components of the state of a run: slots with their ledgers, fragments, and their entries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from torchtitan_diloco.islands.records import (
    AnyRecord,
    Close,
    Evict,
    Open,
    Part,
    VoidError,
    name_of,
)

WITHOUT_WORK = 16
"""Number of versions of all fragments without work of an island before it may be evicted."""
FEWEST_VOTES = 2
"""A single island, which may itself be faulty, cannot evict another."""


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

    def left_out(self) -> Iterator[str]:
        """Describe the parts that this entry leaves out."""
        where = f"fragment {self.close.fragment}, version {self.close.version}"
        for refusal in self.close.refused:
            yield f"{where}: record {refusal.part} was left out: {refusal.reason}"
        for part in (*self.parts, *self.outliers):
            if self.is_lost(part):
                reason = "is too large" if part.finite else "is not finite"
                yield (
                    f"{where}: the delta of island {name_of(part.incarnation)} "
                    f"{reason}; it is left out, and the island takes the shared "
                    "parameters"
                )


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
        """Count the samples up to `end` that have not been merged as lost."""
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
    """Valid parts that are not in an entry yet, by sequence number."""
    norms: list[float] = []
    """Norms of the latest merged parts."""

    def waiting_of(self, slot: int) -> Part | None:
        return next((part for part in self.waiting.values() if part.slot == slot), None)


def works(slot: Slot, fragments: Sequence[Fragment]) -> bool:
    """Return whether work of the owner was merged recently, or the owner is new."""
    pairs = zip(fragments, slot.ledgers, strict=True)
    last = (one.version - max(ledger.good_in, ledger.since) for one, ledger in pairs)
    return min(last) < WITHOUT_WORK


def count_vote(vote: Evict, slots: Sequence[Slot], fragments: Sequence[Fragment]) -> bool:
    """Count a vote, and return whether it evicts. Raises a VoidError if it is not valid.

    An eviction needs the votes of two islands, and of most islands whose work is merged. It
    requires that nothing of the evicted island was merged for long, so that no healthy island can
    be evicted. It has the effect of leaving: waiting parts still count, if they can be merged.
    """
    slot = next((one for one in slots if one.owner == vote.target and not one.done), None)
    if slot is None or vote.target == vote.incarnation:
        raise VoidError(f"{vote.target} cannot be evicted by it")
    if works(slot, fragments):
        raise VoidError(f"work of {vote.target} was merged lately")
    able = {one.owner for one in slots if one.owner and works(one, fragments)}
    if vote.incarnation not in able:
        raise VoidError("no work of its writer was merged lately")
    slot.votes = sorted({*slot.votes, vote.incarnation})
    votes = len(able.intersection(slot.votes))
    if votes < FEWEST_VOTES or 2 * votes <= len(able):
        return False
    slot.owner = None
    return True


# --- what is due ----------------------------------------------------------------------------------

LATE_MIXING = 0.5
"""Minimum share of the local parameters when a part was late."""


class Mode(Enum):
    """How an entry changes the parameters theta, given the shared copies Theta before and after."""

    MIX = "mix"
    """theta = alpha theta + (1 - alpha) Theta_new: the entry has this island's part, in time."""
    MIX_LATE = "mix late"
    """The same with an alpha of at least LATE_MIXING, to keep the work since the send."""
    ADD = "add"
    """theta += Theta_new - Theta_old: the entry has no part of this island."""
    RESET = "reset"
    """theta = Theta_new: the part of this island was not finite."""

    def share(self, alpha: float) -> float:
        """Return the share of the local parameters when they are mixed."""
        return max(alpha, LATE_MIXING) if self is Mode.MIX_LATE else alpha


class Due(msgspec.Struct):
    """A version to apply to the parameters, or several without a part of this island at once."""

    fragment: int
    version: int
    clock: int
    own: Part | None
    """The part of this island in it."""
    is_lost: bool
    participants: int
    received: int
    """Bytes of the parts of other islands."""
    mode: Mode = Mode.ADD
    waited: float = 0.0
    """Seconds for which training has waited."""


class Boundary(msgspec.Struct, frozen=True):
    """Actions between two steps, on all ranks: apply, then take the deltas of the parts."""

    clock: int
    stopped: bool = False
    may_train_on: bool = False
    """Training is stopped until it is known whether the run has merged its tokens."""
    leaving: bool = False
    """The island leaves before the end of the run."""
    over: bool = False
    """There is nothing left to send or apply."""
    applied: list[Due] = []
    sent: list[Part] = []
    waits_until: float | None = None
    """Training waits: ask again after the next event, or at this time."""
    settings: dict[str, str] = {}
    """Settings of the run."""
