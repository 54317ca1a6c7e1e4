"""The process that decides: a pure machine.

Pass it what was read (`on_...`). Run the jobs that `tick` returns, in separate threads for all but
`Commit`, and pass the results back. It never waits for a job, so it decides each second, whatever
the jobs do. A new syncer starts from the newest decision alone. A superseded one is discarded.

`state` is the next decision, which changes all the time. `committed` is the last one that counts.
What cannot be undone, such as a deletion, follows from `committed` alone.
"""

from collections.abc import Collection, Iterable, Sequence

from torchtitan_diloco.islands.rules.changes import Changes, describe
from torchtitan_diloco.islands.rules.copies import CopySchedule
from torchtitan_diloco.islands.rules.decision import (
    BARRED,
    SICK,
    Decision,
    Fate,
    Kept,
    Ledger,
    SharedFragment,
    Stored,
)
from torchtitan_diloco.islands.rules.fields import FURTHEST, MalformedError
from torchtitan_diloco.islands.rules.founding import Founders, Founding
from torchtitan_diloco.islands.rules.history import EventKind, encode_bin
from torchtitan_diloco.islands.rules.jobs import (
    Adopt,
    DeleteObjects,
    Fetch,
    Job,
    MergeParts,
    Record,
    Settle,
    Snapshot,
    Upload,
    load,
)
from torchtitan_diloco.islands.rules.ledger import decide, judge, most_samples
from torchtitan_diloco.islands.rules.names import COPY, OUTER, VERSION, Object, name_of
from torchtitan_diloco.islands.rules.news import News
from torchtitan_diloco.islands.rules.note import Note, Part, PartHead, decode_note
from torchtitan_diloco.islands.rules.presence import Handover, Presence, Seats
from torchtitan_diloco.islands.rules.rounds import Round, Speeds, WaitingPart
from torchtitan_diloco.islands.rules.writer import Uploads, Writer
from torchtitan_diloco.islands.rules.wrong_parts import WrongParts

MEASURED_VERSIONS = 2
"""Number of versions of a fragment after which the speed of islands is known."""
YEARS = 1e9


