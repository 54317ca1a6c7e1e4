"""When the round of a fragment opens and closes, and which parts it merges."""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchtitan_diloco.islands.rules.decision import Decision, Fate, SharedFragment
from torchtitan_diloco.islands.rules.ledger import judge
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.presence import Presence
from torchtitan_diloco.islands.rules.settings import Settings

PACE = 0.9
"""Share of H steps that the pacing island completes from one opening to the next."""
SECOND_PACES = 3
"""Number of islands from which on the second fastest one sets the pace."""
HEADROOM = 100.0
"""Multiple of the speed of the islands to which `fastest` is set."""
FASTEST = 1e9
"""Maximum value of `fastest`."""
VERSIONS_JUDGED_BY = 5
"""Number of latest versions whose median norm is the usual one. It is unknown before as many."""
IMPLAUSIBLE_RMS = 1e4
"""Root mean square of the values of a part from which on it is wrong, whatever is usual: far above
what learning rates in use move parameters in a cycle."""
USUAL = 4
"""Number of latest parts of an island that determine its usual weight."""


def pacing(fastest_first: Sequence[float]) -> float:
    """Return the value that counts among several islands: with three or more the second, so that a
    single one with wrong reports cannot set the pace. Of two, one can, up to `fastest`."""
    return fastest_first[1 if len(fastest_first) >= SECOND_PACES else 0]


class Speeds:
    """Measures how fast islands are, to limit what a part may contain."""

    def __init__(self) -> None:
        self._merged_at = dict[tuple[str, int], float]()  # by incarnation and fragment
        self._speeds = dict[str, float]()  # samples per second, by incarnation

    def measure(self, incarnation: str, part: Part, now: float) -> None:
        """Learn from a merged part. The time since the one before it counts, and none before that:
        a first part comes after a start of the run, or of the islands, that may have taken long."""
        key = incarnation, part.fragment
        before = self._merged_at.get(key)
        self._merged_at[key] = now
        if before is not None:
            speed = (part.end - part.start) / max(1.0, now - before)
            self._speeds[incarnation] = max(self._speeds.get(incarnation, 0.0), speed)

    def forget(self, gone: Collection[str]) -> None:
        """Forget incarnations that are gone."""
        self._merged_at = {key: at for key, at in self._merged_at.items() if key[0] not in gone}
        self._speeds = {name: speed for name, speed in self._speeds.items() if name not in gone}

    def limit(self, settings: Settings, owners: Sequence[str]) -> Settings:
        """Return the settings with `fastest`, if it was unknown, and enough owners are measured."""
        speeds = [self._speeds[owner] for owner in owners if owner in self._speeds]
        if settings.fastest or len(speeds) < min(SECOND_PACES, max(1, len(owners))):
            return settings
        speed = HEADROOM * pacing(sorted(speeds, reverse=True))
        return msgspec.structs.replace(settings, fastest=float(f"{min(FASTEST, speed):.3g}"))


@dataclass
class WaitingPart:
    """A valid part that is not in a version yet."""

    incarnation: str
    slot: int
    part: Part
    is_fetched: bool = False
    """Whether its bytes are fetched and checked."""
    norm: float = 0.0
    """Norm of its values, known once they are merged."""


def find_outliers(
    norms: Mapping[int, float], usual: float, limit: float, *, alone: bool
) -> set[int]:
    """Return the parts whose norm exceeds `limit` times the usual one.

    `usual`: norm of those merged before. If it is unknown (0), a part is compared with the others
    of its round, of which there must be at least two: of only two parts, it is unknown which is
    right. If several parts exceed what is usual and none does not, they have a common cause, such
    as a higher learning rate, and count. `alone`: whether no other island is ready.
    """
    outliers = set[int]()
    for key, norm in norms.items():
        others = [other for number, other in norms.items() if number != key]
        usual_norm = usual or (statistics.median(others) if len(others) > 1 else 0.0)
        if usual_norm and norm > limit * usual_norm:
            outliers.add(key)
    is_common = len(outliers) == len(norms) and (alone or len(norms) > 1)
    return set() if is_common else outliers


