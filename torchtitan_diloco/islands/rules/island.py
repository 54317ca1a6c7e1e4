"""An island without tensors, store and clock.

Pass it what was read and done (`on_...`). Between two steps, do what `boundary` returns. Write
`note` each second, and after changes. Download what `wanted` returns, in order.
"""

import math
from collections.abc import Sequence

import msgspec

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.rules.checkpoint import Saved, save
from torchtitan_diloco.islands.rules.clock import Clock
from torchtitan_diloco.islands.rules.commit import STANDSTILL
from torchtitan_diloco.islands.rules.copies import COPY_VERSIONS
from torchtitan_diloco.islands.rules.decision import ENDS, SICK, Decision
from torchtitan_diloco.islands.rules.decision import LEAVE as LEAVE_ORDER
from torchtitan_diloco.islands.rules.fields import Shapes
from torchtitan_diloco.islands.rules.founding import (
    Facts,
    Founding,
    check_continues,
    check_empty,
    check_founding,
    check_run,
)
from torchtitan_diloco.islands.rules.fragment import (
    Boundary,
    OwnFragment,
    Send,
)
from torchtitan_diloco.islands.rules.names import Object, name_of, part_name
from torchtitan_diloco.islands.rules.news import News
from torchtitan_diloco.islands.rules.note import GIVE, JOIN, Note, NotedGauges, Part, encode_note
from torchtitan_diloco.islands.rules.settings import Settings

BEHIND = 1
"""Maximum number of versions that an island may be behind when it requests a slot."""

# Why an incarnation of an island is over, in addition to `ENDS`.
ENDED = "ended"
"""The run has ended, and the island has applied the final copies."""
LEFT = "left"
"""The island has left."""
REJOIN = "rejoin"
"""The slot was given to another island: the process of this one is to be restarted."""
OVER = "over"
"""The run has ended before the island had a slot, and it has the final copies."""


