"""The process that decides: a pure machine.

Pass it what was read (`on_...`). Run the jobs that `tick` returns, in separate threads for all but
`Commit`, and pass the results back. It never waits for a job, so it decides each second, whatever
the jobs do. A new syncer starts from the newest decision alone. A superseded one is discarded.
"""

import math

from torchtitan_diloco.islands_store.changes import make
from torchtitan_diloco.islands_store.commit import Outcome
from torchtitan_diloco.islands_store.decision import (
    BARRED,
    SICK,
    DamagedError,
    Decision,
    Fate,
    Fragment,
    Kept,
    Stored,
)
from torchtitan_diloco.islands_store.jobs import (
    Adopt,
    Delete,
    Fetch,
    Job,
    Merge,
    Snapshot,
    Upload,
    load,
)
from torchtitan_diloco.islands_store.ledger import decide, judge
from torchtitan_diloco.islands_store.names import (
    COPY,
    OUTER,
    VERSION,
    Object,
)
from torchtitan_diloco.islands_store.note import (
    Founding,
    Note,
    Part,
    PartHead,
    decode_note,
)
from torchtitan_diloco.islands_store.presence import Presence, Seats
from torchtitan_diloco.islands_store.rounds import Round, Waiting
from torchtitan_diloco.islands_store.uploads import Uploads
from torchtitan_diloco.islands_store.writer import Writer

COPY_VERSIONS, COPY_SECONDS = 8, 600.0
"""A copy is written if one is requested that is this many versions newer, or after this time."""
WRONG_IN_A_ROW = 16
"""Number of wrong parts of an island in a fragment, without a good one, after which it loses its
slot."""
MOST_DONE = 64
YEARS = 1e9


