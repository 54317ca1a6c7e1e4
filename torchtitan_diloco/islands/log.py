"""State of a run, computed by reading its log in order.

All islands read the same records in the same order, so they have the same state. All of them skip
a record that is not valid at its position. An island learns the outcome of a record that it has
appended when it reads it back. There is no I/O, no clock and no arithmetic in this module.
"""

from collections.abc import Iterable, Mapping

import msgspec

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.changes import changed
from torchtitan_diloco.islands.ledger import Entry, Fragment, Ledger, Outcome, Slot, count_vote
from torchtitan_diloco.islands.records import (
    LARGEST,
    AnyRecord,
    Change,
    Close,
    DisputeError,
    Done,
    End,
    Evict,
    Facts,
    Give,
    Open,
    Part,
    Refusal,
    SlotRecord,
    Take,
    VoidError,
    decode,
    digest,
    encode,
    name_of,
)

VERSIONS_LATE = 4
"""Number of entries that may leave a part out. If the next one does too, the part is dropped."""
VERSIONS_KNOWN = 2 * VERSIONS_LATE
"""Latest versions of a fragment whose checksums are known, to compare them with other islands."""
MOST_SAMPLES = 2**32
"""Maximum number of samples of a part. After a false record with more, the next sample might have
no valid number."""
LATEST_NORMS = 32  # norms of merged parts with which later parts of the fragment are compared


