"""Decisions of an island: when it sends, opens, closes, applies, waits and ends.

They follow from the state of the log, from what the island knows of itself and of the others, and
from its own monotonic clock, which is handed in as `now`. Nothing in here blocks or sends.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.log import Entry, Outcome, State
from torchtitan_diloco.islands.members import Members
from torchtitan_diloco.islands.records import Close, Done, End, Give, Open, Part, Refusal

LAGS = 8
"""Latest parts of a slot by which an island knows what they weigh and how long they take."""
PATIENCE = 1.5
"""Times the usual lag of a part for which a round stays open for it."""


@dataclass(frozen=True)
class Timing:
    schedule: Schedule
    quorum: int = 1
    """Parts that a round needs when its grace is over."""
    floor: float = 1.0
    """Least grace, in seconds."""

    @property
    def sync_every(self) -> int:
        """H."""
        return self.schedule.sync_every

    @property
    def delay(self) -> int:
        """tau."""
        return self.schedule.delay

    def first_send(self, fragment: int, late: bool) -> int:
        """Return the own step of the first send. Late, an island joins a run that has begun."""
        first = self.schedule.first_send(fragment)
        return (first - 1) % self.sync_every + 1 if late else first


class Mode(Enum):
    """How an entry changes the parameters theta, from the shared copies Theta around it."""

    MIX = "mix"
    """theta = alpha theta + (1 - alpha) Theta_new: the own part, in its own round and in time."""
    MIX_LATE = "mix late"
    """The same with an alpha of 1/2 at least: what was trained since the send must not be lost."""
    ADD = "add"
    """theta += Theta_new - Theta_old: the entry has no own part."""
    RESET = "reset"
    """theta = Theta_new: the own part was not finite."""


@dataclass
class Sync:
    """What an island knows of its own part in a fragment's rounds."""

    turn: int
    """Own step of the next send."""
    applied: int = 0
    """Version that the parameters contain."""
    unapplied: deque[Entry] = field(default_factory=deque)
    sent: Part | None = None
    sent_step: int = 0
    sent_at: float = 0.0
    under_way: bool = False
    """The last part sent has not come back in the log. Append it again after an interruption."""
    tokens_sent: int = 0
    """Own tokens when the last part was sent."""
    tokens_taken: int = 0
    """The same of the last part that an entry has taken: where the next weight begins."""
    attempt: tuple[int, int] = 0, 0
    """Version and own step of the last own opening."""
    opened_step: int = 0
    """Own step of the last opening. An own attempt counts from when it was made: counted from when
    it is read, each opening would be later in the cycle than the one before."""
    opened_at: float = 0.0
    disputed: bool = False
    """Another island has written another checksum. Nothing is written until the caller has checked
    the shared copy by a replay and resets this."""


