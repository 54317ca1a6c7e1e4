"""Actions of an island about others that are late or wrong, or whose bits differ from the majority.

Each island decides from the entries that it reads whether to wait for another one: `Conduct`. An
eviction is recorded in the log, and needs the votes of several islands (ledger.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.vitals import Action
from torchtitan_diloco.islands.ledger import WITHOUT_WORK, Entry, works
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import IslandFailedError, Members
from torchtitan_diloco.islands.records import AnyRecord, Evict, Take, name_of

IN_A_ROW = 8
"""Number of versions of all fragments after which rounds do not wait for an island."""
HUNG = 10
"""An island hangs if it completes no step for this multiple of `islands.slot_seconds`."""
NOT_WAITED_FOR, LEFT_OUT, EVICTED = "not waited for", "left out", "evicted"
EVIDENCE = {
    NOT_WAITED_FOR: (
        f"none of its parts was in time for {IN_A_ROW} versions; late parts still count"
    ),
    LEFT_OUT: f"its parts were wrong in {IN_A_ROW} versions, and have weight 0",
}
"""Level of an action about an island without which rounds close, and the reason."""


class Seen(Enum):
    """The part of an island in an entry."""

    IN_TIME = "in time"
    LATE = "late"
    """The part is of an earlier round, so it arrived before this one."""
    MISSING = "missing"
    """The round waited for the part."""
    WRONG = "wrong"
    """The part was not finite, or an outlier."""


def look_at(entry: Entry, owner: str, own: str) -> Seen | None:
    """Return None for an outlier that another island has found, which may itself be faulty."""
    part = entry.part_of(owner)
    if part is None:
        return Seen.MISSING
    if entry.is_lost(part):
        return Seen.WRONG if own == entry.close.incarnation or not part.finite else None
    return Seen.IN_TIME if part.base == entry.close.version - 1 else Seen.LATE


@dataclass
class Conduct:
    """Record of how an island has behaved, kept by another island."""

    fragments: int
    level: str = ""
    """A key of EVIDENCE, or empty."""
    missing: int = 0
    """Number of entries without a part of it since one was in time."""
    wrong: int = 0
    """Number of entries with wrong parts since a good one."""
    times: int = 0
    """Number of times that it had a level."""
    until: int = 0
    """Version from which rounds wait for it again."""

    def note(self, seen: Seen, version: int) -> bool:
        """Note an entry, and return whether the level changes. `version`: of its fragment."""
        self.missing += seen is Seen.MISSING
        self.wrong += seen is Seen.WRONG
        if seen in (Seen.IN_TIME, Seen.LATE):
            self.wrong = 0
        if seen is Seen.IN_TIME:
            self.missing = 0
        before, enough = self.level, IN_A_ROW * self.fragments
        if not before and max(self.missing, self.wrong) >= enough:
            self.level = LEFT_OUT if self.wrong >= enough else NOT_WAITED_FOR
            # All islands wait for it again from common multiples on: the closes of one that does
            # not wait would make it late for the others.
            period = IN_A_ROW * 2**self.times
            self.until = ((version + period // 2) // period + 1) * period
            self.times += 1
        elif before and version >= self.until and not self.wrong:
            self.level, self.missing = "", 0
        return self.level != before

    @property
    def is_wrong(self) -> bool:
        """Whether its parts have been wrong for long enough to evict it."""
        return self.wrong >= WITHOUT_WORK * self.fragments


class Others:
    """Records of the other islands, kept by this one."""

    def __init__(self, state: State, members: Members, incarnation: str, action: str) -> None:
        """`action`: see `Islands`."""
        self._state, self._members, self._incarnation = state, members, incarnation
        self.disputes, self._action = Disputes(state, members, incarnation), action
        self.flags: dict[str, int] = {}
        """Result for the latest part of each owner, if this island may judge it."""
        self._conduct: dict[str, Conduct] = {}  # by name
        self._evicted = set[str]()

    def note(self, record: AnyRecord, entry: Entry | None, ready: set[int]) -> Iterator[Action]:
        """Process a valid record. Yield the actions that begin or end with it.

        `ready`: slots that rounds wait for.
        """
        if isinstance(record, Evict) and record.target in self._state.evicted:
            self._evicted.add(name_of(record.target))
            yield Action(name_of(record.target), EVICTED, f"it {record.reason}")
        elif isinstance(record, Take) and name_of(record.incarnation) in self._evicted:
            self._evicted.remove(name_of(record.incarnation))
            yield Action(name_of(record.incarnation), EVICTED, "it is back", over=True)
        if entry is not None:
            yield from self._note_entry(entry, ready)

    def _note_entry(self, entry: Entry, ready: set[int]) -> Iterator[Action]:
        here = {name_of(slot.owner) for slot in self._state.slots if slot.owner and not slot.done}
        for name, one in self._conduct.items():
            if one.level and name not in here:
                yield Action(name, one.level, "it is gone", over=True)
                one.level, one.missing, one.wrong = "", 0, 0
        for slot, owner in self._state.owners().items():
            seen, part = look_at(entry, owner, self._incarnation), entry.part_of(owner)
            if seen is None:
                continue
            if part is not None:
                flag = OUTLIER if part.finite else NOT_FINITE
                self.flags[owner] = flag if seen is Seen.WRONG else 0
            is_awaited = owner != self._incarnation and (part is not None or slot in ready)
            if self._action == "note" or not is_awaited:
                continue
            one = self._conduct.setdefault(name_of(owner), Conduct(len(self._state.fragments)))
            before = one.level
            if one.note(seen, entry.close.version):
                what = one.level or before
                yield Action(name_of(owner), what, EVIDENCE[what], over=not one.level)

    def standing(self) -> list[str]:
        """Describe the actions about islands for the others. Any thread may call this."""
        found = self._conduct.copy().items()
        return [f"{name}: {one.level}" for name, one in found if one.level]

    def awaited(self, ready: set[int]) -> set[int]:
        """Return those of the ready slots whose parts a round needs to close early."""
        owners = self._state.owners()
        levels = {name: one.level for name, one in self._conduct.items()}
        return {slot for slot in ready if not levels.get(name_of(owners[slot]))}

    def to_evict(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield faulty islands of which nothing was merged for a long time, and the reason."""
        for slot in self._state.slots if self._action == "evict" else ():
            owner, voted = slot.owner, self._incarnation in slot.votes
            if owner is None or slot.done or voted or owner == self._incarnation:
                continue
            conduct = self._conduct.get(name_of(owner))
            reason = "has wrong numbers" if conduct is not None and conduct.is_wrong else ""
            if self.disputes.differs(owner):
                reason = "has different bits"
            elif self._members.hangs(owner, HUNG, now):
                reason = "completes no step"
            if reason and not works(slot, self._state.fragments):
                yield owner, reason


