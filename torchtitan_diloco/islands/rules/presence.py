"""Which islands are running, in time during which the syncer has listened, and their slots."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_diloco.islands.rules.decision import (
    BARRED,
    ENDS,
    IS_IDLE,
    IS_SENDING,
    REPLACED,
    RUNNING,
    Decision,
    Ledger,
    Seen,
    Slot,
)
from torchtitan_diloco.islands.rules.fields import FURTHEST
from torchtitan_diloco.islands.rules.ledger import most_samples
from torchtitan_diloco.islands.rules.names import ISLAND, incarnation_of, login_of, name_of
from torchtitan_diloco.islands.rules.note import GIVE, JOIN, Note

MOST_LISTENED = 1.5
"""Maximum seconds that one poll counts as listened, unless the pause between two is longer. Longer
polls were an outage of the store or a pause of the syncer, during which no island could be
heard."""
SILENT = 5.0
"""Seconds of silence after which rounds do not wait for an island, and its next incarnation takes
its slot."""
FORGOTTEN = 60.0
"""Seconds of silence after which the objects of an incarnation without a slot are deleted."""
SLOW_STEP = 4.0
"""Multiple of its usual step time after which an island counts as hung."""
WITHOUT_WORK = 3
"""Multiple of `slot_seconds`, and number of cycles, without merged work after which a slot may be
taken."""
LONGEST_CYCLE = 60
"""A cycle counts at most this multiple of `slot_seconds`, because islands report its length."""
MOST_STARTS = 8
"""Maximum number of incarnations of a name that are heard at a time, in addition to the owners of
slots."""
MOST_OF_LOGIN = 64
"""Maximum number of incarnations of a login that are heard at a time, in addition to the owners of
slots."""


@dataclass
class Member:
    """An incarnation of an island, from its notes."""

    note: Note
    arrived: float
    heard: float  # when its counter last moved
    stepped: float  # when its step last moved


def most_listened(pause: float) -> float:
    """Return the maximum seconds that one poll counts. `pause`: usual seconds between two polls."""
    return max(MOST_LISTENED, pause)


class Presence:
    def __init__(self) -> None:
        self.listened = 0.0
        self.members: dict[str, Member] = {}  # by incarnation, in the order of their arrival
        self._polled: float | None = None

    def listen(self, now: float, pause: float = 0.0) -> None:
        """Count a poll in which the notes of all owners of slots were read, before they are heard.

        `pause`: usual seconds between two polls.
        """
        if self._polled is not None:
            self.listened += min(now - self._polled, most_listened(pause))
        self._polled = now

    def choose(self, names: Iterable[str], owners: Collection[str]) -> list[str]:
        """Return the names of the notes to read: those of owners of slots and of known
        incarnations, and as many others as may be heard, the first ones of each island."""
        heard = Counter[tuple[str, str]]()
        for known_incarnation in self.members:
            if known_incarnation not in owners and self.is_heard(known_incarnation):
                heard.update(_groups(known_incarnation))
        chosen = list[str]()
        for name in names:
            incarnation = incarnation_of(name)
            if incarnation is None:
                continue
            if incarnation not in owners and incarnation not in self.members:
                groups = _groups(incarnation)
                by_name, by_login = groups
                if heard[by_name] >= MOST_STARTS or heard[by_login] >= MOST_OF_LOGIN:
                    continue
                heard.update(groups)
            chosen.append(name)
        return chosen

    def hear(self, incarnation: str, note: Note, owners: Collection[str] = ()) -> bool:
        """Process a note, and return whether it is new, and its island may be heard."""
        member = self.members.get(incarnation)
        at = self.listened
        if member is None:
            if not self.choose([ISLAND + incarnation], owners):
                return False
            self.members[incarnation] = Member(note, arrived=at, heard=at, stepped=at)
            return True
        if note.counter <= member.note.counter:
            return False
        if note.step != member.note.step:
            member.stepped = at
        member.note = note
        member.heard = at
        return True

    def note_of(self, incarnation: str | None) -> Note | None:
        member = self.members.get(incarnation or "")
        return None if member is None else member.note

    def silence(self, incarnation: str) -> float:
        member = self.members.get(incarnation)
        return self.listened - (0.0 if member is None else member.heard)

    def is_silent(self, incarnation: str) -> bool:
        return self.silence(incarnation) > SILENT

    def is_heard(self, incarnation: str) -> bool:
        return incarnation in self.members and not self.is_silent(incarnation)

    def is_stepping(self, incarnation: str, grace: float) -> bool:
        """Return whether it is heard and completes steps. It may pause for its own grace period."""
        member = self.members.get(incarnation)
        if member is None or member.note.is_idle or not self.is_heard(incarnation):
            return False
        longest = max(SILENT, SLOW_STEP * member.note.step_seconds) + grace
        return self.listened - member.stepped <= longest

    def is_unknown(self, incarnation: str) -> bool:
        """Return whether an incarnation has no note, although all notes were read for long."""
        return incarnation not in self.members and self.listened > FORGOTTEN

    def see(self, owner: str) -> Seen:
        """Return what is known of an owner of a slot."""
        heard = round(min(1e6, self.silence(owner)), 1)
        member = self.members.get(owner)
        if member is None:  # since this syncer leads
            return Seen(heard=heard, still=heard)
        note = member.note
        gauges = member.note.read_gauges()
        return Seen(
            heard=heard,
            still=round(min(1e6, self.listened - member.stepped), 1),
            step=note.step,
            tokens=note.tokens,
            position=note.position,
            step_seconds=float(f"{note.step_seconds:.3g}"),
            vitals=gauges.vitals.rounded(),
            flags=IS_IDLE * note.is_idle | IS_SENDING * bool(note.sending),
            says=gauges.says,
        )

    def forgotten(self, decision: Decision) -> list[str]:
        """Return incarnations without a slot that are gone, and forget them."""
        owners = set(decision.owners())
        gone = [
            incarnation
            for incarnation in self.members
            if incarnation not in owners and self.silence(incarnation) > FORGOTTEN
        ]
        for incarnation in gone:
            del self.members[incarnation]
        for incarnation in list(decision.told):
            is_gone = incarnation not in self.members and incarnation not in owners
            if is_gone and self.listened > FORGOTTEN:
                del decision.told[incarnation]
        return gone


def _groups(incarnation: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("name", name_of(incarnation)), ("login", login_of(incarnation))


class Handover(NamedTuple):
    """A slot changes its owner."""

    slot: int
    before: str | None
    after: str | None


class Seats:
    """Gives the slots of a run to islands, and takes them."""

    def __init__(
        self, decision: Decision, presence: Presence, is_busy: Callable[[int], bool]
    ) -> None:
        """`is_busy`: whether a part of a slot waits. The owner of such a slot does not change,
        because its successor starts where the ledger ends once the part is decided."""
        self._decision = decision
        self._presence = presence
        self._is_busy = is_busy
        self._worked = dict[str, float]()
        """Time listened when a part of an owner was last merged, it got its slot, or the run
        began."""

    def begin_if_due(self) -> bool:
        """Begin the run once enough islands have slots. Missing work counts from then on."""
        decision = self._decision
        owners = self._decision.owners()
        if decision.begun or len(owners) < decision.settings.start_with:
            return False
        decision.begun = True
        self._worked = dict.fromkeys(owners, self._presence.listened)
        return True

    def note_merged(self, owner: str) -> None:
        self._worked[owner] = self._presence.listened

    def update(self, age: float) -> Iterator[Handover]:
        """Free and give slots."""
        decision = self._decision
        for number, slot in enumerate(decision.slots):
            owner = slot.owner
            if owner is None or self._is_busy(number):
                continue
            note = self._presence.note_of(owner)
            gives = note is not None and note.wish == GIVE
            if gives or decision.told.get(owner) == BARRED:
                self._release(slot, age)
                yield Handover(number, owner, None)
        self._tell_twins()
        for incarnation, member in self._presence.members.items():
            waits = member.note.wish == JOIN and self._presence.is_heard(incarnation)
            if not waits or incarnation in decision.told or incarnation in decision.owners():
                continue
            if name_of(incarnation) in decision.barred:
                decision.told[incarnation] = BARRED
                continue
            slot_number = self._find(incarnation, member.note)
            if slot_number is not None:
                before = self._give(slot_number, incarnation, member.note, age)
                yield Handover(slot_number, before, incarnation)

    def _release(self, slot: Slot, age: float) -> None:
        """Free a slot, and count the samples that its next owner reads again."""
        note = self._presence.note_of(slot.owner)
        if note is not None:
            settings = self._decision.settings
            most = max(most_samples(settings, ledger, age) for ledger in slot.ledgers)
            again = int(min(max(0, note.position - slot.furthest), most))
            slot.read_twice = min(slot.read_twice + again, FURTHEST)
        self._worked.pop(slot.owner or "", None)
        slot.owner = None

    def _starts(self, name: str) -> list[str]:
        """Return the incarnations of an island, starting with the one that counts."""
        owners = self._decision.owners()
        incarnations = dict.fromkeys((*self._presence.members, *owners))
        starts = [incarnation for incarnation in incarnations if name_of(incarnation) == name]
        return sorted(starts, key=lambda incarnation: incarnation not in owners)

    def _tell_twins(self) -> None:
        """Tell later incarnations of a name to end, while the counter of the first one increases.

        The last note of a killed incarnation may arrive after the first note of the next one.
        Therefore, an incarnation is only told if the counter of an earlier one has increased some
        seconds later.
        """
        members = self._presence.members
        told = self._decision.told
        for name in {name_of(incarnation) for incarnation in members}:
            first, *others = self._starts(name)
            for incarnation in others:
                is_over = told.get(first) in ENDS
                if first in members and not is_over and incarnation not in told:
                    lasts = members[first].heard - members[incarnation].arrived
                    if lasts > SILENT and self._presence.is_heard(incarnation):
                        told[incarnation] = RUNNING

    def _find(self, incarnation: str, note: Note) -> int | None:
        """Return the slot for an island that waits."""
        decision = self._decision
        slots = self._decision.slots
        name = name_of(incarnation)
        for number, slot in enumerate(slots):
            if slot.owner is not None and name_of(slot.owner) == name:
                if not self._presence.is_silent(slot.owner):
                    return None
                if slot.corpus in ("", note.corpus):
                    return None if self._is_busy(number) else number
        fitting = [number for number, slot in enumerate(slots) if slot.corpus in ("", note.corpus)]
        free = [number for number in fitting if slots[number].owner is None]
        if free:
            return free[0]
        if len(slots) < decision.settings.slots:
            return len(slots)
        idle = (
            number
            for number in fitting
            if self._is_replaceable(number) and not self._is_busy(number)
        )
        return next(idle, None)

    def _is_replaceable(self, number: int) -> bool:
        """Return whether another island may take a slot, because its owner is silent, or nothing of
        it is merged, for long."""
        settings = self._decision.settings
        slot = self._decision.slots[number]
        owner = slot.owner
        assert owner is not None
        if self._presence.silence(owner) > settings.slot_seconds:
            return True
        if not self._decision.begun:
            return False  # it waits for others, and cannot work
        note = self._presence.note_of(owner)
        step = 0.0 if note is None else note.step_seconds
        cycle = min(settings.sync_every * step, LONGEST_CYCLE * settings.slot_seconds)
        patience = WITHOUT_WORK * max(settings.slot_seconds, cycle)
        listened = self._presence.listened
        return listened - self._worked.setdefault(owner, listened) > patience

    def _give(self, number: int, incarnation: str, note: Note, age: float) -> str | None:
        """Give a slot to an island, and return its owner until now."""
        decision = self._decision
        if number == len(decision.slots):
            decision.slots.append(Slot([Ledger() for _ in decision.fragments]))
        slot = decision.slots[number]
        before = slot.owner
        is_restart = before is not None and name_of(before) == name_of(incarnation)
        if before is not None:
            if is_restart:  # otherwise, it may come back in another slot
                decision.told[before] = REPLACED
            self._release(slot, age)
        slot.owner = incarnation
        slot.corpus = note.corpus
        self._worked[incarnation] = self._presence.listened
        if not is_restart:
            for ledger in slot.ledgers:
                ledger.since = round(age, 2)  # it cannot have trained on more since
        return before