class Syncer:
    def __init__(self, decision: Decision | None, session: str, now: float, wall: float) -> None:
        """Lead, starting from the newest decision. `wall`: time of day in seconds."""
        self.session = session
        self.presence = Presence()
        self.news = News()
        self.is_stopping = False
        self.uploads = Uploads()
        self.rounds = list[Round]()
        self._now = now
        self._began = now
        self._wall = wall
        self._age = 0.0
        self._jobs = list[Job]()
        self._writer = Writer(decision, now)
        self._founders = Founders(self.presence)
        self._away = set[str]()  # owners that are silent
        self._changes = Changes()
        self._is_recording = False
        self.state = decision
        if decision is not None:
            if not decision.is_founded:  # its copies are to be fetched again
                decision.fragments = []
                decision.slots = []
            self._begin(decision)

    def _begin(self, state: Decision) -> None:
        self.state = state
        state.session = self.session
        state.stopped = False
        state.writing = []
        self._wall += self._now - self._began
        self._began = self._now
        away = self._wall - state.written if state.written else 0.0
        self._age = state.age + min(max(0.0, away), YEARS)
        fragments = range(len(state.fragments))
        self.uploads = Uploads()
        self.rounds = [Round(state, self.presence, number) for number in fragments]
        self.seats = Seats(state, self.presence, self._is_busy)
        self._loads = list[Job]()  # after a takeover, until something is to be merged
        self._loaded = set[int]()
        self._copies = CopySchedule(fragments, self._now)
        self._checksums = dict[int, str]()  # of the versions that are being uploaded
        self._wrong_parts = WrongParts()
        self._speeds = Speeds()
        for number, shared in enumerate(state.fragments):
            shared.is_open = False
            self.uploads.plan(VERSION, number, shared.version + 1)
        if state.is_founded:
            state.history.note(self.age(), EventKind.LED, text=self.session)
            self._loads += [load(shared, number) for number, shared in enumerate(state.fragments)]

    @property
    def committed(self) -> Decision | None:
        return self._writer.committed

    def age(self) -> float:
        return self._age + self._now - self._began

    def _is_busy(self, slot: int) -> bool:
        return any(round_.is_busy(slot) for round_ in self.rounds)

    # --- what it hears ----------------------------------------------------------------------------

    def choose_notes(self, names: Iterable[str]) -> list[str]:
        """Return which of the listed notes to read. List the newest ones of each login first."""
        return self.presence.choose(names, self._owners())

    def _owners(self) -> list[str]:
        return [] if self.state is None else self.state.owners()

    def on_poll(self, now: float) -> None:
        """Count a poll, in which the notes of all owners of slots were read."""
        pause = 0.0 if self.state is None else self.state.settings.poll_seconds
        self.presence.listen(now, pause)

    def on_note(self, incarnation: str, raw: bytes) -> None:
        """Process the note of an incarnation of an island, whose name is that of the object."""
        try:
            note = decode_note(raw)
        except MalformedError as error:
            self.news.say(f"island {incarnation}: {error}")
            return
        if not self.presence.hear(incarnation, note, self._owners()):
            return
        if self.state is None or not self.state.is_founded:
            return
        self._copies.is_asked |= note.needs_copies
        slot = self.state.slot_of(incarnation)
        if slot is not None and self.state.told.get(incarnation) != BARRED:
            self._read_parts(incarnation, slot, note, self._read_phases(slot, note))

    def _read_phases(self, number: int, note: Note) -> int:
        """Record, once, where the stream of a slot has entered phases of the data. Return the first
        position that is not recorded, at which parts have to end: the order of samples would differ
        between owners."""
        assert self.state is not None
        slot = self.state.slots[number]
        settings = self.state.settings
        most = max(most_samples(settings, ledger, self.age()) for ledger in slot.ledgers)
        for position in note.entered[len(slot.entered) :]:
            least = max([slot.furthest, *slot.entered])
            is_plausible = least <= position <= slot.furthest + most
            if len(slot.entered) >= self.state.phases or not is_plausible:
                return position
            slot.entered.append(position)
        return FURTHEST

    def _read_parts(self, incarnation: str, slot: int, note: Note, last: int) -> None:
        assert self.state is not None
        for part in note.read_parts():
            is_later = isinstance(part, Part) and last < part.end <= FURTHEST and not part.is_loss
            if part.fragment >= len(self.rounds) or is_later:
                continue
            ledger = self.state.slots[slot].ledgers[part.fragment]
            if part.number != ledger.number + 1 or self.rounds[part.fragment].is_busy(slot):
                continue  # decided, and the island has not read it; or waiting, and it stays so
            if isinstance(part, PartHead):
                self._refuse(incarnation, slot, part, Fate.MALFORMED)
                continue
            if (fate := judge(self.state, slot, part, self.age())) is Fate.LOSS:
                self._decide(ledger, fate, part.number, part.end)
            elif fate is not Fate.NONE:
                self._refuse(incarnation, slot, part, fate)
            else:
                self.rounds[part.fragment].waiting[slot] = WaitingPart(incarnation, slot, part)
                self._jobs.append(Fetch(incarnation, part))

    def _decide(self, ledger: Ledger, fate: Fate, number: int, end: int) -> None:
        assert self.state is not None
        decide(ledger, fate, number, settings=self.state.settings, age=self.age(), end=end)

    def _refuse(self, incarnation: str, slot: int, part: Part | PartHead, fate: Fate) -> None:
        assert self.state is not None
        ledger = self.state.slots[slot].ledgers[part.fragment]
        self.rounds[part.fragment].waiting.pop(slot, None)
        end = part.end if isinstance(part, Part) else 0
        self._decide(ledger, fate, part.number, end)
        self.state.history.add_left_out(incarnation, is_lost=fate.is_lost)
        name = f"fragment {part.fragment}, part {part.number} of island {incarnation}"
        remedy = ": if it is that fast, raise `fastest`" if fate is Fate.TOO_LONG else ""
        self.news.say(f"{name} is left out: {fate.words}{remedy}")
        if fate.is_lost:
            is_sick = self._wrong_parts.count(incarnation, part.fragment)
            if is_sick and incarnation not in self.state.told:
                self.state.told[incarnation] = SICK
                self.state.history.note(
                    self.age(), EventKind.WRONG, name_of(incarnation), fate.words
                )

    def on_part(self, incarnation: str, part: Part, fate: Fate) -> None:
        """Process that a part is fetched, or why it is unusable."""
        waiting_part = self.rounds[part.fragment].find(incarnation, part)
        if waiting_part is not None and fate is Fate.NONE:
            waiting_part.is_fetched = True
        elif waiting_part is not None:
            self._refuse(incarnation, waiting_part.slot, part, fate)

    def choose_changes(self, names: Collection[str]) -> list[str]:
        """Return which of all listed changes to read. Those that are done are deleted once the
        decision that says so counts."""
        state = self.state
        committed = self.committed
        if state is None or committed is None or not state.is_founded:
            return []
        if done := tuple(name for name in names if name in committed.done):
            self._jobs.append(DeleteObjects(done))
        return self._changes.choose(state, names, self.presence.listened)

    def on_change(self, name: str, raw: bytes) -> None:
        """Make the change that a person requests, once."""
        if self.state is None or not self.state.is_founded:
            return
        change = self._changes.make(self.state, name, raw)
        if isinstance(change, str):
            self.news.say(f"change {name}: {change}")
        elif change is not None:
            change_name = name.rpartition("/")[2]
            description = describe(change)
            self.news.say(f"change {name}: {description}")
            self.state.history.note(self.age(), EventKind.CHANGED, change_name, description)

    # --- found ------------------------------------------------------------------------------------

    def on_founding(self, incarnation: str, raw: bytes) -> None:
        """Process a founding, which is named after the incarnation."""
        if self.state is not None and self.state.is_founded:
            return
        try:
            self._founders.hear(incarnation, raw)
        except MalformedError as error:
            self.news.say(f"island {incarnation}: {error}")

    def _find_founder(self) -> None:
        """Name a founder, and look for its copies once this decision counts."""
        current = "" if self.state is None else self.state.founder
        founder = self._founders.choose(current)
        if not founder:
            return
        if founder != current:
            founding = self._founders.founding_of(founder)
            self.state = founding.name_founder(self._writer.number + 1, self.session, founder)
            self.news.say(f"island {founder} founds run {founding.run}")
        if self.committed is None or self.committed.founder != founder:
            return
        to_adopt = self._founders.adopt_if_due(founder, self._now)
        if to_adopt is not None:
            self._jobs.append(Adopt(founder, to_adopt))

    def on_adopted(self, incarnation: str, founding: Founding, is_whole: bool) -> None:
        """Found the run with fetched copies, or look for them again, because they are missing or
        not visible yet."""
        if not is_whole:
            self._founders.note_missing(self._now)
            return
        self._begin(founding.decision(self._writer.number + 1, self.session, incarnation))
        for number in range(len(founding.shapes)):
            self._loaded.add(number)
            self.uploads.plan(COPY, number, 0)
            self.uploads.prepare(COPY, number, 0)

    # --- results of jobs --------------------------------------------------------------------------

    def on_loaded(self, fragment: int) -> None:
        self._loaded.add(fragment)

    def on_norms(self, fragment: int, norms: Sequence[float]) -> bool:
        """Process the norms of merged parts. Return whether the result counts: otherwise, a part is
        left out, and the others are merged again."""
        refused = self.rounds[fragment].judge_norms(norms)
        for waiting_part, fate in refused:
            self._refuse(waiting_part.incarnation, waiting_part.slot, waiting_part.part, fate)
        if refused:
            self._merge(self.rounds[fragment])
        return not refused

    def on_merged(self, fragment: int, version: int, checksum: str | None) -> None:
        """Process the checksum of a new version, or None if it would not be finite."""
        if checksum is not None:
            self._checksums[fragment] = checksum
            self.uploads.prepare(VERSION, fragment, version)
            return
        waiting_parts = self.rounds[fragment].merging
        self.rounds[fragment].merging = []
        for waiting_part in waiting_parts:
            incarnation = waiting_part.incarnation
            self._refuse(incarnation, waiting_part.slot, waiting_part.part, Fate.NOT_FINITE)

    def on_snapshot(self, fragment: int, version: int) -> None:
        for kind in (COPY, OUTER):
            self.uploads.prepare(kind, fragment, version)

    def on_uploaded(self, stored: Object) -> None:
        """Name an object that is completely stored."""
        if self.state is None or not self.uploads.finish(stored):
            return
        shared = self.state.fragments[stored.fragment]
        if stored.kind == VERSION:
            self._publish(shared, stored)
        elif stored.kind == COPY:
            shared.copies.append(Stored(stored.version, stored.number))
        else:
            shared.outer = Stored(stored.version, stored.number)
        shared.forget_old()

    def _publish(self, shared: SharedFragment, stored: Object) -> None:
        """Name a version, and announce the next one, so that its upload waits for no decision."""
        assert self.state is not None
        number = stored.fragment
        current = self.rounds[stored.fragment]
        former_version = shared.version
        shared.kept.append(Kept(stored.version, self._checksums.pop(number), stored.number))
        shared.version = stored.version
        for waiting_part in current.merging:
            part = waiting_part.part
            ledger = self.state.slots[waiting_part.slot].ledgers[number]
            self._speeds.measure(waiting_part.incarnation, part, self.presence.listened)
            self._decide(ledger, Fate.MERGED, part.number, part.end)
            ledger.version = shared.version
            shared.clock += part.weight
            self._wrong_parts.note_merged(waiting_part.incarnation, number)
            if self.state.told.get(waiting_part.incarnation) == SICK:
                del self.state.told[waiting_part.incarnation]
            self.seats.note_merged(waiting_part.incarnation)
            note = self.presence.note_of(waiting_part.incarnation)
            is_late = part.base < former_version
            self.state.history.add_merged(waiting_part.incarnation, part.weight, note, late=is_late)
        current.note_merged()
        self.uploads.plan(VERSION, number, shared.version + 1)
        if shared.version >= MEASURED_VERSIONS:
            owners = self.state.owners()
            self.state.settings = self._speeds.limit(self.state.settings, owners)

    def on_recorded(self, number: int) -> None:
        """Take note that an object of the history is stored."""
        self._is_recording = False
        if self.state is not None:
            self.state.history.forget_closed(number)

    def on_committed(self) -> None:
        """Continue after a commit that counts. A superseded syncer is discarded instead."""
        before = self.committed
        dropped = self._writer.on_committed(self._now)
        assert self.committed is not None
        if dropped:
            self._jobs.append(DeleteObjects(dropped))
        self.uploads.commit(self.committed.number)
        earlier = [] if before is None else before.fragments
        pairs = zip(earlier, self.committed.fragments, strict=False)  # none before it is founded
        for number, (old, new) in enumerate(pairs):
            if new.version > old.version:
                self._jobs.append(Settle(number, new.version))
        history = self.committed.history
        if history.closed is not None and not self._is_recording:
            self._is_recording = True
            self._jobs.append(Record(history.number, encode_bin(history.closed)))

    # --- decide -----------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Job]:
        """Decide, and return the jobs."""
        self._now = now
        if self.state is not None and self.state.fragments:
            if self.state.is_founded:
                self._lead(self.state)
            self._jobs += map(Upload, self.uploads.start())
        else:
            self._find_founder()
        if self.state is not None:
            self._write(self.state)
        jobs = self._jobs
        self._jobs = []
        return jobs

    def _lead(self, state: Decision) -> None:
        for handover in self.seats.update(self.age()):
            self._note_handover(state, handover)
        if self.seats.begin_if_due():
            state.history.note(self.age(), EventKind.BEGUN)
        for round_ in self.rounds:
            for waiting_part, fate in round_.drop_refused(self.age()):
                self._refuse(waiting_part.incarnation, waiting_part.slot, waiting_part.part, fate)
            if state.begun and not self.is_stopping:
                round_.open_if_due(self._now)
                if self._is_settled(round_) and round_.close_if_due(self._now):
                    self._merge(round_)
            self._copy_if_due(round_.shared, round_.fragment)
        self._copies.is_asked = False
        ready = {owner for round_ in self.rounds for owner in round_.ready().values()}
        state.ready = [owner for owner in state.owners() if owner in ready]
        self._look_at_owners(state)
        self._end(state)
        if not state.ended:  # a change may undo it
            self._jobs += self._loads
            self._loads = []
        state.history.close_if_due(self.age())

    def _is_settled(self, round_: Round) -> bool:
        """Return whether the newest version is loaded and counts, so that at most one state of a
        fragment stands beside it."""
        assert self.committed is not None
        committed = self.committed.fragments[round_.fragment]
        return round_.fragment in self._loaded and committed.version == round_.shared.version

    def _note_handover(self, state: Decision, handover: Handover) -> None:
        before = handover.before
        after = handover.after
        if after is not None:
            for round_ in self.rounds:
                round_.began[after] = round_.shared.version
        self.news.say(f"slot {handover.slot}: {after or 'free'}")
        is_evicted = state.told.get(before or "") == BARRED
        state.history.note_handover(self.age(), before, after, is_evicted=is_evicted)

    def _look_at_owners(self, state: Decision) -> None:
        """Note which owners have become silent, or are heard again."""
        away = {owner for owner in state.owners() if self.presence.is_silent(owner)}
        for owner in sorted(away ^ (self._away & set(state.owners()))):
            kind = EventKind.AWAY if owner in away else EventKind.BACK
            state.history.note(self.age(), kind, name_of(owner))
        self._away = away

    def _merge(self, round_: Round) -> None:
        """Merge the parts of a closed round, if there are any."""
        if round_.merging:
            version = round_.shared.version + 1
            parts = tuple(round_.merging)
            clock = round_.shared.clock + sum(merged.part.weight for merged in parts)
            weight = round_.weight_of_all
            self._jobs.append(MergeParts(round_.fragment, version, parts, weight, clock))

    def _copy_if_due(self, shared: SharedFragment, number: int) -> None:
        """Write copy and outer state if they are due and the last ones are written."""
        assert self.state is not None
        if number not in self._loaded or self.rounds[number].merging or self.is_stopping:
            return
        if any(self.uploads.is_under_way(kind, number) for kind in (COPY, OUTER)):
            return
        if self._copies.is_due(number, shared, self.state.settings, self._now):
            self._copies.note_begun(number, self._now)
            self.uploads.plan(COPY, number, shared.version)
            self.uploads.plan(OUTER, number, shared.version)
            self._jobs.append(Snapshot(number, shared.version))

    def _end(self, state: Decision) -> None:
        """End the run once it has all tokens and its final copies. A change of the total undoes
        this. A stop in order publishes what is being merged."""
        total = state.settings.total_tokens
        was_ended = state.ended
        state.ended = all(
            shared.clock >= total and shared.copies[-1].version == shared.version
            for shared in state.fragments
        )
        if state.ended and not was_ended:
            state.history.note(self.age(), EventKind.ENDED)
        state.stopped = self.is_stopping and not any(round_.merging for round_ in self.rounds)

    def _write(self, state: Decision) -> None:
        state.number = self._writer.number + 1
        state.age = round(self.age(), 1)
        state.written = round(self._wall + self._now - self._began, 1)
        if not self._writer.is_writing:
            state.writing = self.uploads.announce(state.number)
            owners = [slot.owner for slot in state.slots]
            state.seen = [None if owner is None else self.presence.see(owner) for owner in owners]
        commit = self._writer.write_if_due(state, self._now)
        if commit is not None:
            self._jobs.append(commit)

    @property
    def has_stopped(self) -> bool:
        """Whether it has stopped in order: the decision that says so has taken effect."""
        if self.state is None or not self.state.fragments:
            return self.is_stopping
        return self.is_stopping and self.committed is not None and self.committed.stopped

    def garbage(self, names: list[str]) -> list[str]:
        """Return which of the names of all objects, decisions among them, are garbage."""
        if self.state is None:
            return []
        gone = self.presence.forgotten(self.state)
        if self.state.is_founded:
            self._speeds.forget(gone)
            for round_ in self.rounds:
                round_.forget(gone)
            self._wrong_parts.forget(gone)
        return self._writer.garbage(names, self.presence, gone, self._now)