class Syncer:
    def __init__(
        self, decision: Decision | None, session: str, now: float, wall: float, newest: int = 0
    ) -> None:
        """Lead, starting from the newest decision. `wall`: time of day in seconds.

        `newest`: number of the newest one if the syncer starts from an older one, because the store
        was restored and has lost objects of the newest one. Islands notice that earlier decisions
        are no longer valid.
        """
        self.session = session
        self.presence = Presence()
        self.news = list[str]()
        """Messages for users."""
        self.is_stopping = False
        self._now, self._began, self._wall, self._age = now, now, wall, 0.0
        self._jobs = list[Job]()
        self._writer = Writer(decision, newest, now)
        self._adopting: str | None = None
        self._is_asked = False  # for newer copies
        self.state = decision
        if decision is not None:
            self._begin(decision)

    def _begin(self, state: Decision) -> None:
        self.state = state
        state.session, state.stopped, state.writing = self.session, False, []
        away = self._wall - state.written if state.written else 0.0
        self._age = max(self._age, state.age + min(max(0.0, away), YEARS))
        fragments = range(len(state.fragments))
        self.uploads = Uploads()
        self.rounds = [Round(state, self.presence, number) for number in fragments]
        for one in state.fragments:
            one.is_open = False
        self.seats = Seats(state, self.presence, self._is_busy)
        self._loaded, self._rewrites = set[int](), set[int]()
        self._copied_at = dict.fromkeys(fragments, self._now)
        self._checksums = dict[int, str]()  # of the versions that are being uploaded
        self._wrong = dict[tuple[str, int], int]()
        if state.is_founded:
            self._jobs += [load(shared, number) for number, shared in enumerate(state.fragments)]

    def age(self) -> float:
        return self._age + self._now - self._began

    def _is_busy(self, slot: int) -> bool:
        return any(one.is_busy(slot) for one in self.rounds)

    # --- what it hears ----------------------------------------------------------------------------

    def on_poll(self, now: float) -> None:
        """All existing notes and changes were passed."""
        self.presence.listen(now)

    def on_note(self, incarnation: str, raw: bytes) -> None:
        """Process the note of an incarnation of an island, whose name is that of the object."""
        try:
            note = decode_note(raw)
        except DamagedError as error:
            self._say(f"island {incarnation}: {error}")
            return
        if not self.presence.hear(incarnation, note):
            return
        if self.state is None or not self.state.is_founded:
            self._consider(incarnation, note)
            return
        self._is_asked = self._is_asked or note.needs_copies
        self._read_parts(incarnation, note)

    def _say(self, line: str) -> None:
        if line not in self.news[-8:]:
            self.news.append(line)

    def _read_parts(self, incarnation: str, note: Note) -> None:
        assert self.state is not None
        slot = self.state.slot_of(incarnation)
        if slot is None or self.state.told.get(incarnation) in (BARRED, SICK):
            return
        for part in note.read_parts():
            if part.fragment >= len(self.rounds):
                continue
            ledger = self.state.slots[slot].ledgers[part.fragment]
            if part.number != ledger.number + 1 or self.rounds[part.fragment].is_busy(slot):
                continue  # decided, and the island has not read it; or waiting, and it stays so
            if isinstance(part, PartHead):
                self._refuse(incarnation, slot, part, Fate.MALFORMED)
                continue
            if (fate := judge(self.state, slot, part, self.age())) is Fate.LOSS:
                decide(ledger, fate, part.number, part.end)
            elif fate is not Fate.NONE:
                self._refuse(incarnation, slot, part, fate)
            else:
                self.rounds[part.fragment].waiting[slot] = Waiting(incarnation, slot, part)
                self._jobs.append(Fetch(incarnation, part))

    def _refuse(self, incarnation: str, slot: int, part: Part | PartHead, fate: Fate) -> None:
        assert self.state is not None
        ledger = self.state.slots[slot].ledgers[part.fragment]
        self.rounds[part.fragment].waiting.pop(slot, None)
        decide(ledger, fate, part.number, part.end if isinstance(part, Part) else 0)
        what = f"fragment {part.fragment}, part {part.number} of island {incarnation}"
        self._say(f"{what} is left out: {fate.words}")
        if fate.is_lost:
            key = incarnation, part.fragment
            self._wrong[key] = self._wrong.get(key, 0) + 1
            if self._wrong[key] >= WRONG_IN_A_ROW:
                self.state.told[incarnation] = SICK

    def on_part(self, incarnation: str, part: Part, found: float | Fate) -> None:
        """Process the norm of a fetched part, or why it is unusable."""
        one = self._waiting(incarnation, part)
        if one is None:
            return
        if isinstance(found, Fate):
            self._refuse(incarnation, one.slot, part, found)
        elif not math.isfinite(found):
            self._refuse(incarnation, one.slot, part, Fate.NOT_FINITE)
        else:
            one.norm = found

    def _waiting(self, incarnation: str, part: Part) -> Waiting | None:
        waiting = self.rounds[part.fragment].waiting.values()
        return next(
            (one for one in waiting if (one.incarnation, one.part) == (incarnation, part)), None
        )

    def on_change(self, name: str, raw: bytes) -> None:
        """Apply the change that a person requests, once."""
        state = self.state
        if state is None or not state.is_founded:
            return
        if name in state.done:
            self._jobs.append(Delete((name,)))
            return
        reason = ""
        try:
            make(state, raw)
        except DamagedError as error:
            reason = str(error)[:200]
        self._say(f"change {name}: {reason or 'made'}")
        state.done[name] = reason
        while len(state.done) > MOST_DONE:
            del state.done[next(iter(state.done))]

    # --- found ------------------------------------------------------------------------------------

    def _consider(self, incarnation: str, note: Note) -> None:
        founding = note.read_founding()
        if founding is None or self._adopting is not None:
            return
        self._adopting = incarnation
        self._jobs.append(Adopt(incarnation, founding))

    def on_adopted(self, founding: Founding, is_whole: bool) -> None:
        """Found the run with fetched copies, or look for a founder again, because they may become
        visible later."""
        if not is_whole:
            self._adopting = None
            return
        self._begin(founding.decision(self._writer.number, self.session))
        for number in range(len(founding.elements)):
            self._loaded.add(number)
            self.uploads.plan(COPY, number, 0)
            self.uploads.prepare(COPY, number, 0)

    # --- results of jobs --------------------------------------------------------------------------

    def on_loaded(self, fragment: int) -> None:
        self._loaded.add(fragment)

    def on_merged(self, fragment: int, version: int, checksum: str | None) -> None:
        """Process the checksum of a new version, or None if it would not be finite."""
        if checksum is not None:
            self._checksums[fragment] = checksum
            self.uploads.prepare(VERSION, fragment, version)
            return
        self.uploads.cancel(VERSION, fragment, version)
        parts, self.rounds[fragment].merging = self.rounds[fragment].merging, []
        for one in parts:
            self._refuse(one.incarnation, one.slot, one.part, Fate.NOT_FINITE)

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
            if stored.fragment in self._rewrites:
                self._rewrites.discard(stored.fragment)
                del shared.copies[:-1]
        else:
            shared.outer = Stored(stored.version, stored.number)
        shared.forget_old()

    def _publish(self, shared: Fragment, stored: Object) -> None:
        assert self.state is not None
        number, current = stored.fragment, self.rounds[stored.fragment]
        checksum = self._checksums.pop(number)
        shared.kept.append(Kept(stored.version, checksum, stored.number))
        shared.version = stored.version
        for one in current.merging:
            ledger = self.state.slots[one.slot].ledgers[number]
            decide(ledger, Fate.MERGED, one.part.number, one.part.end)
            ledger.version, ledger.since = shared.version, int(self.age())
            shared.clock += one.part.weight
            self._wrong.pop((one.incarnation, number), None)
        current.note_merged()

    def on_committed(self, number: int, outcome: Outcome) -> None:
        """Continue after a commit that counts. A superseded syncer is discarded instead."""
        dropped = self._writer.on_committed(number, self._now)
        if dropped:
            self._jobs.append(Delete(dropped))
        self.uploads.commit(number)
        if outcome is Outcome.RESTORED:
            self._say("the store has lost decisions: writing all copies again")
            self._rewrite()

    def _rewrite(self) -> None:
        """Stop naming objects that the store may have lost. Islands take the next copies."""
        assert self.state is not None
        for number, shared in enumerate(self.state.fragments):
            shared.kept = [Kept(one.version, one.checksum, 0) for one in shared.kept]
            shared.outer = None
            self._rewrites.add(number)

    # --- decide -----------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Job]:
        """Decide, and return the jobs."""
        self._now = now
        if self.state is not None:
            if self.state.is_founded:
                self._lead(self.state)
            self._jobs += map(Upload, self.uploads.start())
            self._write(self.state)
        jobs, self._jobs = self._jobs, []
        return jobs

    def _lead(self, state: Decision) -> None:
        for number, owner in self.seats.update(self.age()):
            for one in self.rounds:
                if owner is not None:
                    one.began[owner] = one.shared.version
            self._say(f"slot {number}: {owner or 'free'}")
        state.begun = state.begun or len(state.owners()) >= state.settings.start_with
        for one in self.rounds:
            for waiting, fate in one.drop_refused(self.age()):
                self._refuse(waiting.incarnation, waiting.slot, waiting.part, fate)
            if state.begun and not self.is_stopping and one.open_if_due(self._now):
                # Announced now, its upload need not wait for a decision once it is merged.
                self.uploads.plan(VERSION, one.fragment, one.shared.version + 1)
            if one.fragment in self._loaded:
                self._close(one)
            self._copy_if_due(one.shared, one.fragment)
        self._is_asked = False
        ready = {owner for one in self.rounds for owner in one.ready().values()}
        state.ready = [owner for owner in state.owners() if owner in ready]
        self._end(state)

    def _close(self, one: Round) -> None:
        closed, version = one.close_if_due(self._now), one.shared.version + 1
        if closed is None:
            if not one.shared.is_open and not one.merging:  # its parts were refused
                self.uploads.cancel(VERSION, one.fragment, version)
            return
        parts, weight = closed
        for slot in one.outliers(parts):
            outlier = next(part for part in parts if part.slot == slot)
            self._refuse(outlier.incarnation, slot, outlier.part, Fate.OUTLIER)
            parts.remove(outlier)
            weight -= outlier.part.weight
        if parts:
            self._jobs.append(Merge(one.fragment, version, tuple(parts), weight))
        else:
            self.uploads.cancel(VERSION, one.fragment, version)

    def _copy_if_due(self, shared: Fragment, number: int) -> None:
        """Write copy and outer state if they are due and the last ones are written."""
        assert self.state is not None
        if number not in self._loaded or self.rounds[number].merging:
            return
        if any(self.uploads.is_under_way(kind, number) for kind in (COPY, OUTER)):
            return
        settings, behind = self.state.settings, shared.version - shared.copies[-1].version
        is_due = behind >= settings.copies_every or number in self._rewrites
        is_due |= behind >= COPY_VERSIONS and self._is_asked
        is_due |= behind > 0 and self._now - self._copied_at[number] > COPY_SECONDS
        is_over = shared.clock >= settings.total_tokens
        is_due |= behind > 0 and is_over
        outer = None if shared.outer is None else shared.outer.version
        is_due |= self.is_stopping and shared.version > 0 and outer != shared.version
        if is_due:
            self._copied_at[number] = self._now
            self.uploads.plan(COPY, number, shared.version)
            self.uploads.plan(OUTER, number, shared.version)
            self._jobs.append(Snapshot(number, shared.version))

    def _end(self, state: Decision) -> None:
        """End the run once it has all tokens and its final copies. A change of the total undoes
        this."""
        total = state.settings.total_tokens
        state.ended = all(
            one.clock >= total and one.copies[-1].version == one.version for one in state.fragments
        )
        if self.is_stopping:
            is_saved = all(
                one.version == 0 or (one.outer is not None and one.outer.version == one.version)
                for one in state.fragments
            )
            state.stopped = (
                is_saved and not self.uploads and not any(r.merging for r in self.rounds)
            )

    def _write(self, state: Decision) -> None:
        state.number = self._writer.number + 1
        state.age = round(self.age(), 1)
        state.written = round(self._wall + self._now - self._began, 1)
        if not self._writer.is_writing:
            state.writing = self.uploads.announce(state.number)
        commit = self._writer.write_if_due(state, self._now)
        if commit is not None:
            self._jobs.append(commit)

    @property
    def has_stopped(self) -> bool:
        """Whether the decision that says so has taken effect."""
        return self.state is not None and self.state.stopped and not self._writer.is_writing

    def garbage(self, names: list[str]) -> list[str]:
        """Return which of all names are garbage."""
        if self.state is None:
            return []
        gone = self.presence.forgotten(self.state)
        return self._writer.garbage(names, self.presence, gone, self._now)