class State(msgspec.Struct):
    """State after the records read so far. Pass every record to `read`, in order.

    Only the list of all incarnations of islands grows with the log. A reader can start from a
    stored state.
    """

    sequence: int = 0
    newest: str = ""  # hash of the last record
    verifies: bool = True
    """Whether checksums are compared. False: for a reader without parameters."""
    facts: Facts | None = None
    slots: list[Slot] = []
    fragments: list[Fragment] = []
    incarnations: list[str] = []
    evicted: list[str] = []
    begun: bool = False
    ended: bool = False

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "State":
        return msgspec.json.decode(raw, type=cls)

    def learn(self, fragment: int, version: int, checksum: str) -> None:
        """Record the checksum that this island has computed, before the next record is read."""
        self.fragments[fragment].checksums[version] = checksum

    def adopt(
        self, fragment: int, snapshot: tuple[int, str, str], records: Iterable[AnyRecord]
    ) -> bool:
        """Learn the checksums of all versions up to a snapshot, to validate the records before it.

        The chain of hashes identifies the valid closes, from the entry of the snapshot back
        to the last one that this state has read. Return whether all of them are in `records`.

        `snapshot`: version, hash of the entry that created it, and checksum.
        """
        version, head, checksum = snapshot
        known, state = {version: checksum}, self.fragments[fragment]
        closes = [one for one in records if isinstance(one, Close) and one.fragment == fragment]
        by_hash = {digest(encode(close)): close for close in closes}
        while head != state.head:
            if head not in by_hash:
                return False
            close = by_hash.pop(head)
            known[close.version - 1], head = close.checksum, close.previous
        if min(known) != state.version:
            return False
        state.checksums |= dict(sorted(known.items()))
        return True

    def read(self, sequence: int, raw: bytes) -> Outcome:
        """Apply or skip a record. Raises a UserError only for a gap in the log."""
        if sequence != self.sequence + 1:
            raise UserError(
                f"record {sequence} of the log follows record {self.sequence}: "
                "records were deleted, so the run cannot be continued from this log: "
                "start a new run with `serve` in an empty folder"
            )
        self.sequence, self.newest = sequence, digest(raw)
        record = None
        try:
            record = decode(raw)
            entry = self._accept(record)
        except VoidError as error:
            return Outcome(record, void=str(error), disputed=isinstance(error, DisputeError))
        if isinstance(record, Open | Part | Close):
            self.fragments[record.fragment].last = sequence
        evicts = isinstance(record, Evict) and record.target in self.evicted
        return Outcome(record, entry=entry, evicts=evicts)

    def preview(self, record: Close) -> Entry | None:
        """Return the entry that a close would create as the next record, or None if it is void."""
        try:
            self._check_writer(record)
            return self._entry_of(record)
        except VoidError:
            return None

    def is_short(self, fragment: Fragment) -> bool:
        """Return whether the run cannot end yet because the fragment lacks more than a cycle. A run
        of less than two cycles may end before the first round of a fragment."""
        assert self.facts is not None
        total, cycle = self.facts.total_tokens, self.facts.cycle
        return total >= 2 * cycle and fragment.clock < total - cycle

    @property
    def is_complete(self) -> bool:
        """Whether all fragments have merged their tokens."""
        return not any(self.is_short(fragment) for fragment in self.fragments)

    @property
    def run(self) -> str:
        return self.facts.run if self.facts else ""

    @property
    def clocks(self) -> tuple[int, ...]:
        return tuple(fragment.clock for fragment in self.fragments)

    @property
    def positions(self) -> tuple[int, ...]:
        """First sample of each slot that no fragment has merged."""
        return tuple(max(one.taken_to for one in slot.ledgers) for slot in self.slots)

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(fragment.head for fragment in self.fragments)

    def owners(self) -> dict[int, str]:
        return {number: slot.owner for number, slot in enumerate(self.slots) if slot.owner}

    def build_close(
        self,
        fragment: int,
        by: tuple[int, str],
        parts: Mapping[int, float],
        refused: tuple[Refusal, ...],
        lr: float,
    ) -> Close:
        """Return the only valid close of these parts.

        `by`: slot and incarnation. `parts`: norm of each part, by sequence number.
        """
        assert self.facts is not None
        state = self.fragments[fragment]
        names = sorted(parts, key=lambda sequence: state.waiting[sequence].slot)
        weights = tuple(state.waiting[sequence].weight for sequence in names)
        return Close(
            run=self.facts.run,
            slot=by[0],
            incarnation=by[1],
            fragment=fragment,
            version=state.version + 1,
            after=state.last,
            previous=state.head,
            checksum=state.checksums.get(state.version, ""),
            parts=tuple(names),
            weights=weights,
            norms=tuple(parts[sequence] for sequence in names),
            refused=refused,
            clock=state.clock + sum(weights),
            lr=lr,
        )

    # --- validity ---------------------------------------------------------------------------------

    def _accept(self, record: AnyRecord) -> Entry | None:
        if isinstance(record, Facts):
            _check(self.facts is None, "the run has its facts")
            self._set_facts(record)
            return None
        if isinstance(record, Change):
            self._change(record)
            return None
        self._check_writer(record)
        match record:
            case Take():
                self._take(record)
            case Give():
                self.slots[record.slot].owner = None
            case Evict():
                if count_vote(record, self.slots, self.fragments):
                    self.evicted.append(record.target)
            case Done():
                _check(self.is_complete, "the run has not merged its tokens")
                self.slots[record.slot].done = True
            case Open():
                fragment = self.fragments[record.fragment]
                _check(record.version == fragment.version + 1, "not the next version")
                _check(fragment.open is None, "the round is open")
                total = self.facts.total_tokens if self.facts else 0
                _check(fragment.clock < total, "the fragment has merged all tokens of the run")
                fragment.open = record
            case Part():
                self._part(record)
            case Close():
                return self._close(record)
            case End():
                self._end(record)
        return None

    def _check_writer(self, record: SlotRecord) -> None:
        if self.facts is None:
            raise VoidError("before the facts")
        _check(record.run == self.facts.run, f"belongs to the run {record.run}")
        _check(not self.ended, "the run has ended")
        _check(record.slot < len(self.slots), f"there is no slot {record.slot}")
        if isinstance(record, Take):
            return
        slot = self.slots[record.slot]
        owner = slot.owner or "nobody"
        _check(slot.owner == record.incarnation, f"slot {record.slot} belongs to {owner}")
        if isinstance(record, Open | Part | Close):
            _check(record.fragment < len(self.fragments), f"there is no fragment {record.fragment}")
        if isinstance(record, Open | Part | Done):
            _check(not slot.done, "its writer is done")

    def _change(self, change: Change) -> None:
        """Change the facts. If the run becomes longer, it continues after its end."""
        if self.facts is None or change.run != self.facts.run:
            raise VoidError(f"belongs to the run {change.run}")
        facts, before = changed(self.facts, change), self.facts.total_tokens
        facts.check_size()
        self.facts = facts
        added = range(facts.slots - len(self.slots))
        self.slots += [Slot([Ledger() for _ in self.fragments]) for _ in added]
        if facts.total_tokens > before:
            self.ended = False
            for slot in self.slots:
                slot.done = False

    def _set_facts(self, facts: Facts) -> None:
        facts.check_size()
        self.facts, head = facts, digest(encode(facts))
        size = len(facts.checksums)
        _check(len(facts.clocks) in (0, size), "has not one clock for each fragment")
        merged, total = max(facts.clocks, default=0), facts.total_tokens
        _check(
            merged < total, f"{merged:,} tokens are already merged, which is more than {total:,}"
        )
        _check(max(facts.positions, default=0) <= LARGEST // 2, "continues beyond any sample")
        clocks = facts.clocks or (0,) * size
        self.fragments = [
            Fragment(head, {0: checksum}, clock=clock)
            for checksum, clock in zip(facts.checksums, clocks, strict=True)
        ]
        starts = [*facts.positions[: facts.slots], *[0] * (facts.slots - len(facts.positions))]
        self.slots = [Slot([Ledger(merged=start) for _ in clocks]) for start in starts]

    def _take(self, take: Take) -> None:
        """Make the new owner start after all samples that any fragment has merged.

        Earlier samples are lost to the other fragments. Later ones are read again, unless the owner
        has given the slot back: then its waiting parts still count, and the new one starts after
        them.
        """
        slot = self.slots[take.slot]
        _check(slot.owner == take.replaces, f"slot {take.slot} belongs to {slot.owner or 'nobody'}")
        _check(take.incarnation not in self.incarnations, "an incarnation takes a slot only once")
        for number, owner in self.owners().items():
            same = name_of(owner) == name_of(take.incarnation) and number != take.slot
            _check(not same, f"its island has slot {number}")
        self.incarnations.append(take.incarnation)
        waiting = [fragment.waiting_of(take.slot) for fragment in self.fragments]
        if take.replaces is not None:
            for fragment in self.fragments if any(waiting) else ():
                parts = fragment.waiting.items()
                fragment.waiting = {n: part for n, part in parts if part.slot != take.slot}
            waiting = [None] * len(waiting)
        ends = [part.end for part in waiting if part is not None]
        start = max([*(ledger.taken_to for ledger in slot.ledgers), *ends])
        slot.read_twice += max(0, slot.read_to - start)
        for part, ledger, fragment in zip(waiting, slot.ledgers, self.fragments, strict=True):
            ledger.number, ledger.entries, ledger.since = 0, 0, fragment.version
            if part is None:  # else once the part is merged or given up
                ledger.lose(start)
        slot.owner, slot.start, slot.read_to, slot.done = take.incarnation, start, start, False
        slot.votes = []
        assert self.facts is not None
        self.begun = self.begun or len(self.owners()) >= min(self.facts.begin, self.facts.slots)

    def _part(self, part: Part) -> None:
        slot, fragment = self.slots[part.slot], self.fragments[part.fragment]
        ledger = slot.ledgers[part.fragment]
        _check(part.number > ledger.number, f"part {part.number} of its writer is already known")
        _check(part.number - ledger.number <= MOST_SAMPLES, "its number leaves none after it")
        _check(fragment.waiting_of(part.slot) is None, "another part of the slot is waiting")
        _check(part.start == ledger.taken_to, f"starts at {part.start}, not at {ledger.taken_to}")
        _check(part.end > part.start, "has no data")
        _check(part.end - part.start <= MOST_SAMPLES, "has more samples than any island reads")
        assert self.facts is not None
        _check(part.weight <= self.facts.most_weight, "has a weight above that of any outage")
        _check(part.finite or not part.weight, "has weight, and is not finite")
        oldest = max(ledger.merged_in, fragment.version - VERSIONS_LATE)
        # A delta from before the merge of the last part would contain that part again.
        _check(part.base >= oldest, f"relative to version {part.base}, older than {oldest}")
        _check(part.base <= fragment.version, f"there is no version {part.base}")
        self._check_sum(part.fragment, part.base, part.checksum)
        ledger.number = part.number
        slot.read_to = max(slot.read_to, part.end)
        fragment.waiting[self.sequence] = part

    def _entry_of(self, close: Close) -> Entry:
        fragment = self.fragments[close.fragment]
        _check(fragment.open is not None, "no round is open")
        refused = [refusal.part for refusal in close.refused]
        named = [*close.parts, *refused]
        _check(bool(named), "takes nothing")
        _check(len(set(named)) == len(named), "names a part twice")
        for number in named:
            _check(number in fragment.waiting, f"record {number} is not a waiting part")
        _check(len(close.norms) == len(close.parts), "has not one norm for each part")
        assert self.facts is not None
        _check(close.lr <= self.facts.outer_lr, f"lr is above {self.facts.outer_lr}")
        by = close.slot, close.incarnation
        norms = dict(zip(close.parts, close.norms, strict=True))
        valid = self.build_close(close.fragment, by, norms, close.refused, close.lr)
        self._check_sum(close.fragment, fragment.version, close.checksum)
        for name in Close.__struct_fields__:
            found, right = getattr(close, name), getattr(valid, name)
            known = name != "checksum"  # checked above, if at all
            _check(found == right or not known, f"{name} is {found}, not {right}")
        outliers = [refusal.part for refusal in close.refused if refusal.outlier]
        taken = (fragment.waiting[number] for number in close.parts)
        return Entry(close, tuple(taken), tuple(fragment.waiting[one] for one in outliers))

    def _close(self, close: Close) -> Entry:
        entry, fragment = self._entry_of(close), self.fragments[close.fragment]
        named = *close.parts, *(refusal.part for refusal in close.refused)
        for part in (*entry.parts, *entry.outliers):
            ledger = self.slots[part.slot].ledgers[close.fragment]
            if entry.is_lost(part):
                ledger.lose(part.end)
            else:
                ledger.merged += part.end - part.start
                ledger.good_in, self.slots[part.slot].votes = close.version, []
            ledger.merged_in = close.version
            ledger.entries += 1
        norms = zip(entry.parts, close.norms, strict=True)
        fragment.norms += [norm for part, norm in norms if part.weight]
        del fragment.norms[:-LATEST_NORMS]
        fragment.version, fragment.clock = close.version, close.clock
        fragment.checksums.pop(close.version - VERSIONS_KNOWN, None)
        fragment.head, fragment.open = digest(encode(close)), None
        oldest = close.version - VERSIONS_LATE
        for number, part in list(fragment.waiting.items()):
            if part.base < oldest or number in named:
                del fragment.waiting[number]
                slot = self.slots[part.slot]
                if slot.owner not in (None, part.incarnation):  # the next owner goes on after it
                    slot.ledgers[close.fragment].lose(slot.start)
        return entry

    def _end(self, end: End) -> None:
        _check(end.heads == self.heads, "an entry was made since")
        _check(self.is_complete, "the run has not merged its tokens")
        for slot in self.slots:
            ready = slot.owner is None or slot.done or slot.owner in end.absent
            _check(ready, f"{slot.owner} is not done")
        self.ended = True

    def _check_sum(self, fragment: int, version: int, found: str) -> None:
        if self.verifies and found != self.fragments[fragment].checksums.get(version):
            reason = f"checksum of version {version} is {found}, not what this process computes"
            raise DisputeError(reason)


def _check(valid: bool, reason: str) -> None:
    if not valid:
        raise VoidError(reason)
