"""Decisions of an island: when it sends, opens, closes, applies, waits and ends.

They depend on the state of the log, this island's steps, the other islands' heartbeats, and the
monotonic clock, which is passed as `now`. Nothing in this module blocks or sends.

`Island` decides for the whole island, `Rounds` (rounds.py) about each fragment. In a round, each
island sends a part (`send_is_due`). Any island opens the round (`open`), and any that has fetched
the parts closes it (`close`). The first valid close in the log counts. Each island applies the
version after reading the close (`next_mode`). Training continues while a round is open for late
parts. It waits only in `wait_until`, and at the end of the run (`look_at_end`).
"""

from collections.abc import Iterator
from typing import Any

from torchtitan_diloco.diloco.vitals import NOT_FINITE, OUTLIER, Action
from torchtitan_diloco.islands.actions import HUNG, Conduct, Seen, look_at, works
from torchtitan_diloco.islands.disputes import Disputes
from torchtitan_diloco.islands.ledger import Entry, Ledger, Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Habits, Members
from torchtitan_diloco.islands.records import (
    Close,
    Done,
    End,
    Evict,
    Facts,
    Give,
    Open,
    Part,
    Take,
    name_of,
)
from torchtitan_diloco.islands.rounds import Rounds, Timing


class Island:
    """An island that owns a slot. `read` takes records, and the other methods decide."""

    def __init__(
        self,
        state: State,
        members: Members,
        disputes: Disputes,
        slot: int,
        timing: Timing,
        *,
        now: float,
    ) -> None:
        """The parameters must be the newest shared copies of the log."""
        owner = state.slots[slot].owner
        assert owner is not None
        assert state.facts is not None
        self.state, self.members, self.disputes = state, members, disputes
        self.timing = timing
        self.slot, self.incarnation = slot, owner
        self.who: dict[str, Any] = {"run": state.facts.run, "slot": slot, "incarnation": owner}
        self.step, self.tokens, self.step_seconds = 0, 0, 0.0
        self.position = state.slots[slot].start
        self.stopped = False
        """No more steps for now: the run should have all its tokens, or the island leaves."""
        self.leaving = False
        self.habits = [Habits(len(state.fragments)) for _ in state.slots]  # by slot
        self.conduct: dict[str, Conduct] = {}  # of the others, by name
        self.flags: dict[str, int] = {}
        """Of the latest part of each owner, as far as this island may judge it."""
        self.actions = list[Action]()
        """What is new about them."""
        self._stopped_at, self._trains_until = 0.0, 0
        self._last_step: int | None = None
        self._clock_floor = 0
        newest = max(fragment.clock for fragment in state.fragments)
        self._clock_base = newest, 0, max(state.facts.begin, len(state.owners()))
        self.rounds = [Rounds(self, number, now) for number in range(len(state.fragments))]

    def change(self, timing: Timing) -> None:
        """Use other settings from now on."""
        added = len(self.state.slots) - len(self.habits)
        self.habits += [Habits(len(self.rounds)) for _ in range(added)]
        before, self.timing = self.timing.schedule.sync_every, timing
        for rounds in self.rounds if timing.schedule.sync_every != before else ():
            rounds.begin_cycle()

    @property
    def ledgers(self) -> list[Ledger]:
        return self.state.slots[self.slot].ledgers

    @property
    def facts(self) -> Facts:
        assert self.state.facts is not None
        return self.state.facts

    @property
    def fenced(self) -> bool:
        """Whether another incarnation has the slot. This one must end without writing."""
        return self.state.slots[self.slot].owner != self.incarnation

    @property
    def left(self) -> bool:
        """Whether this island has given its slot back."""
        return self.leaving and self.state.slots[self.slot].owner is None

    @property
    def done(self) -> bool:
        return self.state.slots[self.slot].done

    @property
    def may_train_on(self) -> bool:
        """Whether a stopped island has to find out if the run has merged its tokens."""
        return self.stopped and not (self.leaving or self.state.ended or self.state.is_complete)

    @property
    def clock(self) -> int:
        """Tokens of the run so far, which determine the learning rate and the end."""
        merged, tokens, islands = self._clock_base
        return max(self._clock_floor, merged + (self.tokens - tokens) * islands)

    def set_clock(self, merged: int, tokens: int, now: float) -> None:
        """Note that the run had merged `merged` tokens when this island had trained on `tokens`."""
        self._clock_floor = self.clock
        self._clock_base = merged, tokens, len(self.ready_slots(now))

    def finish_step(self, samples: int, weight: int, seconds: float) -> None:
        """`weight`: tokens, 0 if the step was skipped. `seconds`: usual time of a step."""
        self.step += 1
        self.position += samples
        self.tokens += weight
        self.step_seconds = seconds

    def look_at_end(self, now: float) -> None:
        """Stop training, or go on with it.

        The clock is an estimate: others may have died, or their parts may be lost. An island that
        has stopped sends what it has. If the run is short of tokens then, it trains for another
        cycle.

        If all its parts are left out, its clock never reaches the total, and the others would wait
        for it. So it also stops some cycles after the run has merged its tokens, which are enough
        to train on the rest alone.
        """
        if not self.state.is_complete:
            self._last_step = None  # the run may have been made longer
        elif self._last_step is None:
            cycles = self.facts.begin + 1
            self._last_step = self.step + cycles * self.timing.schedule.sync_every
        trained_enough = self._last_step is not None and self.step >= self._last_step
        if self.leaving or self.state.ended or self.done or trained_enough:
            self.stopped = True
        elif self.clock < self.facts.total_tokens:
            self.stopped = False
        elif not self.stopped:
            self.stopped = self.state.is_complete or self.step >= self._trains_until
            self._stopped_at = now
        elif not self.state.is_complete:
            busy = any(rounds.is_busy(now) for rounds in self.rounds)
            if not busy or now > self._stopped_at + 2 * self.members.expiry:
                self._trains_until = self.step + self.timing.schedule.sync_every
                self.stopped = False

    def read(self, sequence: int, raw: bytes, now: float) -> Outcome:
        outcome = self.state.read(sequence, raw)
        record = outcome.record
        if isinstance(record, Take) and not outcome.void:  # the new owner may have another link
            self.habits[record.slot] = Habits(len(self.rounds))
        elif isinstance(record, Open | Part | Close) and record.fragment < len(self.rounds):
            self.rounds[record.fragment].read(record, outcome, now)
        if outcome.entry is not None:
            self._note_flags(outcome.entry)
            if self.timing.action != "note":
                self._note_conduct(outcome.entry, now)
        return outcome

    def _note_flags(self, entry: Entry) -> None:
        for owner in self.state.owners().values():
            seen, part = look_at(entry, owner, self.incarnation), entry.part_of(owner)
            if part is not None and seen is not None:
                flag = OUTLIER if part.finite else NOT_FINITE
                self.flags[owner] = flag if seen is Seen.WRONG else 0

    def _note_conduct(self, entry: Entry, now: float) -> None:
        ready = set[int]() if self.members.is_new(now) else self.ready_slots(now)
        for slot, owner in self.state.owners().items():
            seen = look_at(entry, owner, self.incarnation)
            if slot == self.slot or seen is None or (seen is Seen.MISSING and slot not in ready):
                continue
            one = self.conduct.setdefault(name_of(owner), Conduct(len(self.rounds)))
            before = one.level
            if one.note(seen, entry.close.version):
                what = max(before, one.level)
                action = Action(name_of(owner), str(what), what.evidence, over=not one.level)
                self.actions.append(action)

    def awaited(self, ready: set[int]) -> set[int]:
        """Return those of the ready slots without whose parts no round closes early."""
        owners = self.state.owners()
        above = {name for name, one in self.conduct.items() if one.level}
        return {slot for slot in ready if slot == self.slot or name_of(owners[slot]) not in above}

    def votes(self, now: float) -> Iterator[Evict]:
        """Return votes to evict islands that are sick, and of which nothing was merged for long."""
        if self.timing.action != "evict":
            return
        for number, slot in enumerate(self.state.slots):
            owner, voted = slot.owner, self.incarnation in slot.votes
            if owner is None or slot.done or voted or number == self.slot:
                continue
            conduct = self.conduct.get(name_of(owner))
            reason = "has wrong numbers" if conduct is not None and conduct.is_wrong else ""
            if self.disputes.differs(owner):
                reason = "has other bits"
            elif self.members.hangs(owner, HUNG, now):
                reason = "makes no step"
            if reason and not works(slot, self.state.fragments):
                yield Evict(**self.who, target=owner, reason=reason)

    def ready_slots(self, now: float) -> set[int]:
        """Return the slots for whose parts a round waits."""
        return {
            number
            for number, slot in enumerate(self.state.slots)
            if slot.owner is not None
            and not slot.done
            and (number == self.slot or self.members.is_ready(slot.owner, now, self.step_seconds))
        }

    def last_record(self, now: float) -> Give | Done | End | None:
        """Return the last record of a stopped island once it has nothing left to send."""
        if self.fenced or self.state.ended or not self.stopped:
            return None
        if any(rounds.under_way or rounds.send_is_due(now) for rounds in self.rounds):
            return None
        if self.leaving:
            again = any(rounds.sends_again(now) for rounds in self.rounds)
            return None if again else Give(**self.who)
        if self.done:  # the run ends when all owners are done or gone
            absent = tuple(one.owner for one in self.state.slots if one.owner and not one.done)
            gone = all(self.members.is_silent(owner, now) for owner in absent)
            return End(**self.who, absent=absent, heads=self.state.heads) if gone else None
        busy = any(one.unapplied or (one.shared.open and one.shared.waiting) for one in self.rounds)
        return None if busy or not self.state.is_complete else Done(**self.who)