class Island:
    def __init__(
        self,
        incarnation: str,
        *,
        facts: Facts,
        shapes: Sequence[Shapes],
        founds: Founding | None = None,
        saved: Saved | None = None,
        corpus: str = "",
        ranks: int = 1,
    ) -> None:
        """`facts`, `shapes`: compared with those of the run. `founds`: the run to found in an empty
        location, if it may found one. `saved`: state in its own checkpoint."""
        self.incarnation = incarnation
        self.founds = founds
        self.corpus = corpus
        self.ranks = ranks
        self.decision: Decision | None = None
        self.slot: int | None = None
        self.fragments = list[OwnFragment]()
        self.is_training = False
        self.may_found = False
        """Whether to store its founding."""
        self.may_go_on = False
        """Whether a run that has ended may be longer soon, because a change was asked for."""
        self.ending = ""
        """Why this incarnation is over, or empty while it is not."""
        self.step = 0
        self.tokens = 0
        self.position = 0
        self.step_seconds = 0.0
        self.is_stopped = False
        self.is_leaving = False
        self.entered = list[int]()
        """Positions at which its stream has entered phases of the data."""
        self.heard_at = -math.inf
        """Time at which a new decision was read."""
        self.dropped_samples = 0
        """Samples before its checkpoint that are not merged, and that it reads again."""
        self.clock = Clock()
        """Tokens of the run, which its learning rate follows."""
        self.news = News()
        self._facts = facts
        self._shapes = list(shapes)
        self._saved = saved
        self._counter = 0
        self._stored = list[Part]()  # parts whose objects exist
        self._boundary_at = -math.inf
        self._trains_until = 0
        self._sent_step = -1

    # --- what it knows ----------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        assert self.decision is not None
        return self.decision.settings

    @property
    def grace(self) -> float:
        """Time for which it waits for a version with its part."""
        return max(self.settings.grace, self.settings.delay * self.step_seconds)

    # --- decisions --------------------------------------------------------------------------------

    @property
    def is_founder(self) -> bool:
        """Whether to store its copies, because the syncer has chosen it to found the run."""
        decision = self.decision
        if decision is None or decision.fragments:
            return False
        return decision.founder == self.incarnation

    def on_empty(self) -> None:
        """Take note that the location contains no decision. Raise a UserError if it is not the one
        of the run, or this island cannot found the run there."""
        if self.founds is not None and not self.may_found:
            check_founding(self.founds, self._facts)
            self.may_found = True
        if not self.may_found:
            check_empty(self._saved_run)
            self.news.say("the location is empty: waiting for an island that may found the run")

    def _can_found(self) -> bool:
        """Return whether it may found the run, if the chosen founder dies."""
        if self.founds is None or self.may_found:
            return self.may_found
        try:
            check_founding(self.founds, self._facts)
        except UserError as error:
            self.news.say(f"{error}; it joins the run of another founder")
            return False
        return True

    @property
    def _saved_run(self) -> str | None:
        return None if self._saved is None else self._saved.run

    def on_decision(self, decision: Decision, now: float) -> None:
        """Take the highest decision. Raise a UserError if this island does not fit the run."""
        before = self.decision
        if before is not None and decision.number <= before.number:
            return
        if not decision.fragments:
            self.may_found = self._can_found()
            if decision.founder != self.incarnation:
                founder = name_of(decision.founder)
                self.news.say(f"waiting for island {founder} to store the first copies")
        elif before is None or not before.fragments:
            check_run(decision, self._facts, self._shapes, self._saved_run)
        else:
            check_continues(before, decision, self.slot)
        self.decision = decision
        self.heard_at = now
        self._obey(decision)
        if self.ending or not decision.is_founded:
            return
        if not self.fragments:
            self._prepare()
        if not self.is_training:
            self.clock.stand_at(max(shared.clock for shared in decision.fragments))
        if self.slot is not None:
            for fragment in self.fragments if self.is_training else ():
                fragment.on_decision(now)
            if before is not None and before.settings.sync_every != self.settings.sync_every:
                self._change_turns()
        self._begin_if_ready()

    def _obey(self, decision: Decision) -> None:
        """Take this island's slot, and process its loss, or an order."""
        told = decision.told.get(self.incarnation, "")
        if told == LEAVE_ORDER:
            self.is_leaving = True
        elif told in ENDS:
            self._end(told, "")
            return
        elif told == SICK:
            self.news.say("its numbers are repeatedly wrong, and rounds do not wait for it")
        slot = decision.slot_of(self.incarnation)
        if self.slot is not None and slot != self.slot:
            for fragment in self.fragments:
                fragment.sent = None  # parts belong to the slot
            if self.is_leaving:
                self._end(LEFT, "")
            else:
                self._end(REJOIN, "its slot was given to another island: it has to be restarted")
        self.slot = slot

    def _end(self, why: str, line: str) -> None:
        self.ending = self.ending or why
        if line:
            self.news.say(line)

    # --- join -------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        assert self.decision is not None
        self.fragments = [
            OwnFragment(self, number) for number in range(len(self.decision.fragments))
        ]
        saved = [] if self._saved is None else self._saved.fragments
        for fragment, copy in zip(self.fragments, saved, strict=False):
            fragment.applied = copy.version
            fragment.on_checksum(copy.version, copy.checksum or "unknown")

    def wanted(self) -> list[Object]:
        """Return the objects to download, those of a fragment in this order."""
        if self.ending or self.decision is None or not self.decision.is_founded:
            return []
        return [stored for fragment in self.fragments for stored in fragment.wanted()]

    def on_held(self, stored: Object, now: float) -> None:
        """Take note that an object was downloaded, and its bytes were checked."""
        if stored.fragment < len(self.fragments):
            self.fragments[stored.fragment].on_held(stored, now)
            self._begin_if_ready()

    def on_missing(self, stored: Object) -> None:
        """Take note that an object could not be read, because it is not visible yet, is damaged, or
        was lost when the store was put back, or because a disk fails. A newer copy takes its place
        once there is one."""
        if stored.fragment < len(self.fragments):
            self.fragments[stored.fragment].missing.add(stored)

    def on_checksum(self, number: int, version: int, checksum: str) -> None:
        """Compare the computed checksum of P of this version."""
        self.fragments[number].on_checksum(version, checksum)

    def is_near(self) -> bool:
        """Return whether it has copies that are new enough to request a slot."""
        return bool(self.fragments) and all(
            fragment.held >= max(0, fragment.shared.version - BEHIND) for fragment in self.fragments
        )

    def _begin_if_ready(self) -> None:
        decision = self.decision
        if self.is_training or decision is None or self.slot is None or not decision.begun:
            return
        lacks_copy = any(fragment.applied < 0 or fragment.is_wrong for fragment in self.fragments)
        if lacks_copy or not self.is_near():
            return
        slot = decision.slots[self.slot]
        self.position = slot.furthest
        self.entered = list(slot.entered)
        self.clock.begin(len(decision.owners()))
        if self._saved is not None and self._saved.slot == self.slot:
            self.dropped_samples = max(0, self._saved.position - slot.furthest)
        self.is_training = True
        self._take_turns(0)
        for fragment in self.fragments:
            fragment.resets = Mode.TAKE

    def _take_turns(self, step: int) -> None:
        """Let the fragments take turns in the H steps that follow H steps from `step` on."""
        schedule = Schedule(self.settings.sync_every, len(self.fragments), self.settings.delay)
        for fragment in self.fragments:
            fragment.turn = step + schedule.first_send(fragment.number)

    def _change_turns(self) -> None:
        """Let the fragments take turns in H steps, from the next step on, as H has changed.

        They begin later if one of them would have its turn sooner than H steps after its last send.
        Its round would not be due, and all islands would wait for it, and complete no step that
        makes it due.
        """
        every = self.settings.sync_every
        schedule = Schedule(every, len(self.fragments), self.settings.delay)
        starts = [
            fragment.last_sent + every - schedule.offset(fragment.number)
            for fragment in self.fragments
            if fragment.last_sent is not None
        ]
        self._take_turns(max([self.step + 1, *starts]) - every)

    # --- train ------------------------------------------------------------------------------------

    def finish_step(self, samples: int, tokens: int, seconds: float) -> None:
        """Count a step. `tokens`: 0 if it was skipped. `seconds`: usual time of a step."""
        self.step += 1
        self.position += samples
        self.tokens += tokens
        is_decided = self._boundary_at - self.heard_at <= STANDSTILL
        self.clock.advance(tokens, is_decided=is_decided)
        self.step_seconds = seconds

    def on_reset(self, number: int) -> None:
        """Take note that theta of a fragment was replaced by P, because it was not finite. Call
        this after the `finish_step` of that step, so that the lost work includes it."""
        self.fragments[number].lose()

    def enter_phase(self, position: int) -> None:
        """Enter the next phase of the data at this position, which the stream has not read yet, but
        not before the phase that its slot has entered last. After a restart, that may begin at a
        later sample than those that are read again."""
        assert position >= self.position
        self.entered.append(max([position, *self.entered]))

    def leave(self) -> None:
        """Send all work, give the slot back and end."""
        self.is_leaving = True
        if self.slot is None:
            self._end(LEFT, "")

    def on_applied(self, fragment: OwnFragment, mode: Mode) -> None:
        """Take the clock of a version. A MIX contains the tokens up to its send."""
        if self.decision is None or not self.is_training:
            return
        if fragment.applied != fragment.shared.version:
            return
        is_mixed = mode is Mode.MIX
        expected = fragment.expected_tokens if is_mixed else self.clock.expected_tokens
        self.clock.apply(fragment.shared.clock, expected, len(self.decision.ready))

    def boundary(self, now: float) -> Boundary:
        """Return the next actions. Call this again after they are done, until there are none."""
        self._boundary_at = now
        due = Boundary(self.clock.tokens)
        if self.decision is None or self.ending:
            return due
        for fragment in self.fragments:
            while (apply := fragment.next_apply()) is not None:
                due.applies.append(apply)
        self._begin_if_ready()
        if not self.is_training:
            if self.slot is None and not (self.may_go_on or due.applies):
                self._finish(OVER)
            return due
        self._look_at_end()
        if due.applies:
            return due
        # Once per boundary: another send while it waits would begin another grace.
        may_send = self.is_stopped or self._sent_step != self.step
        for fragment in self.fragments:
            part = fragment.next_send(now, may_send=may_send)
            if part is not None and not part.is_loss:
                due.sends.append(Send(part))
                self._sent_step = self.step
        waits = [
            until for fragment in self.fragments if (until := fragment.waits_until(now)) is not None
        ]
        due.waits_until = max(waits, default=None)
        due.is_training = not self.is_stopped
        due.phases = max(len(self.entered), self.decision.phases)
        self._finish(ENDED)
        return due

    def on_stored(self, part: Part, size: int, now: float, *, is_finite: bool = True) -> None:
        """Take note that the bytes of a part are stored. If it is not finite, it has none and
        becomes a loss."""
        fragment = self.fragments[part.fragment]
        if fragment.sent is None or fragment.sent.part is not part:
            return
        fragment.uploads.append(now - fragment.sent.at)
        fragment.sent.is_stored = True
        if is_finite:
            self._stored.append(part)
            fragment.sent.part = msgspec.structs.replace(part, size=size)
            return
        fragment.sent.part = msgspec.structs.replace(part, weight=0, is_loss=True)
        fragment.resets = Mode.RESET

    def _look_at_end(self) -> None:
        """Decide whether to take another step.

        The clock is an estimate. An island therefore stops at the total, sends its work, and, once
        its parts are decided, continues to train if tokens are still missing.
        """
        assert self.decision is not None
        total = self.settings.total_tokens
        short = max(total - fragment.shared.clock for fragment in self.fragments)
        if self.is_leaving or short <= 0:
            self.is_stopped = True
        elif self.clock.tokens < total:
            self.is_stopped = False
        elif not self.is_stopped:
            self.is_stopped = self.step >= self._trains_until
        elif not any(
            fragment.sent is not None or self._has_unsent(fragment) for fragment in self.fragments
        ):
            per_step = max(1, self.tokens // max(1, self.step)) * max(1, len(self.decision.ready))
            steps = min(math.ceil(short / per_step), self.settings.sync_every)
            self._trains_until = self.step + steps
            self.is_stopped = False

    def _has_unsent(self, fragment: OwnFragment) -> bool:
        is_short = fragment.shared.clock < self.settings.total_tokens
        return is_short and self.position > fragment.ledger.taken

    def _finish(self, why: str) -> None:
        """End once the run has ended and the final copies are applied."""
        assert self.decision is not None
        has_all = all(
            fragment.applied == fragment.shared.version and not fragment.is_wrong
            for fragment in self.fragments
        )
        if self.decision.ended and has_all:
            self._end(why, "")

    # --- what others see --------------------------------------------------------------------------

    def _wish(self) -> str:
        if self.slot is None:
            has_ended = self.decision is not None and self.decision.ended
            may_join = self.is_near() and not (self.is_leaving or self.ending or has_ended)
            return JOIN if may_join else ""
        if not self.is_leaving:
            return ""
        is_busy = self.is_training and any(
            fragment.is_undecided or self._has_unsent(fragment) for fragment in self.fragments
        )
        return "" if is_busy else GIVE

    def note(self, gauges: NotedGauges | None = None) -> bytes:
        """Return the note of this incarnation."""
        self._counter += 1
        behind = (fragment.shared.version - fragment.held for fragment in self.fragments)
        return encode_note(
            Note(
                counter=self._counter,
                wish=self._wish(),
                step=self.step,
                tokens=self.tokens,
                position=self.position,
                step_seconds=self.step_seconds,
                is_idle=self.is_training and self.is_stopped,
                sending=[fragment.number for fragment in self.fragments if fragment.is_sending],
                parts=[
                    msgspec.Raw(msgspec.json.encode(fragment.sent.part))
                    for fragment in self.fragments
                    if fragment.sent is not None
                    and fragment.sent.is_stored
                    and fragment.is_undecided
                ],
                corpus=self.corpus,
                needs_copies=self.slot is None and max(behind, default=0) > COPY_VERSIONS,
                entered=self.entered,
                gauges=msgspec.Raw(msgspec.json.encode(gauges or NotedGauges())),
            )
        )

    def take_garbage(self) -> list[str]:
        """Return the objects of parts that are decided, to be deleted."""
        if self.slot is None:
            return []  # the syncer deletes those of incarnations without a slot
        waiting = list[Part]()
        decided = list[str]()
        for part in self._stored:
            if part.number <= self.fragments[part.fragment].ledger.number:
                decided.append(part_name(self.incarnation, part.fragment, part.number))
            else:
                waiting.append(part)
        self._stored = waiting
        return decided

    def save(self) -> Saved | None:
        """Return the content of a checkpoint, or None before the run is founded."""
        if self.decision is None or not self.decision.fragments:
            return None
        versions = [fragment.applied for fragment in self.fragments]
        return save(self.decision, versions, slot=self.slot, position=self.position)
