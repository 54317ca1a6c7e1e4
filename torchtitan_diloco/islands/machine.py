"""One island without I/O: how it joins, what it appends, and what it does between two steps.

The leader's threads and the simulations of the tests drive it alike. Pass every record to `read`,
in order. Append what `records` returns, whenever something has happened. Between two steps, do what
`boundary` says. The monotonic clock is passed as `now`.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from torchtitan_diloco.islands.log import Entry, Outcome, State
from torchtitan_diloco.islands.members import Hint, IslandFencedError, Members, name_of
from torchtitan_diloco.islands.records import Give, Part, Record, Take, attempt_of
from torchtitan_diloco.islands.rounds import Checked, Mode, Timing
from torchtitan_diloco.islands.rules import Island
from torchtitan_diloco.log import UserError

RETRY = 0.5
"""Seconds between attempts to append a record: only the log shows whether it is valid."""
AWAY = 10.0
"""Seconds without a connection after which a leaving island gives up sending its work."""


class Due(msgspec.Struct, frozen=True):
    """Apply the next version of a fragment to the parameters."""

    fragment: int
    version: int
    mode: Mode
    own: bool
    """Whether the version contains a part of this island."""
    weight: int
    participants: int
    received: int
    """Bytes of the parts of other islands."""
    waited: float = 0.0
    """Seconds for which training has waited."""


class Boundary(msgspec.Struct, frozen=True):
    """What to do between two steps, on all ranks: apply, then take the deltas of the parts."""

    clock: int
    stopped: bool = False
    may_train_on: bool = False
    """Stopped until it is known whether the run has merged its tokens."""
    leaving: bool = False
    """Before the end of the run."""
    over: bool = False
    """Nothing is left to send or apply."""
    applied: list[Due] = []
    sent: list[Part] = []
    waits_until: float | None = None
    """Training waits: ask again when something has happened, or at this time."""


class Machine:
    def __init__(
        self,
        incarnation: str,
        members: Members,
        timing: Timing,
        checksum: Callable[[int, int], str],
        lr: float,
    ) -> None:
        """`checksum` returns this island's checksum of a fragment's version. `lr`: outer."""
        self.incarnation, self.members, self.timing = incarnation, members, timing
        self.state = State(checksum)
        self.island: Island | None = None
        """Decisions about the run, once it has begun and this island has a slot."""
        self.stored = dict[int, Part]()
        """Latest own part of each fragment, if its chunks are stored."""
        self.notices, self.news = list[str](), list[str]()
        """Warnings for the user, and which islands come and go."""
        self._silent = set[str]()
        self._checksum, self._lr = checksum, lr
        self._attempts = dict[tuple[object, ...], float]()
        """Time at which each record was last appended."""

    @property
    def joined(self) -> Island:
        assert self.island is not None, "join() comes first"
        return self.island

    # --- the log ----------------------------------------------------------------------------------

    def read(self, sequence: int, raw: bytes, now: float) -> Outcome:
        self.members.tick(now)
        if self.island is None:
            return self.state.read(sequence, raw)
        outcome = self.island.read(sequence, raw, now)
        if outcome.entry is not None:
            self.notices += left_out(outcome.entry)
        record = outcome.record
        is_other = isinstance(record, Take | Give) and record.incarnation != self.incarnation
        if isinstance(record, Take | Give) and is_other and not outcome.void:
            does = "takes part" if isinstance(record, Take) else "leaves"
            self.news.append(f"island {name_of(record.incarnation)} {does}")
        return outcome

    def _note_silent(self, now: float) -> None:
        """Note which islands are not heard any more, or again."""
        if self.members.is_new(now):
            return
        owners = set(self.state.owners().values()) - {self.incarnation}
        silent = {owner for owner in owners if self.members.is_gone(owner, now)}
        for owner in sorted(silent - self._silent):
            self.notices.append(f"island {name_of(owner)} is silent: rounds do not wait for it")
        for owner in sorted((self._silent - silent) & owners):
            self.news.append(f"island {name_of(owner)} is heard again")
        self._silent = silent

    def records(self, checked: Mapping[int, Checked], now: float) -> list[Record]:
        """Return the records to append now.

        `checked`: what this island has found in the waiting parts, by sequence number. Raises an
        IslandFencedError if another island has the slot.
        """
        self.members.tick(now)
        island = self.island
        if island is not None:
            self._note_silent(now)
        due = [self._take(now)] if island is None else self._decisions(island, checked, now)
        self._attempts = {key: at for key, at in self._attempts.items() if now < at + RETRY}
        found = list[Record]()
        for record in due:
            if record is not None and (key := attempt_of(record)) not in self._attempts:
                self._attempts[key] = now
                found.append(record)
        return found

    def _take(self, now: float) -> Take | None:
        """Return the record that takes a free slot, or the one of an earlier start. Once the run
        has begun, decide."""
        state, owners = self.state, self.state.owners()
        mine = [slot for slot, owner in owners.items() if owner == self.incarnation]
        if mine or state.facts is None:
            if state.begun and mine:
                self.island = Island(state, self.members, mine[0], self.timing, now=now)
            return None
        if state.ended:
            raise UserError(
                "the run has ended: its model is in the folders of its islands; for another run, "
                "`serve` a new folder"
            )
        if self.incarnation in state.incarnations:
            raise IslandFencedError("the slot of this island was taken before the run began")
        free = self.members.slot_to_take(state, self.incarnation, now)
        if free is None:
            return None
        slot, replaces = free
        who = self.incarnation
        return Take(run=state.facts.run, incarnation=who, slot=slot, replaces=replaces)

    def waits_for(self, now: float) -> str:
        """Return what an island that is not in the run yet waits for, empty if it need not."""
        facts, owners = self.state.facts, self.state.owners()
        if facts is not None and self.incarnation in owners.values() and not self.state.begun:
            here = ", ".join(map(name_of, owners.values()))
            return f"waiting until {facts.begin} islands are there; here are {here}"
        if len(owners) == len(self.state.slots) and not self.members.is_new(now):
            return f"waiting for a free slot: all {len(owners)} have an owner"
        return ""

    def _decisions(
        self, island: Island, checked: Mapping[int, Checked], now: float
    ) -> Iterator[Record | None]:
        for text in island.settle_disputes(now):
            self.notices.append(f"{text}; another island has those of this one")
        if island.fenced or self.state.ended:
            if island.fenced and not island.left:
                raise IslandFencedError(
                    f"slot {island.slot} of this island was taken by "
                    f"{self.state.slots[island.slot].owner}: it ends; what it has done since its "
                    "last part is not in the run"
                )
            return
        for fragment, rounds in enumerate(island.rounds):
            yield rounds.open()
            yield rounds.close(checked, self._lr, now)
            stored = self.stored.get(fragment)
            if rounds.under_way and rounds.sent and stored is not None:
                yield stored if stored.number == rounds.sent.number else None
        yield island.last_record(now)

    def hint(self, *, caught_up: bool) -> Hint:
        """Return the heartbeat. `caught_up`: with the log."""
        island = self.island
        if island is None:
            return Hint(self.incarnation, 0, 0, 0.0, caught_up)
        where = island.step, island.tokens, island.step_seconds
        return Hint(self.incarnation, *where, caught_up, island.leaving)

    # --- between two steps ------------------------------------------------------------------------

    def finish_step(self, samples: int, weight: int, seconds: float, *, leaving: bool) -> None:
        self.joined.finish_step(samples, weight, seconds)
        self.joined.leaving = leaving

    def stop(self) -> None:
        """Take no more steps. Before the end of the run, leave it."""
        island = self.joined
        island.leaving = island.leaving or not island.stopped or island.may_train_on
        island.stopped = True

    def boundary(self, now: float, away: float = 0.0) -> Boundary:
        """Return what to do now. `away`: seconds without a connection.

        Without a delay, deltas are taken before their results are waited for.
        """
        island, delayed = self.joined, self.timing.schedule.delay > 0
        island.look_at_end(now)
        sent = [] if delayed else self._sends(now)
        applied, until = ([], now) if sent else self._applies(now)
        if delayed and until is None:
            sent = self._sends(now)
        return Boundary(
            clock=island.clock,
            stopped=island.stopped,
            may_train_on=island.may_train_on,
            leaving=island.leaving,
            over=island.stopped and until is None and self._is_over(away),
            applied=applied,
            sent=sent,
            waits_until=until,
        )

    def _applies(self, now: float) -> tuple[list[Due], float | None]:
        """Return what to apply, and until when training waits for more."""
        applied, limits = list[Due](), list[float]()
        for fragment, rounds in enumerate(self.joined.rounds):
            while (mode := rounds.next_mode()) is not None:
                applied.append(self._due(fragment, rounds.unapplied[0], mode))
                rounds.finish_apply(now)
            limit = rounds.wait_until()
            if limit is not None and now < limit:
                limits.append(limit)
        return applied, min(limits, default=None)

    def _due(self, fragment: int, entry: Entry, mode: Mode) -> Due:
        own = entry.part_of(self.incarnation)
        others = [part for part in entry.parts if part is not own]
        return Due(
            fragment=fragment,
            version=entry.close.version,
            mode=mode,
            own=own is not None,
            weight=0 if own is None else own.weight,
            participants=sum(weight > 0 for weight in entry.close.weights),
            received=sum(chunk.size for part in others for chunk in part.chunks),
        )

    def _sends(self, now: float) -> list[Part]:
        return [
            rounds.send(self._checksum(fragment, rounds.applied), now)
            for fragment, rounds in enumerate(self.joined.rounds)
            if rounds.send_is_due(now)
        ]

    def _is_over(self, away: float) -> bool:
        """Return whether a stopped island has nothing left to do."""
        if any(rounds.unapplied for rounds in self.joined.rounds):
            return False
        if self.joined.leaving and away > AWAY:
            self.notices.append(
                "left without a connection: the work since the last part is not sent, and its "
                "samples are read again by the next owner of the slot"
            )
            return True
        return self.state.ended or self.joined.left


def left_out(entry: Entry) -> Iterator[str]:
    """Describe the parts that an entry leaves out."""
    where = f"fragment {entry.close.fragment}, version {entry.close.version}"
    for refusal in entry.close.refused:
        yield f"{where}: record {refusal.part} was left out: {refusal.reason}"
    for part in (*entry.parts, *entry.outliers):
        if entry.is_lost(part):
            reason = "is too large" if part.finite else "is not finite"
            yield (
                f"{where}: the delta of island {name_of(part.incarnation)} {reason}; it is left "
                "out, and the island takes the shared parameters"
            )
