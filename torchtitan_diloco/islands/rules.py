"""Decisions of an island: when it sends, opens, closes, applies, waits and ends.

They depend on the state of the log, this island's steps, the other islands' heartbeats, and the
monotonic clock, which is passed as `now`. Nothing in this module blocks or sends.

In a round of a fragment, each island sends a part (`send_is_due`). Any island opens the round
(`open`), and any that has fetched the parts closes it (`close`). The first valid close in the log
counts. Each island applies the version after reading the close (`next_mode`). Training continues
while a round is open for late parts. It waits only in `wait_until`.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.log import Entry, Fragment, Ledger, Outcome, State
from torchtitan_diloco.islands.members import Habits, IslandFailedError, Members, name_of
from torchtitan_diloco.islands.records import Close, Done, End, Give, Open, Part, Refusal, Take


@dataclass(frozen=True)
class Timing:
    schedule: Schedule
    quorum: int = 1
    """Parts that a round needs after its grace."""
    floor: float = 1.0
    """Minimum grace, in seconds."""


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


class Island:
    """An island that owns a slot. `read` takes records, and the other methods decide."""

    def __init__(
        self, state: State, members: Members, slot: int, timing: Timing, *, now: float
    ) -> None:
        """The parameters must be the newest shared copies of the log."""
        owner = state.slots[slot].owner
        assert owner is not None
        assert state.facts is not None
        self.state, self.members, self.timing = state, members, timing
        self.slot, self.incarnation = slot, owner
        self.total_tokens = state.facts.total_tokens
        self.who: dict[str, Any] = {"run": state.facts.run, "slot": slot, "incarnation": owner}
        self.step, self.tokens, self.step_seconds = 0, 0, 0.0
        self.position = state.slots[slot].start
        self.stopped = False
        """No more steps: the run has all its tokens, or the island leaves."""
        self.leaving = False
        self.habits = [Habits(len(state.fragments)) for _ in state.slots]  # by slot
        self._clock_floor = 0
        newest = max(fragment.clock for fragment in state.fragments)
        self._clock_base = newest, 0, max(state.facts.begin, len(state.owners()))
        self.rounds = [Rounds(self, number, now) for number in range(len(state.fragments))]

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

    def read(self, sequence: int, raw: bytes, now: float) -> Outcome:
        outcome = self.state.read(sequence, raw)
        record = outcome.record
        if isinstance(record, Take) and not outcome.void:  # the new owner may have another link
            self.habits[record.slot] = Habits(len(self.rounds))
        elif isinstance(record, Open | Part | Close) and record.fragment < len(self.rounds):
            self.rounds[record.fragment].read(record, outcome, now)
        return outcome

    def ready_slots(self, now: float) -> set[int]:
        """Return the slots for whose parts a round waits."""
        return {
            number
            for number, slot in enumerate(self.state.slots)
            if slot.owner is not None
            and not slot.done
            and (number == self.slot or self.members.is_ready(slot.owner, now, self.step_seconds))
        }

    def settle_disputes(self, now: float) -> Iterator[str]:
        """Yield the disputes in which another island has confirmed this one's bits.

        Raises an IslandFailedError if none has within `expiry` seconds.
        """
        for rounds in self.rounds:
            if rounds.dispute is None:
                continue
            version, since, text = rounds.dispute
            if rounds.confirmed >= version:
                rounds.dispute = None
                yield text
            elif now > since + self.members.expiry:
                raise IslandFailedError(
                    f"{text}; no island has confirmed those of this one, so it ends: one of them "
                    "has a memory fault, or computes differently. Started again, it replays the log"
                )

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
            gone = all(self.members.is_gone(owner, now) for owner in absent)
            return End(**self.who, absent=absent, heads=self.state.heads) if gone else None
        busy = any(one.unapplied or (one.shared.open and one.shared.waiting) for one in self.rounds)
        return None if busy else Done(**self.who)


class Rounds:
    """Rounds of a fragment, and this island's parts in them."""

    def __init__(self, island: Island, fragment: int, now: float) -> None:
        self._island, self._fragment = island, fragment
        schedule = island.timing.schedule
        self._every, self._delay = schedule.sync_every, schedule.delay
        self.turn = schedule.first_send(fragment)  # own step of the next send
        if any(one.version for one in island.state.fragments):  # the run has begun
            self.turn = (self.turn - 1) % self._every + 1
        self.applied = self.shared.version  # version in the parameters
        self.unapplied = deque[Entry]()
        self.sent: Part | None = None
        self.sent_step, self._sent_at = 0, 0.0
        self.under_way = False
        """The last part sent was not read back yet. It is appended until it is."""
        self._returned_step = 0  # own step when it was read back
        self._tokens_sent = self._tokens_taken = 0
        """Own tokens when the last part was sent, and when the last one in an entry was sent, from
        which the next weight counts."""
        self._attempt = 0, 0  # version and own step of the last own opening
        self._opens_next = self.turn
        """Own step from which it opens a round: H steps after the last opening. An own opening
        counts from when it was made, as counting from when it was read would delay every round."""
        self._opened_at = now
        self._measured = set[int]()  # waiting parts whose lag is known
        self.confirmed = -1  # newest version that another island has with the same bits
        self.dispute: tuple[int, float, str] | None = None
        """Version of which another island has different bits, since when, and a description. No
        record is written meanwhile."""

    @property
    def shared(self) -> Fragment:
        return self._island.state.fragments[self._fragment]

    @property
    def _ledger(self) -> Ledger:
        return self._island.state.slots[self._island.slot].ledgers[self._fragment]

    def read(self, record: Open | Part | Close, outcome: Outcome, now: float) -> None:
        own = record.incarnation == self._island.incarnation
        if isinstance(record, Open):
            if not outcome.void:
                self._read_open(record, now)
            return
        if not own:
            self._compare(record, outcome, now)
        if isinstance(record, Part):
            if own and self.sent is not None and record.number == self.sent.number:
                self.under_way, self._returned_step = False, self._island.step
            if not outcome.void:
                self._island.habits[record.slot].weights[self._fragment].append(record.weight)
        if outcome.entry is not None:
            self.unapplied.append(outcome.entry)

    def _read_open(self, record: Open, now: float) -> None:
        version, step = self._attempt
        opened = step if version == record.version else self._island.step
        self._opens_next, self._opened_at = opened + self._every, now
        if self.shared.waiting_of(self._island.slot) is not None:
            # The part has waited for the opening, so send the next one later. It need only arrive
            # before its apply is due, with a margin as uploads do not all take the same time.
            upload = self._returned_step - self.sent_step
            lead = max(0, upload + upload // 4 - self._delay)
            self.turn += max(0, opened - self.sent_step - lead)

    def _compare(self, record: Part | Close, outcome: Outcome, now: float) -> None:
        """Compare the bits of a version with those of another island."""
        version = record.base if isinstance(record, Part) else record.version - 1
        if outcome.disputed and self.dispute is None:
            who = f"island {name_of(record.incarnation)} has other bits"
            self.dispute = version, now, f"{who} of fragment {self._fragment}: {outcome.void}"
        elif not outcome.void:
            self.confirmed = max(self.confirmed, version)

    @property
    def is_pending(self) -> bool:
        """Whether an own part is on its way or waiting."""
        return self.under_way or self.shared.waiting_of(self._island.slot) is not None

    @property
    def _grace(self) -> float:
        """Time from the opening to this island's apply, at least the floor."""
        return max(self._island.timing.floor, self._delay * self._island.step_seconds)

    @property
    def _may_write(self) -> bool:
        return not (self._island.fenced or self._island.state.ended or self.dispute)

    # --- send, open, close ------------------------------------------------------------------------

    def send_is_due(self, now: float) -> bool:
        island = self._island
        # Before its last part is applied, the delta would contain that part again.
        behind = self.applied < self._ledger.merged_in
        has_data = island.position > self._ledger.taken_to
        if self.is_pending or behind or not has_data or not self._may_write or island.done:
            return False
        if island.leaving or (island.step >= self.turn and island.clock <= island.total_tokens):
            return True
        if self.shared.open is None:
            return False
        grace_left = self._opened_at + self.shared.open.grace - now
        return island.stopped or (self.turn - island.step) * island.step_seconds > grace_left

    def sends_again(self, now: float) -> bool:
        """Return whether a leaving island waits for its last part to be merged, to send the work
        since then. It waits only some seconds, as there may be no quorum or nobody to open."""
        island, sent = self._island, self.sent
        if sent is None or island.position == sent.end or island.done or not self._may_write:
            return False
        opened, patience = self.shared.open, island.members.expiry
        since = self._sent_at if opened is None else self._opened_at + min(opened.grace, patience)
        return not self.is_pending or now < since + patience

    def send(self, checksum: str, now: float, *, finite: bool = True) -> Part:
        """Return the part to append once its chunks are stored. `checksum`: of the base version."""
        island = self._island
        before = self._ledger.number if self.sent is None else self.sent.number
        self.sent = Part(
            **island.who,
            fragment=self._fragment,
            number=before + 1,
            base=self.applied,
            checksum=checksum,
            start=self._ledger.taken_to,
            end=island.position,
            weight=island.tokens - self._tokens_taken if finite else 0,
            finite=finite,
        )
        self.turn = island.step + self._every
        self.sent_step, self._sent_at, self.under_way = island.step, now, True
        self._tokens_sent = island.tokens
        return self.sent

    def open(self) -> Open | None:
        """Return an opening if it is due: H own steps after the last one, with a part to merge."""
        island = self._island
        if self.shared.open is not None or not self.is_pending or self._opens_next > island.step:
            return None
        if island.clock > island.total_tokens or not self._may_write or island.done:
            return None
        version = self.shared.version + 1
        if self._attempt[0] != version:
            self._attempt = version, island.step
        return Open(**island.who, fragment=self._fragment, version=version, grace=self._grace)

    def close(self, checked: Mapping[int, str], lr: float, now: float) -> Close | None:
        """Return a close if all ready islands have a part in the open round, or its time is over.

        It names the waiting parts that this island has fetched, including those of earlier rounds.
        `checked`: for the sequence number of each, the reason why it is unusable, or "".
        """
        island, waiting = self._island, self.shared.waiting
        self._measure_lags(checked, now)
        if self.shared.open is None or not self._may_write:
            return None
        good = [number for number in waiting if checked.get(number) == ""]
        bad = [number for number in waiting if checked.get(number)]
        ready, arrived = island.ready_slots(now), {part.slot for part in waiting.values()}
        complete = ready <= arrived and len(good) + len(bad) == len(waiting)
        # Waiting delays only the version. After half a cycle it would be too late for the next
        # round, so the round does not wait for slots that take longer.
        longest = self._every * island.step_seconds / 2
        usual = (island.habits[slot].patience(longest) for slot in ready)
        waited = now >= self._opened_at + max((self.shared.open.grace, *usual))
        # After an outage the other islands may still be reconnecting: do not close alone.
        enough = waited and len(good) >= island.timing.quorum and not island.members.is_new(now)
        if not (good or bad) or not (complete or enough):
            return None
        refused = tuple(Refusal(number, checked[number]) for number in bad)
        lr *= self._share(good, ready - {waiting[number].slot for number in (*good, *bad)})
        by = island.slot, island.incarnation
        return island.state.build_close(self._fragment, by, good, refused, lr)

    def _measure_lags(self, checked: Collection[int], now: float) -> None:
        """Measure the time from the opening of a round until its new parts can be used."""
        opened = self.shared.version + (self.shared.open is not None)
        self._measured.intersection_update(self.shared.waiting)
        for number, part in self.shared.waiting.items():
            if number in checked and number not in self._measured and part.base < opened:
                self._measured.add(number)
                if not self._island.members.is_new(now):  # else parts of an outage arrive at once
                    lag = now - self._opened_at if part.base + 1 == opened else math.inf
                    self._island.habits[part.slot].lags.append(lag)

    def _share(self, parts: Collection[int], missing: Collection[int]) -> float:
        """Return the weight of these parts as a share of what all ready islands send in a cycle.

        An entry with parts of half the islands takes half an outer step. Late islands take the
        other half. With whole steps, late islands would move the shared copy twice as far.
        """
        taken = sum(self.shared.waiting[number].weight for number in parts)
        habits = (self._island.habits[slot] for slot in missing)
        weight = sum(one.weight(self._fragment) for one in habits)
        return taken / (taken + weight) if taken else 1.0

    # --- entries ----------------------------------------------------------------------------------

    def next_mode(self) -> Mode | None:
        """Return how to apply the first unapplied entry between these steps, None if not yet."""
        if not self.unapplied:
            return None
        entry = self.unapplied[0]
        part = entry.part_of(self._island.incarnation)
        if part is None:
            return Mode.ADD
        late = self._island.step - self.sent_step - self._delay
        own_round = part.base == entry.close.version - 1
        if own_round and late < 0 and not self._island.stopped:
            return None
        if not part.finite:
            return Mode.RESET
        return Mode.MIX if own_round and late <= 0 else Mode.MIX_LATE

    def finish_apply(self, now: float) -> None:
        """Mark the first unapplied entry as applied."""
        entry, tokens = self.unapplied.popleft(), self._island.tokens
        assert entry.close.version == self.applied + 1
        self.applied = entry.close.version
        if entry.part_of(self._island.incarnation) is not None:
            tokens = self._tokens_taken = self._tokens_sent
        self._island.set_clock(entry.close.clock, tokens, now)

    def wait_until(self) -> float | None:
        """Return until when training waits for the entry with the own part, None if it does not."""
        island = self._island
        # After the step at which its apply is due, the entry is applied on arrival.
        due = self.is_pending and island.step == self.sent_step + self._delay
        if not due or not island.members.connected or island.stopped:
            return None
        if self.shared.open is not None:
            return self._opened_at + self.shared.open.grace
        # An island in step with this one does not open a round yet.
        return None if self._opens_next > island.step else self._sent_at + self._grace
