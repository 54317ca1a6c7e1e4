"""What islands do about one that is late or wrong again and again: from a note to its eviction.

Not to wait for an island is a decision of each island, from the entries that it reads: `Conduct`.
An eviction is in the log, and needs the votes of several islands: `count_vote`. All islands check
there that nothing of the evicted one was merged for long, so nobody can evict a healthy one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from torchtitan_diloco.islands.ledger import Entry, Fragment, Slot
from torchtitan_diloco.islands.records import Evict, VoidError

IN_A_ROW, WITHOUT_WORK = 8, 16
"""Versions of all fragments until an island is not waited for, and until it may be evicted."""
FEWEST_VOTES = 2
"""One island, which may be the sick one, evicts nobody."""
HUNG = 10
"""An island hangs if it makes no step for this multiple of `islands.slot_seconds`."""
EVICTED = "evicted"


class Level(IntEnum):
    """What is done about an island."""

    NOTE = 0
    NOT_WAITED_FOR = 1
    """Rounds close without it. Its parts count when they come."""
    LEFT_OUT = 2
    """The same, as its parts have weight 0."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")

    @property
    def evidence(self) -> str:
        if self is Level.LEFT_OUT:
            return f"its parts were wrong in {IN_A_ROW} versions, and count for nothing"
        return f"{IN_A_ROW} versions had no part of it in time; its parts count when they come"


class Seen(Enum):
    """The part of an island in an entry."""

    IN_TIME = "in time"
    LATE = "late"
    """Of an earlier round, so it was there before this one."""
    MISSING = "missing"
    """The round has waited for it."""
    WRONG = "wrong"
    """Not finite, or an outlier."""


def look_at(entry: Entry, owner: str, own: str) -> Seen | None:
    """Return None for an outlier that another island has found: that one may be the sick one."""
    part = entry.part_of(owner)
    if part is None:
        return Seen.MISSING
    if entry.is_lost(part):
        return Seen.WRONG if own == entry.close.incarnation or not part.finite else None
    return Seen.IN_TIME if part.base == entry.close.version - 1 else Seen.LATE


@dataclass
class Conduct:
    """How an island has behaved, as one of the others sees it."""

    fragments: int
    level: Level = Level.NOTE
    missing: int = 0
    """Entries without a part of it since one was in time."""
    wrong: int = 0
    """Entries with wrong parts since a good one."""
    times: int = 0
    """How often it was above NOTE."""
    until: int = 0
    """Version at which it is waited for again."""

    def note(self, seen: Seen, version: int) -> bool:
        """Note an entry, and return whether the level changes. `version`: of its fragment."""
        self.missing += seen is Seen.MISSING
        self.wrong += seen is Seen.WRONG
        if seen in (Seen.IN_TIME, Seen.LATE):
            self.wrong = 0
        if seen is Seen.IN_TIME:
            self.missing = 0
        before, enough = self.level, IN_A_ROW * self.fragments
        if before is Level.NOTE and max(self.missing, self.wrong) >= enough:
            self.level = Level.LEFT_OUT if self.wrong >= enough else Level.NOT_WAITED_FOR
            # All islands wait for it again from common multiples on: the closes of one that does
            # not wait would make it late for the others.
            period = IN_A_ROW * 2**self.times
            self.until = ((version + period // 2) // period + 1) * period
            self.times += 1
        elif before is not Level.NOTE and version >= self.until and not self.wrong:
            self.level, self.missing = Level.NOTE, 0
        return self.level is not before

    @property
    def is_wrong(self) -> bool:
        """Whether its parts have been wrong for so long that it may be evicted."""
        return self.wrong >= WITHOUT_WORK * self.fragments


def standing(conduct: Mapping[str, Conduct]) -> list[str]:
    """Describe the islands above NOTE, for the others."""
    return [f"{name}: {one.level}" for name, one in conduct.items() if one.level]


# --- evictions ------------------------------------------------------------------------------------


def works(slot: Slot, fragments: Sequence[Fragment]) -> bool:
    """Return whether work of the owner was merged lately, or the owner is new."""
    pairs = zip(fragments, slot.ledgers, strict=True)
    last = (one.version - max(ledger.good_in, ledger.since) for one, ledger in pairs)
    return min(last) < WITHOUT_WORK


def count_vote(vote: Evict, slots: Sequence[Slot], fragments: Sequence[Fragment]) -> bool:
    """Count a vote, and return whether it evicts. Raises a VoidError if it is not valid.

    An eviction needs the votes of two islands, and of most of those whose work is merged. It is
    like leaving: parts of the evicted island that wait still count, if they can be merged.
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