class Island:
    """An island that owns a slot. `read` takes the records; the other methods decide."""

    def __init__(
        self,
        state: State,
        members: Members,
        slot: int,
        timing: Timing,
        *,
        now: float,
    ) -> None:
        """The parameters are the newest shared copies that the log makes."""
        owner = state.slots[slot].owner
        assert owner is not None
        assert state.facts is not None
        self.state, self.members, self.timing = state, members, timing
        self.slot, self.incarnation = slot, owner
        self.total_tokens = state.facts.total_tokens
        self._who: dict[str, Any] = {"run": state.facts.run, "slot": slot, "incarnation": owner}
        late = any(fragment.version for fragment in state.fragments)
        turns = [timing.first_send(number, late) for number in range(len(state.fragments))]
        self.syncs = [
            # Its first part may open a round.
            Sync(turn, fragment.version, opened_step=turn - timing.sync_every, opened_at=now)
            for turn, fragment in zip(turns, state.fragments, strict=True)
        ]
        self.step, self.tokens, self.step_seconds = 0, 0, 0.0
        self.position = state.slots[slot].start
        self.stopped = False
        """No more steps: the run has had its tokens, or the island leaves."""
        self.leaving = False
        self._lags = [deque[float](maxlen=LAGS) for _ in state.slots]
        """Seconds from the opening of a round until a slot's part could be used here."""
        self._weights = [[deque[int](maxlen=LAGS) for _ in state.slots] for _ in state.fragments]
        """Weights of the latest parts, by fragment and slot."""
        self._measured = [set[int]() for _ in state.fragments]
        """Waiting parts of each fragment whose lag is known."""
        self._clock_floor = 0
        newest = max(fragment.clock for fragment in state.fragments)
        self._clock_base = newest, 0, max(state.facts.begin, len(state.owners()))

    @property
    def fenced(self) -> bool:
        """Return whether another incarnation has the slot: end without writing anything."""
        return self.state.slots[self.slot].owner != self.incarnation

    @property
    def clock(self) -> int:
        """Return the tokens of the run so far, which the learning rate and the end follow."""
        merged, tokens, islands = self._clock_base
        return max(self._clock_floor, merged + (self.tokens - tokens) * islands)

    # --- what happens -----------------------------------------------------------------------------

    def finish_step(self, samples: int, weight: int, seconds: float) -> None:
        """`weight`: tokens, 0 if the step was skipped; `seconds`: usual time of a step."""
        self.step += 1
        self.position += samples
        self.tokens += weight
        self.step_seconds = seconds

    def read(self, sequence: int, subject: str, raw: bytes, now: float) -> Outcome:
        outcome = self.state.read(sequence, subject, raw)
        record = outcome.record
        if isinstance(record, Open | Part | Close) and record.fragment < len(self.syncs):
            sync = self.syncs[record.fragment]
            sync.disputed = sync.disputed or outcome.disputed
            if isinstance(record, Part) and not outcome.void:
                self._weights[record.fragment][record.slot].append(record.weight)
            if isinstance(record, Part) and sync.sent is not None:
                own = record.incarnation == self.incarnation
                returned = own and record.number == sync.sent.number
                sync.under_way = sync.under_way and not returned
            if isinstance(record, Open) and not outcome.void:
                version, step = sync.attempt
                sync.opened_step = step if version == record.version else self.step
                sync.opened_at = now
                early = sync.opened_step - sync.sent_step
                if self._is_pending(record.fragment) and 0 < early <= self.timing.sync_every // 2:
                    sync.turn += early  # sooner, the next part would wait for its opening, too
            if outcome.entry is not None:
                sync.unapplied.append(outcome.entry)
        return outcome

    def ready_slots(self, now: float) -> set[int]:
        """Return the slots whose parts a round waits for."""
        return {
            number
            for number, slot in enumerate(self.state.slots)
            if slot.owner is not None
            and not slot.done
            and (number == self.slot or self.members.is_ready(slot.owner, now, self.step_seconds))
        }

    # --- rounds -----------------------------------------------------------------------------------

    def send_is_due(self, fragment: int, now: float) -> bool:
        sync, shared = self.syncs[fragment], self.state.fragments[fragment]
        ledger = self.state.slots[self.slot].ledgers[fragment]
        pending = self._is_pending(fragment)
        # Before its last part is applied, the delta would contain that part once more.
        behind = sync.applied < ledger.merged_in
        has_data = self.position > ledger.taken_to
        if pending or behind or not has_data or not self._may_send(fragment):
            return False
        if self.leaving or (self.step >= sync.turn and self.clock <= self.total_tokens):
            return True
        if shared.open is None:
            return False
        grace_left = sync.opened_at + shared.open.grace - now
        return self.stopped or (sync.turn - self.step) * self.step_seconds > grace_left

    def send(self, fragment: int, checksum: str, now: float, *, finite: bool = True) -> Part:
        """Return the part to append when its chunks are stored. `checksum`: of the base version."""
        sync, ledger = self.syncs[fragment], self.state.slots[self.slot].ledgers[fragment]
        sync.sent = Part(
            **self._who,
            fragment=fragment,
            number=ledger.number + 1 if sync.sent is None else sync.sent.number + 1,
            base=sync.applied,
            checksum=checksum,
            start=ledger.taken_to,
            end=self.position,
            weight=self.tokens - sync.tokens_taken if finite else 0,
            finite=finite,
        )
        sync.turn = self.step + self.timing.sync_every
        sync.sent_step, sync.sent_at, sync.under_way = self.step, now, True
        sync.tokens_sent = self.tokens
        return sync.sent

    def open(self, fragment: int) -> Open | None:
        """Return an opening if it is time: H own steps after the last one, with a part to merge."""
        sync, shared = self.syncs[fragment], self.state.fragments[fragment]
        if shared.open is not None or not self._is_pending(fragment) or self._is_early(fragment):
            return None
        if self.clock > self.total_tokens or not self._may_send(fragment):
            return None
        version = shared.version + 1
        if sync.attempt[0] != version:
            sync.attempt = version, self.step
        return Open(**self._who, fragment=fragment, version=version, grace=self._grace())

    def close(
        self, fragment: int, checked: Mapping[int, str], lr: float, now: float
    ) -> Close | None:
        """Return a close if the round is open, and complete or its grace over.

        `checked`: waiting parts that this island has fetched, by sequence number, each with the
        reason why it cannot be used, empty if it can.
        """
        shared = self.state.fragments[fragment]
        self._measure_lags(fragment, checked, now)
        if shared.open is None or not self._may_write(fragment):
            return None
        good = [number for number in shared.waiting if checked.get(number) == ""]
        bad = [number for number in shared.waiting if checked.get(number)]
        ready, arrived = self.ready_slots(now), {part.slot for part in shared.waiting.values()}
        complete = ready <= arrived and len(good) + len(bad) == len(shared.waiting)
        patience = max(shared.open.grace, self._patience(ready))
        waited = now >= self.syncs[fragment].opened_at + patience
        # Right after an outage the others may still be on their way back: do not close alone.
        enough = waited and len(good) >= self.timing.quorum and not self.members.is_new(now)
        if not (good or bad) or not (complete or enough):
            return None
        refused = tuple(Refusal(number, checked[number]) for number in bad)
        refused_slots = {shared.waiting[number].slot for number in bad}
        lr *= self._share(fragment, good, ready - refused_slots)
        return self.state.build_close(fragment, (self.slot, self.incarnation), good, refused, lr)

    def _measure_lags(self, fragment: int, checked: Collection[int], now: float) -> None:
        """Note how long after the opening of their round new parts can be used."""
        sync, shared = self.syncs[fragment], self.state.fragments[fragment]
        opened, measured = shared.version + (shared.open is not None), self._measured[fragment]
        measured.intersection_update(shared.waiting)
        for number, part in shared.waiting.items():
            if number in checked and number not in measured and part.base < opened:
                lag = now - sync.opened_at if part.base + 1 == opened else math.inf
                self._lags[part.slot].append(lag)
                measured.add(number)

    def _patience(self, slots: Collection[int]) -> float:
        """Return how long a round stays open for the parts of these slots, if they are usual.

        Nothing waits meanwhile but the version. After half a cycle it would come too late for the
        next round, so a slot that takes longer is not waited for.
        """
        longest = self.timing.sync_every * self.step_seconds / 2
        known = (self._lags[slot] for slot in slots)
        usual = [PATIENCE * statistics.median(lags) if lags else longest for lags in known]
        return max((lag for lag in usual if lag <= longest), default=0.0)

    def _share(self, fragment: int, parts: Collection[int], ready: Collection[int]) -> float:
        """Return the weight of these parts as a share of what all ready islands send in a cycle.

        An entry of half of the islands takes half an outer step: those that come late take the
        other half. With whole steps, late islands would move the shared copy twice as far. The
        first part after an outage weighs as many cycles, so what a slot usually sends counts.
        """
        named = [self.state.fragments[fragment].waiting[number] for number in parts]
        missing = set(ready) - {part.slot for part in named}
        taken = sum(part.weight for part in named)
        known = (self._weights[fragment][slot] for slot in missing)
        weight = sum(statistics.median_low(weights) for weights in known if weights)
        return taken / (taken + weight) if taken and weight else 1.0

    def _is_pending(self, fragment: int) -> bool:
        """Return whether an own part is on its way or waiting."""
        waiting = self.state.fragments[fragment].waiting_of(self.slot)
        return self.syncs[fragment].under_way or waiting is not None

    def _is_early(self, fragment: int) -> bool:
        return self.step < self.syncs[fragment].opened_step + self.timing.sync_every

    def _grace(self) -> float:
        """Return the time from the opening to the own apply, or the floor."""
        return max(self.timing.floor, self.timing.delay * self.step_seconds)

    def _may_send(self, fragment: int) -> bool:
        return self._may_write(fragment) and not self.state.slots[self.slot].done

    def _may_write(self, fragment: int) -> bool:
        return not (self.fenced or self.state.ended or self.syncs[fragment].disputed)

    # --- entries ----------------------------------------------------------------------------------

    def next_mode(self, fragment: int) -> Mode | None:
        """Return how the first entry not yet applied is applied at this boundary; None: not yet."""
        sync = self.syncs[fragment]
        if not sync.unapplied:
            return None
        entry = sync.unapplied[0]
        part = entry.part_of(self.incarnation)
        if part is None:
            return Mode.ADD
        due = sync.sent_step + self.timing.delay
        own_round = part.base == entry.close.version - 1
        if own_round and self.step < due and not self.stopped:
            return None
        if not part.finite:
            return Mode.RESET
        return Mode.MIX if own_round and self.step <= due else Mode.MIX_LATE

    def finish_apply(self, fragment: int, now: float) -> None:
        """Count the first entry not yet applied as applied."""
        sync = self.syncs[fragment]
        entry = sync.unapplied.popleft()
        assert entry.close.version == sync.applied + 1
        sync.applied = entry.close.version
        tokens = self.tokens
        if entry.part_of(self.incarnation) is not None:
            tokens = sync.tokens_taken = sync.tokens_sent
        self._clock_floor = self.clock
        self._clock_base = entry.close.clock, tokens, len(self.ready_slots(now))

    def wait_until(self, fragment: int) -> float | None:
        """Return until when a training step waits for the entry that is due now, if it must."""
        sync, shared = self.syncs[fragment], self.state.fragments[fragment]
        due = sync.sent is not None and self.step == sync.sent_step + self.timing.delay
        pending = self._is_pending(fragment)
        if not due or not pending or not self.members.connected or self.stopped:
            return None
        if shared.open is None:
            # Nobody in step with this island opens a round before some more steps.
            return None if self._is_early(fragment) else sync.sent_at + self._grace()
        return sync.opened_at + shared.open.grace

    # --- end --------------------------------------------------------------------------------------

    def give(self, now: float) -> Give | None:
        """Return what a leaving island writes last, once all that it can send is in the log."""
        fragments = range(len(self.syncs))
        busy = any(self.syncs[one].under_way or self.send_is_due(one, now) for one in fragments)
        if not self.leaving or busy or self.fenced:
            return None
        return Give(**self._who)

    def done(self, now: float) -> Done | None:
        """Return the record that no more comes, once there is no round to take part in."""
        if self.fenced or not self.stopped or self.state.slots[self.slot].done or self.state.ended:
            return None
        for fragment, sync in enumerate(self.syncs):
            shared = self.state.fragments[fragment]
            open_round = shared.open is not None and bool(shared.waiting)
            if sync.under_way or sync.unapplied or open_round or self.send_is_due(fragment, now):
                return None
        return Done(**self._who)

    def end(self, now: float) -> End | None:
        """Return the end of the run, once all owners are done or gone."""
        if self.fenced or self.state.ended or not self.state.slots[self.slot].done:
            return None
        slots = self.state.slots
        absent = [slot.owner for slot in slots if slot.owner is not None and not slot.done]
        if not all(self.members.is_gone(owner, now) for owner in absent):
            return None
        heads = tuple(map(attrgetter("head"), self.state.fragments))
        return End(**self._who, absent=tuple(absent), heads=heads)
