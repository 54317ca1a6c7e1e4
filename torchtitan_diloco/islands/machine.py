"""One island without I/O: how it joins, what it appends, and what it does between two steps.

The leader's threads and the simulations of the tests use it in the same way. Pass every record to
`read`, in order. Append what `records` returns after each event. Between two steps, do what
`boundary` returns. The monotonic clock is passed as `now`.

In a round of a fragment (rounds.py), each island sends a part. Any island opens the round, and any
that has fetched the parts closes it. The first valid close in the log counts. Each island applies
the version after reading the close. Training continues while a round is open for late parts. It
waits only in `Rounds.wait_until`, and at the end of the run (`look_at_end`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.vitals import Action
from torchtitan_diloco.islands.actions import HUNG, Others
from torchtitan_diloco.islands.changes import DELAY, EVERY, settings_of
from torchtitan_diloco.islands.ledger import Boundary, Due, Entry, Outcome, Slot
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import (
    Habits,
    Hint,
    IslandFailedError,
    IslandFencedError,
    Members,
)
from torchtitan_diloco.islands.records import (
    AnyRecord,
    Change,
    Close,
    Done,
    End,
    Evict,
    Facts,
    Give,
    Open,
    Part,
    Record,
    Take,
    attempt_of,
    name_of,
)
from torchtitan_diloco.islands.rounds import Checked, Rounds, Timing

RETRY = 0.5
"""Seconds between attempts to append a record: only the log shows whether it is valid."""
AWAY = 10.0
"""Seconds without a connection after which a leaving island gives up sending its work."""


class Machine:
    slot: int
    """Number of the slot of this island, once it has joined."""
    own: Slot
    who: dict[str, Any]
    """Common fields of its records."""

    def __init__(
        self, incarnation: str, members: Members, timing: Timing, *, ranks: int = 1
    ) -> None:
        self.incarnation, self.members, self.timing = incarnation, members, timing
        self.ranks = ranks
        self.begin(State())
        self.joined = False
        """Whether the run has started and this island has a slot, so that it takes part in
        rounds."""
        self.rounds = list[Rounds]()  # by fragment
        self.habits = list[Habits]()  # by slot
        self.step, self.tokens, self.step_seconds = 0, 0, 0.0
        self.position = 0  # first sample that it has not read
        self.stopped = False
        """Whether training is stopped: the run should have all its tokens, or the island leaves."""
        self.leaving = False
        self.notices, self.news = list[str](), list[str]()
        """Warnings for the user, and islands that join and leave."""
        self.actions = list[Action]()
        """Actions about others, for the records of this island."""
        self._settings: dict[str, str] = {}
        self._attempts = dict[tuple[object, ...], float]()
        """Time at which each record was last appended."""
        self._stopped_at, self._trains_until = 0.0, 0
        self._last_step: int | None = None
        self._clock_floor, self._clock_base = 0, (0, 0, 1)

    def begin(self, state: State) -> None:
        """Read the log from this state on. By default, it is before the first record."""
        self.state = state
        self.others = Others(state, self.members, self.incarnation, self.timing.action)

    def _join(self, slot: int, now: float) -> None:
        """Start to take part. The parameters are the newest shared copies of the log."""
        state = self.state
        self.slot, self.own, self.position = slot, state.slots[slot], state.slots[slot].start
        self.who = {"run": state.run, "slot": slot, "incarnation": self.incarnation}
        self._use_facts()
        newest = max(fragment.clock for fragment in state.fragments)
        self._clock_base = newest, 0, max(self.facts.begin, len(state.owners()))
        self.rounds = [Rounds(self, number, now) for number in range(len(state.fragments))]
        self.joined = True

    def _use_facts(self) -> None:
        """Use the settings of the run, which may differ from those of this island."""
        self._settings, schedule = settings_of(self.facts), self.timing.schedule
        every = int(self._settings.get(EVERY, schedule.sync_every))
        delay = int(self._settings.get(DELAY, schedule.delay))
        changed = replace(schedule, sync_every=every, delay=delay)
        self.timing = replace(self.timing, schedule=changed)
        added = len(self.state.slots) - len(self.habits)
        self.habits += [Habits(len(self.state.fragments)) for _ in range(added)]
        for rounds in self.rounds if schedule.sync_every != every else ():
            rounds.begin_cycle()

    @property
    def facts(self) -> Facts:
        assert self.state.facts is not None
        return self.state.facts

    @property
    def fenced(self) -> bool:
        """Whether another incarnation has the slot. This one must end without writing."""
        return self.own.owner != self.incarnation

    @property
    def left(self) -> bool:
        """Whether this island has given its slot back."""
        return self.joined and self.leaving and self.own.owner is None

    @property
    def clock(self) -> int:
        """Tokens of the run so far, which determine the learning rate and the end."""
        merged, tokens, islands = self._clock_base
        return max(self._clock_floor, merged + (self.tokens - tokens) * islands)

    def set_clock(self, merged: int, tokens: int, now: float) -> None:
        """Note that the run had merged `merged` tokens when this island had trained on `tokens`."""
        self._clock_floor = self.clock
        self._clock_base = merged, tokens, len(self.ready_slots(now))

    def ready_slots(self, now: float) -> set[int]:
        """Return the slots for whose parts a round waits."""
        return {
            number
            for number, slot in enumerate(self.state.slots)
            if slot.owner is not None
            and not slot.done
            and (number == self.slot or self.members.is_ready(slot.owner, now, self.step_seconds))
        }

    # --- the log ----------------------------------------------------------------------------------

    def read(self, sequence: int, raw: bytes, now: float) -> Outcome:
        self.members.tick(now)
        outcome = self.state.read(sequence, raw)
        record = outcome.record
        if self.joined and record is not None:
            if isinstance(record, Open | Part | Close) and record.fragment < len(self.rounds):
                self.rounds[record.fragment].read(record, outcome, now)
            if not outcome.void:
                self._note(record, outcome.entry, now)
        return outcome

    def _note(self, record: AnyRecord, entry: Entry | None, now: float) -> None:
        """Note a valid record."""
        is_other = isinstance(record, Take | Give) and record.incarnation != self.incarnation
        match record:
            case Take():
                # The new owner may have another link.
                self.habits[record.slot] = Habits(len(self.rounds))
                if is_other:
                    self.news.append(f"island {name_of(record.incarnation)} joins")
            case Give() if is_other:
                self.news.append(f"island {name_of(record.incarnation)} leaves")
            case Change():
                self.news.append(f"the run continues with {record.key} = {record.value}")
                self._use_facts()
        if entry is not None:
            self.notices += entry.left_out()
        is_known = entry is not None and not self.members.is_new(now)
        ready = self.ready_slots(now) if is_known else set[int]()
        for action in self.others.note(record, entry, ready):
            (self.news if action.over else self.notices).append(f"island {action}")
            self.actions.append(action)

    def records(self, checked: Mapping[int, Checked], now: float) -> list[Record]:
        """Return the records to append now.

        `checked`: results of this island's check of the waiting parts, by sequence number. Raises
        an IslandFencedError if another island has the slot.
        """
        self.members.tick(now)
        if self.joined:
            silent, heard = self.members.changes(self.state, self.incarnation, now)
            self.notices += [f"island {one} is silent: rounds do not wait for it" for one in silent]
            self.news += [f"island {one} sends heartbeats again" for one in heard]
        due = self._decisions(checked, now) if self.joined else [self._take(now)]
        self._attempts = {key: at for key, at in self._attempts.items() if now < at + RETRY}
        found = list[Record]()
        for record in due:
            if record is not None and (key := attempt_of(record)) not in self._attempts:
                self._attempts[key] = now
                found.append(record)
        return found

    def _take(self, now: float) -> Take | None:
        """Return the record that takes a free slot, or the slot of an earlier process of this
        island. Join once the run has started."""
        state = self.state
        mine = [slot for slot, owner in state.owners().items() if owner == self.incarnation]
        if mine or state.facts is None:
            if state.begun and mine:
                self._join(mine[0], now)
            return None
        if state.ended:
            raise UserError(
                "the run has ended, and its model is in the folders of its islands: "
                "to start another run, run `serve` with a new folder"
            )
        if self.incarnation in state.incarnations:
            raise IslandFencedError("the slot of this island was taken before the run started")
        free = self.members.slot_to_take(state, self.incarnation, now)
        if free is None:
            return None
        slot, replaces = free
        who = self.incarnation
        return Take(run=state.facts.run, incarnation=who, slot=slot, replaces=replaces)

    def _decisions(self, checked: Mapping[int, Checked], now: float) -> Iterator[Record | None]:
        self.notices += self.others.disputes.settle(now)
        if self.left or (self.state.ended and not self.fenced):
            return
        if self.incarnation in self.state.evicted and not self.state.ended:
            raise IslandFailedError(
                "the others have evicted this island, because its numbers were wrong "
                "or it completed no step: check its memory and machine. When it is "
                "restarted, it takes their copies, and waits before it joins"
            )
        if self.fenced:
            raise IslandFencedError(
                f"slot {self.slot} of this island was taken by {self.own.owner}: "
                "this island ends, and the run does not contain its work since its "
                "last part"
            )
        for rounds in self.rounds:
            yield rounds.open()
            yield rounds.close(checked, self.facts.outer_lr, now)
            if rounds.under_way and rounds.is_stored:
                yield rounds.sent
        for target, reason in self.others.to_evict(now):
            yield Evict(**self.who, target=target, reason=reason)
        yield self.last_record(now)

    def store(self, part: Part) -> None:
        """Record that the chunks of a part of this island are stored, so that it can be
        appended."""
        rounds = self.rounds[part.fragment]
        rounds.sent, rounds.is_stored = part, True

    def hint(self, *, caught_up: bool) -> Hint:
        """Return the heartbeat. `caught_up`: whether this island has caught up with the log."""
        known = [(one.version, one.checksums.get(one.version)) for one in self.state.fragments]
        copies = tuple((version, checksum) for version, checksum in known if checksum)
        return Hint(
            self.incarnation,
            step=self.step,
            tokens=self.tokens,
            step_seconds=self.step_seconds,
            caught_up=caught_up,
            leaving=self.leaving,
            copies=copies if len(copies) == len(known) else (),
        )

    # --- between two steps ------------------------------------------------------------------------

    def finish_step(
        self, samples: int, weight: int, seconds: float, *, leaving: bool = False
    ) -> None:
        """Count a step. `weight`: its tokens, 0 if it was skipped. `seconds`: usual time of a
        step."""
        self.step += 1
        self.position += samples
        self.tokens += weight
        self.step_seconds, self.leaving = seconds, leaving

    def stop(self) -> None:
        """Stop training. Before the end of the run, leave it."""
        self.leaving = self.leaving or not self.stopped or self.may_train_on
        self.stopped = True

    def boundary(self, now: float, away: float = 0.0) -> Boundary:
        """Return the next action. `away`: seconds without a connection.

        Without a delay, deltas are taken before waiting for their results.
        """
        delayed = self.timing.schedule.delay > 0
        self.look_at_end(now)
        sent = [] if delayed else self._sends(now)
        applied, until = ([], now) if sent else self._applies(now)
        if delayed and until is None:
            sent = self._sends(now)
        return Boundary(
            clock=self.clock,
            stopped=self.stopped,
            may_train_on=self.may_train_on,
            leaving=self.leaving,
            over=self.stopped and until is None and self._is_over(away),
            applied=applied,
            sent=sent,
            waits_until=until,
            settings=self._settings,
        )

    def _applies(self, now: float) -> tuple[list[Due], float | None]:
        """Return the versions to apply, and the time until which training waits for more."""
        applied, limits = list[Due](), list[float]()
        for rounds in self.rounds:
            while (due := rounds.take_due(now)) is not None:
                applied.append(due)
            limit = rounds.wait_until()
            if limit is not None and now < limit:
                limits.append(limit)
        return applied, min(limits, default=None)

    def _sends(self, now: float) -> list[Part]:
        return [rounds.send(now) for rounds in self.rounds if rounds.send_is_due(now)]

    # --- the end ----------------------------------------------------------------------------------

    @property
    def may_train_on(self) -> bool:
        """Whether a stopped island has to find out whether the run has merged its tokens."""
        return self.stopped and not (self.leaving or self.state.ended or self.state.is_complete)

    def look_at_end(self, now: float) -> None:
        """Stop training, or continue it.

        The clock is an estimate: others may have died, or their parts may be lost. An island that
        has stopped sends all its work. If the run then still lacks tokens, the island trains for
        another cycle.

        If all its parts are left out, its clock never reaches the total, and the others would wait
        for it. Therefore, it also stops several cycles after the run has merged its tokens, which
        are enough to train on the rest alone.
        """
        if not self.state.is_complete:
            self._last_step = None  # the run may have been made longer
        elif self._last_step is None:
            cycles = self.facts.begin + 1
            self._last_step = self.step + cycles * self.timing.schedule.sync_every
        trained_enough = self._last_step is not None and self.step >= self._last_step
        if self.leaving or self.state.ended or self.own.done or trained_enough:
            self.stopped = True
        elif self.clock < self.facts.total_tokens:
            self.stopped = False
        elif not self.stopped:
            self.stopped = self.state.is_complete or self.step >= self._trains_until
            self._stopped_at = now
        elif not self.state.is_complete:
            busy = any(
                rounds.is_pending or rounds.unapplied or rounds.send_is_due(now)
                for rounds in self.rounds
            )
            if not busy or now > self._stopped_at + 2 * self.members.expiry:
                self._trains_until = self.step + self.timing.schedule.sync_every
                self.stopped = False

    def last_record(self, now: float) -> Give | Done | End | None:
        """Return the last record of a stopped island once it has nothing left to send."""
        if not self.stopped:
            return None
        if any(rounds.under_way or rounds.send_is_due(now) for rounds in self.rounds):
            return None
        if self.leaving:
            again = any(rounds.sends_again(now) for rounds in self.rounds)
            return None if again else Give(**self.who)
        if self.own.done:  # the run ends when all owners are done or gone
            absent = tuple(one.owner for one in self.state.slots if one.owner and not one.done)
            heard = (one for one in absent if not self.members.is_silent(one, now))
            gone = all(self.members.hangs(owner, HUNG, now) for owner in heard)
            return End(**self.who, absent=absent, heads=self.state.heads) if gone else None
        busy = any(one.unapplied or (one.shared.open and one.shared.waiting) for one in self.rounds)
        return None if busy or not self.state.is_complete else Done(**self.who)

    def _is_over(self, away: float) -> bool:
        """Return whether a stopped island has nothing left to do."""
        if any(rounds.unapplied for rounds in self.rounds):
            return False
        if self.leaving and away > AWAY:
            self.notices.append(
                "left without a connection: the work since the last part was not "
                "sent, and the next owner of the slot reads its samples again"
            )
            return True
        return self.state.ended or self.left
