"""Decisions of an island about one fragment: when it sends, opens, closes, applies and waits."""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.ledger import Due, Entry, Fragment, Ledger, Mode, Outcome
from torchtitan_diloco.islands.log import VERSIONS_LATE
from torchtitan_diloco.islands.records import MOST_GRACE, Close, Open, Part, Refusal

if TYPE_CHECKING:
    from torchtitan_diloco.islands.machine import Machine


@dataclass(frozen=True)
class Timing:
    schedule: Schedule
    floor: float = 1.0
    """Minimum grace, in seconds."""
    norm_limit: float = 0.0
    """`DiLoCoConfig.delta_norm_limit`."""
    action: str = "wait_less"
    """`Islands.action`."""


@dataclass(frozen=True)
class Checked:
    """Result of an island's check of a part that it has fetched."""

    reason: str = ""
    """Why the part is unusable. Empty: it is usable."""
    norm: float = 0.0
    """Norm of its decoded values."""


FEWEST_NORMS = 5
"""Number of norms of merged parts that are needed to judge a part."""
PATIENCE_FACTOR = 4
"""A round waits at most for this multiple of this island's grace period, so that a record with a
long grace period cannot stop training."""


def find_outliers(
    norms: Mapping[int, float], merged: Collection[float], limit: float, *, alone: bool
) -> dict[int, float]:
    """Return the parts whose norm exceeds `limit` times the usual one, and the factor of each.

    The usual norm is the median of those merged before. While these are few, a part is compared
    with the other parts of its round, of which there must be at least two: of only two parts, it is
    unknown which is right. If several parts exceed what is usual and none does not, they have a
    common cause, such as a higher learning rate, and count. `alone`: whether no other island is
    ready.
    """
    outliers = {}
    for number, norm in norms.items():
        others = [other for key, other in norms.items() if key != number]
        known = merged if len(merged) >= FEWEST_NORMS else others if len(others) > 1 else ()
        usual = statistics.median(known) if known else math.inf
        if usual and norm > limit * usual:
            outliers[number] = norm / usual
    common = len(outliers) == len(norms) and (alone or len(norms) > 1)
    return {} if common else outliers