class Vote(NamedTuple):
    """Knowledge about a fragment of another island."""

    version: int
    """Latest version with the same bits, or first version with different bits."""
    same: bool


class Disputes:
    """Compares this island's checksums with those in records and heartbeats of the others.

    Records with different checksums are void here, and this island's records are void there. An
    island that differs from most others fails, and takes their copies when it is restarted. If half
    of them differ, it is unknown which are right: all stay silent, fail, and replay the log.
    """

    def __init__(self, state: State, members: Members, incarnation: str) -> None:
        self._state, self._members, self._incarnation = state, members, incarnation
        self._said: dict[tuple[int, str], Vote] = {}
        """Knowledge by fragment and island."""
        self._undecided: dict[int, float] = {}
        """Fragments for which half of the islands that have reported since have different bits, and
        the time since when."""
        self._blocked = set[int]()
        self._warned = set[tuple[int, str]]()

    def note(self, fragment: int, incarnation: str, version: int, *, same: bool) -> None:
        before = self._said.get((fragment, incarnation))
        if before is not None and before.same == same:
            version = max(version, before.version) if same else min(version, before.version)
        elif before is not None and same and version < before.version:  # an earlier heartbeat
            return
        self._said[fragment, incarnation] = Vote(version, same)

    def is_undecided(self, fragment: int) -> bool:
        return fragment in self._blocked

    def differs(self, incarnation: str) -> bool:
        """Return whether the bits of a fragment of an island differ from those of most others."""
        votes = self._votes()
        return any(incarnation in others and len(others) <= same for same, _, others in votes)

    def is_outvoted(self, now: float) -> bool:
        """Return whether more islands have different bits of a fragment than have the same."""
        self._hear(now)
        return any(len(others) > same + 1 for same, _, others in self._votes())

    def settle(self, now: float) -> list[str]:
        """Return a warning for each island that begins to differ from most others.

        Raises an IslandFailedError if this island has to restart from the log.
        """
        self._hear(now)
        found = list[str]()
        for fragment, (same, before, others) in enumerate(self._votes()):
            names = ", ".join(sorted(map(name_of, others)))
            what = f"fragment {fragment} has different bits on island {names} than on this one"
            cause = "one of them has a memory fault, or computes differently"
            cause += self._hashes(fragment, others)
            is_late = now > self._undecided.get(fragment, now) + self._members.expiry
            same += before * is_late  # who has long not spoken may read for long
            if len(others) <= same:
                self._blocked.discard(fragment)
                if not is_late or not others:
                    self._undecided.pop(fragment, None)
                news = {(fragment, other) for other in others} - self._warned
                found += [f"{what} and {same} more, which continue: {cause}"] if news else []
                self._warned |= news
            elif len(others) > same + 1:
                raise IslandFailedError(
                    f"{what}, and only {same} more have the same bits as this "
                    f"one, so it ends: {cause}. When it is restarted, it takes the "
                    "shared copies of the others"
                )
            elif is_late:
                raise IslandFailedError(
                    f"{what}, and it is unknown which one is right, so both end: "
                    f"{cause}. When they are restarted, they replay the log"
                )
            else:
                self._undecided.setdefault(fragment, now)
                self._blocked.add(fragment)
        return found

    def _votes(self) -> Iterator[tuple[int, int, set[str]]]:
        """Yield for each fragment how many others have the same bits, how many had the same before
        the first difference and have not reported since, and which have different bits."""
        owners = set(self._state.owners().values()) - {self._incarnation}
        for fragment in range(len(self._state.fragments)):
            said = {owner: self._said.get((fragment, owner)) for owner in owners}
            votes = {owner: vote for owner, vote in said.items() if vote is not None}
            others = {owner for owner, vote in votes.items() if not vote.same}
            since = min((votes[owner].version for owner in others), default=0)
            same = sum(vote.same and vote.version >= since for vote in votes.values())
            yield same, len(votes) - len(others) - same, others

    def _hashes(self, fragment: int, others: set[str]) -> str:
        """Name both hashes of a version on which heartbeats differ."""
        known = self._state.fragments[fragment].checksums
        for other in sorted(others & self._members.heard.keys()):
            for version, theirs in self._members.heard[other].hint.copies[fragment : fragment + 1]:
                if known.get(version, theirs) != theirs:
                    where = f"version {version} is {known[version][:16]} here"
                    return f" ({where}, and {theirs[:16]} on {name_of(other)})"
        return ""

    def _hear(self, now: float) -> None:
        """Compare the checksums in the latest heartbeats, and forget islands that are silent."""
        for incarnation, member in self._members.heard.copy().items():
            silent = self._members.is_silent(incarnation, now)
            pairs = zip(member.hint.copies, self._state.fragments, strict=False)
            for fragment, ((version, checksum), shared) in enumerate(pairs):
                own = shared.checksums.get(version)
                if silent:
                    self._said.pop((fragment, incarnation), None)
                elif own is not None:
                    self.note(fragment, incarnation, version, same=checksum == own)