@dataclass
class Round:
    """The rounds of one fragment, in the memory of the leading syncer.

    A successor starts without them: it reads the notes again, and opens a round at once.
    """

    decision: Decision
    presence: Presence
    fragment: int
    waiting: dict[int, WaitingPart] = field(default_factory=dict)
    """Parts that wait, by slot."""
    merging: list[WaitingPart] = field(default_factory=list)
    """Parts of the version that is being computed, in the order of slots."""
    weight_of_all: int = 0
    """Weight of these parts, and usual weight of the ready islands without one."""
    opened_at: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    """Steps of each island at the last opening."""
    hurried: set[int] = field(default_factory=set)
    """Slots whose part has opened a round before its time, since the last one that came in time."""
    hurried_again: set[str] = field(default_factory=set)
    """Islands that have stopped, and whose part has opened a second such round."""
    began: dict[str, int] = field(default_factory=dict)
    """Version at which an island got its slot, or was first seen in it."""
    weights: dict[str, deque[int]] = field(default_factory=dict)
    """Weights of the latest merged parts of each island."""

    @property
    def shared(self) -> SharedFragment:
        return self.decision.fragments[self.fragment]

    def find(self, incarnation: str, part: Part) -> WaitingPart | None:
        """Return a part that waits, or None if it does not any more."""
        waiting_parts = self.waiting.values()
        return next(
            (
                waiting_part
                for waiting_part in waiting_parts
                if waiting_part.incarnation == incarnation and waiting_part.part == part
            ),
            None,
        )

    def is_busy(self, slot: int) -> bool:
        return slot in self.waiting or slot in {merged.slot for merged in self.merging}

    def forget(self, gone: Collection[str]) -> None:
        """Forget incarnations that are gone."""
        self.hurried_again -= set(gone)
        by_incarnation: tuple[dict[str, Any], ...] = (self.steps, self.began, self.weights)
        for values in by_incarnation:
            for incarnation in gone:
                values.pop(incarnation, None)

    # --- who is waited for ------------------------------------------------------------------------

    def ready(self) -> dict[int, str]:
        """Return the slots, with their owners, for whose parts the round waits.

        Their islands are heard, complete steps or upload, and had a part in one of the last two
        versions or are new. An island that never delivers therefore delays only two rounds by their
        grace period.
        """
        grace = self.grace
        owners = dict[int, str]()
        for number, slot in enumerate(self.decision.slots):
            owner = slot.owner
            if owner is None or owner in self.decision.told:
                continue
            since = self.began.setdefault(owner, self.shared.version)
            had_part = max(since, slot.ledgers[self.fragment].version) >= self.shared.version - 1
            note = self.presence.note_of(owner)
            uploads = note is not None and self.fragment in note.sending
            uploads = uploads and self.presence.is_heard(owner)
            if had_part and (uploads or self.presence.is_stepping(owner, grace)):
                owners[number] = owner
        return owners

    @property
    def grace(self) -> float:
        """Seconds for which an open round waits: the setting, or tau steps of the pacing island."""
        settings = self.decision.settings
        notes = (self.presence.note_of(owner) for owner in self.decision.owners())
        steps = sorted(note.step_seconds for note in notes if note and note.step_seconds > 0)
        step = pacing(steps) if steps else 0.0
        return max(settings.grace, settings.delay * step)

    # --- open -------------------------------------------------------------------------------------

    def open_if_due(self, now: float) -> bool:
        """Open a round if it is due, and return whether it does."""
        if self.shared.is_open or self.merging or not self.waiting or not self._is_paced():
            return False
        self.shared.is_open = True
        self.opened_at = now
        delay = self.decision.settings.delay
        for number, slot in enumerate(self.decision.slots):
            note = self.presence.note_of(slot.owner)
            if slot.owner is not None and note is not None:
                # Who has a part in has sent it up to tau steps ago. Counted from now, each round
                # would open as late after its parts as the latest one before.
                self.steps[slot.owner] = note.step - delay * (number in self.waiting)
        return True

    def _is_paced(self) -> bool:
        """Return whether the pacing island has completed nearly H steps since the last opening.

        A late part does not open a round, which would make the others send early repeatedly. The
        part of an island that has stopped, leaves or is absent does, as it waits for nothing else:
        once per slot until the next round in time, unless no island trains. Otherwise, an island
        could close rounds as fast as it sends samples. One that has stopped does so a second time,
        but only once: if its last part was late, it leaves with what it has trained since. All
        owners that complete steps set the pace, and not only those that are ready: who is late does
        not become the only one that counts.
        """
        senders = {slot: waiting_part.incarnation for slot, waiting_part in self.waiting.items()}
        stopped = {slot for slot, sender in senders.items() if not self._steps(sender)}
        training = [owner for owner in self.decision.owners() if self._steps(owner)]
        first = stopped - self.hurried
        again = {senders[slot] for slot in stopped - first if self._may_hurry_again(senders[slot])}
        if first or again or (stopped and not training):
            self.hurried |= stopped
            self.hurried_again |= again
            return True
        steps_made = list[float]()
        for owner in training or senders.values():
            note = self.presence.note_of(owner)
            assert note is not None
            steps_made.append(note.step - self.steps.get(owner, -self.decision.settings.sync_every))
        fewest = PACE * self.decision.settings.sync_every
        is_due = pacing(sorted(steps_made, reverse=True)) >= fewest
        if is_due:
            self.hurried = set()
        return is_due

    def _may_hurry_again(self, sender: str) -> bool:
        note = self.presence.note_of(sender)
        return note is not None and note.is_idle and sender not in self.hurried_again

    def _steps(self, owner: str) -> bool:
        return self.presence.is_stepping(owner, self.grace)

    # --- close ------------------------------------------------------------------------------------

    def drop_refused(self, age: float) -> list[tuple[WaitingPart, Fate]]:
        """Judge the waiting parts again, because the fragment may have changed, and drop the
        others."""
        refused = list[tuple[WaitingPart, Fate]]()
        for slot, waiting_part in list(self.waiting.items()):
            fate = judge(self.decision, slot, waiting_part.part, age)
            if fate is not Fate.NONE:
                del self.waiting[slot]
                refused.append((waiting_part, fate))
        return refused

    def close_if_due(self, now: float) -> bool:
        """Close the round if it is due, and return whether there are parts to merge.

        A round closes when all ready islands have sent a part, or when its grace period is over and
        one has. It also takes late parts of earlier rounds. The outer learning rate is scaled by
        the weight of the parts over the weight of all, which includes the usual weight of the ready
        islands without a part. Otherwise, two halves of a round would move the copy twice as far.
        """
        if not self.shared.is_open:
            return False
        if not self.waiting:
            self.shared.is_open = False
            return False
        in_order = [waiting_part for _, waiting_part in sorted(self.waiting.items())]
        parts = [waiting_part for waiting_part in in_order if waiting_part.is_fetched]
        missing = self.ready().keys() - {waiting_part.slot for waiting_part in parts}
        is_fetching = len(parts) < len(self.waiting)
        is_over = now >= self.opened_at + self.grace
        if not parts or ((missing or is_fetching) and not is_over):
            return False
        self.shared.is_open = False
        self.merging = parts
        for waiting_part in parts:
            del self.waiting[waiting_part.slot]
        total = sum(waiting_part.part.weight for waiting_part in parts)
        usual = [self._usual_weight(slot, total // len(parts)) for slot in missing]
        self.weight_of_all = total + sum(usual)
        return True

    def _usual_weight(self, slot: int, default: int) -> int:
        owner = self.decision.slots[slot].owner or ""
        weights = self.weights.get(owner)
        return statistics.median_low(weights) if weights else default

    def judge_norms(self, norms: Sequence[float]) -> list[tuple[WaitingPart, Fate]]:
        """Process the norms of the parts that were merged, and drop those that must not count. The
        others have to be merged again then, which is rare: so no part is decoded twice."""
        for waiting_part, norm in zip(self.merging, norms, strict=True):
            waiting_part.norm = norm
        refused = [
            (waiting_part, Fate.NOT_FINITE)
            for waiting_part in self.merging
            if not math.isfinite(waiting_part.norm)
        ]
        self._leave_out(refused)
        for find in (self._find_implausible, self._find_outliers):
            slots = find()
            lost = [
                (waiting_part, Fate.OUTLIER)
                for waiting_part in self.merging
                if waiting_part.slot in slots
            ]
            self._leave_out(lost)
            refused += lost
        return refused

    def _leave_out(self, refused: Sequence[tuple[WaitingPart, Fate]]) -> None:
        for waiting_part, _ in refused:
            self.merging.remove(waiting_part)
            self.weight_of_all -= waiting_part.part.weight

    def _find_implausible(self) -> set[int]:
        """Return the slots whose parts are wrong even if the usual norm is unknown and no other
        island says otherwise."""
        if not self.decision.settings.norm_limit:
            return set()
        most = IMPLAUSIBLE_RMS * math.sqrt(self.shared.elements)
        return {waiting_part.slot for waiting_part in self.merging if waiting_part.norm > most}

    def _find_outliers(self) -> set[int]:
        """Return the slots whose parts are outliers.

        A part after an outage contains the work of many cycles, so its norm counts in units of the
        usual weight of its island.
        """
        limit = self.decision.settings.norm_limit
        if not limit:
            return set()
        norms = {
            waiting_part.slot: self._norm_of_cycle(waiting_part) for waiting_part in self.merging
        }
        is_known = len(self.shared.norms) >= VERSIONS_JUDGED_BY
        usual = statistics.median(self.shared.norms) if is_known else 0.0
        alone = self.ready().keys() <= norms.keys() and len(norms) == 1
        return find_outliers(norms, usual, limit, alone=alone)

    def _norm_of_cycle(self, waiting_part: WaitingPart) -> float:
        """Return the norm of a part, or of its share that corresponds to one cycle."""
        usual = self._usual_weight(waiting_part.slot, waiting_part.part.weight)
        return waiting_part.norm / max(1.0, waiting_part.part.weight / max(1, usual))

    def note_merged(self) -> None:
        """Learn from the parts of the new version.

        Of the norms, the median counts, and then that of several versions, each with parts of
        several islands if there are several: an island that sends very small parts must not make
        those of the others outliers, while they are away or not.
        """
        norms = list[float]()
        for waiting_part in self.merging:
            weights = self.weights.setdefault(waiting_part.incarnation, deque(maxlen=USUAL))
            weights.append(waiting_part.part.weight)
            norms.append(self._norm_of_cycle(waiting_part))
        if len(norms) >= min(2, len(self.decision.owners())) > 0:
            median = float(f"{statistics.median(norms):.3g}")
            self.shared.norms = [*self.shared.norms, median][-VERSIONS_JUDGED_BY:]
        self.merging = []