class Rounds:
    """Rounds of a fragment, and this island's parts in them."""

    def __init__(self, island: "Machine", fragment: int, now: float) -> None:
        self._island, self._fragment = island, fragment
        self.turn = island.timing.schedule.first_send(fragment)  # own step of the next send
        if any(one.version for one in island.state.fragments):  # the run has begun
            self.turn = (self.turn - 1) % self._every + 1
        self.applied = self.shared.version  # version in the parameters
        self.unapplied = deque[Due]()
        self.skipped = list[int]()
        """Versions that will not be applied, because later ones contain them."""
        self.sent: Part | None = None
        self.is_stored = False
        """Whether the chunks of the last part are stored, so that it can be appended."""
        self.sent_step, self._sent_at = 0, 0.0
        self.under_way = False
        """The last part sent was not read back yet. It is appended until it is."""
        self._returned_step = 0  # own step when it was read back
        self._tokens_sent = self._tokens_taken = 0
        """Tokens of this island when its last part was sent, and when its last part in an entry was
        sent, from which the next weight counts."""
        self._attempt = 0, 0  # version and own step of the last own opening
        self._opens_next = self.turn
        """Step of this island from which it opens a round: H steps after the last opening. An
        opening of this island counts from when it was written, because counting from when it was
        read would delay every round."""
        self._opened_at = now
        self._measured = set[int]()  # waiting parts whose lag is known

    def begin_cycle(self) -> None:
        """Take turns with the other fragments in the steps of a new H."""
        step, schedule = self._island.step, self._island.timing.schedule
        self.turn = step + 1 + schedule.offset(self._fragment)
        self._opens_next = min(self._opens_next, step + self._every)

    @property
    def _every(self) -> int:
        return self._island.timing.schedule.sync_every

    @property
    def _delay(self) -> int:
        return self._island.timing.schedule.delay

    @property
    def shared(self) -> Fragment:
        return self._island.state.fragments[self._fragment]

    @property
    def _ledger(self) -> Ledger:
        return self._island.own.ledgers[self._fragment]

    def read(self, record: Open | Part | Close, outcome: Outcome, now: float) -> None:
        own = record.incarnation == self._island.incarnation
        if isinstance(record, Open):
            if not outcome.void:
                self._read_open(record, now)
            return
        if not own and (outcome.disputed or not outcome.void):
            disputes = self._island.others.disputes
            version = record.base if isinstance(record, Part) else record.version - 1
            same = not outcome.disputed
            disputes.note(self._fragment, record.incarnation, version, same=same)
        if isinstance(record, Part):
            if record == self.sent:
                self.under_way, self._returned_step = False, self._island.step
            if not outcome.void:
                self._island.habits[record.slot].weights[self._fragment].append(record.weight)
        if outcome.entry is not None:
            self._read_entry(outcome.entry)

    def _read_entry(self, entry: Entry) -> None:
        own = entry.part_of(self._island.incarnation)
        found = Due(
            fragment=self._fragment,
            version=entry.close.version,
            clock=entry.close.clock,
            own=own,
            is_lost=own is not None and entry.is_lost(own),
            participants=sum(weight > 0 for weight in entry.close.weights),
            received=sum(part.size for part in entry.parts if part is not own),
        )
        last = self.unapplied[-1] if self.unapplied else None
        if last is not None and last.own is None and own is None:
            # Their changes add up. While training pauses, versions must not pile up in memory.
            self.skipped.append(last.version)
            found.received += last.received
            self.unapplied.pop()
        self.unapplied.append(found)

    def _read_open(self, record: Open, now: float) -> None:
        version, step = self._attempt
        opened = step if version == record.version else self._island.step
        self._opens_next, self._opened_at = opened + self._every, now
        if self.sent is not None and self.shared.waiting_of(self._island.slot) is not None:
            # The part has waited for the opening, so send the next one later. It need only arrive
            # before its apply is due, with a margin as uploads do not all take the same time.
            upload = self._returned_step - self.sent_step
            lead = max(0, upload + upload // 4 - self._delay)
            self.turn += max(0, opened - self.sent_step - lead)

    @property
    def is_pending(self) -> bool:
        """Whether a part of this slot is in flight or waiting."""
        return self.under_way or self.shared.waiting_of(self._island.slot) is not None

    @property
    def _grace(self) -> float:
        """Time from the opening to this island's apply, at least the floor."""
        return max(self._island.timing.floor, self._delay * self._island.step_seconds)

    @property
    def _grace_of_round(self) -> float:
        """Time for which this island keeps the round open."""
        assert self.shared.open is not None
        return min(self.shared.open.grace, PATIENCE_FACTOR * self._grace)

    @property
    def _has_all(self) -> bool:
        """Whether the fragment has merged all tokens of the run, so that no more rounds open."""
        return self.shared.clock >= self._island.facts.total_tokens

    @property
    def _may_write(self) -> bool:
        island = self._island
        undecided = island.others.disputes.is_undecided(self._fragment)
        return not (island.fenced or island.state.ended or undecided)

    # --- send, open, close ------------------------------------------------------------------------

    def send_is_due(self, now: float) -> bool:
        island = self._island
        # Before its last part is applied, the delta would contain that part again.
        oldest = max(self._ledger.merged_in, self.shared.version - VERSIONS_LATE)
        behind = self.applied < oldest
        has_data = island.position > self._ledger.taken_to
        if self.is_pending or behind or not has_data or not self._may_write or island.own.done:
            return False
        if island.leaving or (island.step >= self.turn and not self._has_all):
            return True
        if island.stopped and island.state.is_short(self.shared):
            return True
        if self.shared.open is None:
            return False
        grace_left = self._opened_at + self._grace_of_round - now
        return island.stopped or (self.turn - island.step) * island.step_seconds > grace_left

    def sends_again(self, now: float) -> bool:
        """Return whether a leaving island waits for its last part to be merged, to send the work
        since then. It waits only some seconds, because there may be no quorum, or no island that
        opens a round."""
        island, sent = self._island, self.sent
        if sent is None or island.position == sent.end or island.own.done or not self._may_write:
            return False
        patience, since = island.members.expiry, self._sent_at
        if self.shared.open is not None:
            since = self._opened_at + min(self._grace_of_round, patience)
        return not self.is_pending or now < since + patience

    def send(self, now: float) -> Part:
        """Return the part, without its chunks. It is appended once they are stored."""
        island = self._island
        before = max(self._ledger.number, self.sent.number if self.sent else 0)
        tokens = min(island.tokens - self._tokens_taken, island.facts.most_weight)
        self.sent = Part(
            **island.who,
            fragment=self._fragment,
            number=before + 1,
            base=self.applied,
            checksum=self.shared.checksums.get(self.applied, ""),
            start=self._ledger.taken_to,
            end=island.position,
            weight=tokens,
            ranks=island.ranks,
            codec=island.facts.codec,
        )
        self.is_stored = False
        self.turn = island.step + self._every
        self.sent_step, self._sent_at, self.under_way = island.step, now, True
        self._tokens_sent = island.tokens
        return self.sent

    def open(self) -> Open | None:
        """Return an opening if it is due: H steps after the last one, with a part to merge.

        A stopped island, which takes no more steps, opens rounds until the fragment has its tokens.
        """
        island = self._island
        due = self._opens_next <= island.step
        due = due or (island.stopped and island.state.is_short(self.shared))
        if self.shared.open is not None or not self.is_pending or not due:
            return None
        if self._has_all or not self._may_write or island.own.done:
            return None
        version = self.shared.version + 1
        if self._attempt[0] != version:
            self._attempt = version, island.step
        grace = min(self._grace, MOST_GRACE)
        return Open(**island.who, fragment=self._fragment, version=version, grace=grace)

    def close(self, checked: Mapping[int, Checked], lr: float, now: float) -> Close | None:
        """Return a close if all ready islands have a part in the open round, or its time has
        passed.

        It names the waiting parts that this island has fetched, including those of earlier rounds.
        `checked`: results of this island's check of each, by sequence number.
        """
        island, waiting = self._island, self.shared.waiting
        self._measure_lags(checked, now)
        if self.shared.open is None or not self._may_write:
            return None
        known = {number: checked[number] for number in waiting if number in checked}
        good = {number: one.norm for number, one in known.items() if not one.reason}
        bad = [Refusal(number, one.reason) for number, one in known.items() if one.reason]
        ready, arrived = island.ready_slots(now), {part.slot for part in waiting.values()}
        awaited, is_quorate = island.others.awaited(ready), len(good) >= island.facts.quorum
        complete = ready <= arrived or (awaited <= arrived and is_quorate)
        complete = complete and len(good) + len(bad) == len(waiting)
        # Waiting delays only the version. After half a cycle it would be too late for the next
        # round, so the round does not wait for slots that take longer.
        longest = self._every * island.step_seconds / 2
        usual = (island.habits[slot].patience(longest) for slot in awaited)
        waited = now >= self._opened_at + max((self._grace_of_round, *usual))
        # After an outage the other islands may still be reconnecting: do not close alone.
        enough = waited and is_quorate and not island.members.is_new(now)
        if not (good or bad) or not (complete or enough):
            return None
        missing = ready - {waiting[number].slot for number in known}
        norms = {number: norm / self._turns(waiting[number]) for number, norm in good.items()}
        judged = {number: norm for number, norm in norms.items() if waiting[number].finite}
        limit, alone = island.timing.norm_limit, ready <= {island.slot}
        outliers = find_outliers(judged, self.shared.norms, limit, alone=alone) if limit else {}
        bad += [
            Refusal(number, f"its norm is {times:.3g} times the usual one", outlier=True)
            for number, times in outliers.items()
        ]
        taken = {number: norm for number, norm in norms.items() if number not in outliers}
        lr *= self._share(taken, missing)
        by = island.slot, island.incarnation
        return island.state.build_close(self._fragment, by, taken, tuple(bad), lr)

    def _turns(self, part: Part) -> float:
        """Return the steps of a part in units of H, at least 1.

        After an outage, a part has the work of many cycles. A part of fewer steps may contain older
        work too, with a mixing above 0.
        """
        block = self._island.facts.block
        return max(1.0, (part.end - part.start) / (block * self._every))

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

    def take_due(self, now: float) -> Due | None:
        """Return the first unapplied entry if it must be applied now, and mark it as applied."""
        if not self.unapplied:
            return None
        entry, tokens = self.unapplied[0], self._island.tokens
        if entry.own is not None:
            late = self._island.step - self.sent_step - self._delay
            own_round = entry.own.base == entry.version - 1
            if own_round and late < 0 and not self._island.stopped:
                return None
            entry.mode = Mode.MIX if own_round and late <= 0 else Mode.MIX_LATE
            if entry.is_lost:
                entry.mode = Mode.RESET
            tokens = self._tokens_taken = self._tokens_sent
        self.unapplied.popleft()
        self.applied = entry.version
        self._island.set_clock(entry.clock, tokens, now)
        return entry

    def wait_until(self) -> float | None:
        """Return until when training waits for the entry with this island's part, or None if it
        does not."""
        island = self._island
        # After the step at which its apply is due, the entry is applied on arrival.
        due = self.sent is not None and self.is_pending  # not for a part of the owner before
        due = due and island.step == self.sent_step + self._delay
        if not due or not island.members.connected or island.stopped:
            return None
        if self.shared.open is not None:
            return self._opened_at + self._grace_of_round
        # An island in step with this one does not open a round yet.
        return None if self._opens_next > island.step else self._sent_at + self._grace
