"""One island without I/O: how it joins, what it appends, and what it does between two steps.

The leader's threads and the simulations of the tests drive it alike. Pass every record to `read`,
in order. Append what `records` returns, whenever something has happened. Between two steps, do what
`boundary` says. The monotonic clock is passed as `now`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import msgspec

from torchtitan_diloco.diloco.vitals import Action
from torchtitan_diloco.islands.actions import EVICTED, standing
from torchtitan_diloco.islands.changes import DELAY, EVERY, SLOTS, settings_of
from torchtitan_diloco.islands.disputes import Disputes
from torchtitan_diloco.islands.ledger import Due, Entry, Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import (
    Hint,
    IslandFailedError,
    IslandFencedError,
    Members,
)
from torchtitan_diloco.islands.records import (
    Change,
    Evict,
    Give,
    Part,
    Record,
    Take,
    attempt_of,
    name_of,
)
from torchtitan_diloco.islands.rounds import Checked, Timing
from torchtitan_diloco.islands.rules import Island
from torchtitan_diloco.log import UserError

RETRY = 0.5
"""Seconds between attempts to append a record: only the log shows whether it is valid."""
UNMERGED = 8
"""Versions of a fragment without a part of this island after which there is a warning."""
AWAY = 10.0
"""Seconds without a connection after which a leaving island gives up sending its work."""


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
    settings: dict[str, str] = {}
    """Settings of the run."""


class Machine:
    def __init__(
        self,
        incarnation: str,
        members: Members,
        timing: Timing,
        lr: float,
    ) -> None:
        """`lr`: outer."""
        self.incarnation, self.members, self.timing = incarnation, members, timing
        self.begin(State())
        self._settings: dict[str, str] = {}
        self.island: Island | None = None
        """Decisions about the run, once it has begun and this island has a slot."""
        self.notices, self.news = list[str](), list[str]()
        """Warnings for the user, and which islands come and go."""
        self.actions = list[Action]()
        """What is done about others, for the records of this island."""
        self._evicted = set[str]()
        self._lr = lr
        self._attempts = dict[tuple[object, ...], float]()
        """Time at which each record was last appended."""

    def begin(self, state: State) -> None:
        """Read the log on from this state. By default, it is before the first record."""
        self.state = state
        self.disputes = Disputes(state, self.members, self.incarnation)

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
            self._note_unmerged(outcome.entry.close.fragment, now)
        record = outcome.record
        if isinstance(record, Change) and not outcome.void:
            self.news.append(f"the run goes on with {record.key} = {record.value}")
            self._use_facts()
        is_other = isinstance(record, Take | Give) and record.incarnation != self.incarnation
        if isinstance(record, Take | Give) and is_other and not outcome.void:
            does = "takes part" if isinstance(record, Take) else "leaves"
            self.news.append(f"island {name_of(record.incarnation)} {does}")
        if not outcome.void:
            self._say_actions(record)
        return outcome

    def _say_actions(self, record: Record | None) -> None:
        """Say what is done about the others from a record on, or no more."""
        found = self.joined.actions
        if isinstance(record, Evict) and record.target in self.state.evicted:
            found.append(Action(name_of(record.target), EVICTED, f"it {record.reason}"))
            self._evicted.add(name_of(record.target))
        elif isinstance(record, Take) and name_of(record.incarnation) in self._evicted:
            found.append(Action(name_of(record.incarnation), EVICTED, "it is back", over=True))
            self._evicted.remove(name_of(record.incarnation))
        for one in found:
            (self.news if one.over else self.notices).append(f"island {one}")
        self.actions += found
        found.clear()

    def _use_facts(self) -> None:
        """Use the settings of the run, which may differ from those of this island."""
        assert self.state.facts is not None
        self._settings, schedule = settings_of(self.state.facts), self.timing.schedule
        every = int(self._settings.get(EVERY, schedule.sync_every))
        delay = int(self._settings.get(DELAY, schedule.delay))
        schedule = replace(schedule, sync_every=every, delay=delay)
        self.timing, self._lr = replace(self.timing, schedule=schedule), self.state.facts.outer_lr
        if self.island is not None:
            self.island.change(self.timing)

    def _note_unmerged(self, fragment: int, now: float) -> None:
        """Warn if many versions have nothing of this island, as its uploads take too long."""
        rounds, ledger = self.joined.rounds[fragment], self.joined.ledgers[fragment]
        missed = self.state.fragments[fragment].version - max(ledger.merged_in, ledger.since)
        if missed < UNMERGED or missed.bit_count() > 1 or not rounds.is_uploading:
            return  # again only after twice as many
        cycle = self.timing.schedule.sync_every * self.joined.step_seconds
        if self.members.is_new(now) or rounds.upload_seconds(now) < cycle:
            return  # it was away
        needed = sum(one.part_bytes for one in self.joined.rounds) / max(cycle, 1e-9) / 1e6
        self.notices.append(
            f"the last {missed} versions of fragment {fragment} have nothing of this island: its "
            f"upload lasts for {rounds.upload_seconds(now):.3g} s so far, and a cycle for "
            f"{cycle:.3g}. It needs an uplink of at least {needed:.3g} MB/s, or the run a larger "
            f"{EVERY}"
        )

    def note_lag(self, seconds: float) -> None:
        """Warn that records wait for so long, as the parts that they name arrive too slowly."""
        sizes = sum(one.part_bytes for one in self.joined.rounds) * (len(self.state.owners()) - 1)
        cycle = self.timing.schedule.sync_every * self.joined.step_seconds
        self.notices.append(
            f"this island is {seconds:.3g} s behind the others, which do not wait for it: it needs "
            f"a downlink of at least {sizes / max(cycle, 1e-9) / 1e6:.3g} MB/s, or the run a "
            f"larger {EVERY}"
        )

    def records(self, checked: Mapping[int, Checked], now: float) -> list[Record]:
        """Return the records to append now.

        `checked`: what this island has found in the waiting parts, by sequence number. Raises an
        IslandFencedError if another island has the slot.
        """
        self.members.tick(now)
        island = self.island
        if island is not None:
            silent, heard = self.members.changes(self.state, self.incarnation, now)
            self.notices += [f"island {one} is silent: rounds do not wait for it" for one in silent]
            self.news += [f"island {one} is heard again" for one in heard]
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
                self._use_facts()
                place = state, self.members, self.disputes, mine[0]
                self.island = Island(*place, self.timing, now=now)
            return None
        if state.ended:
            raise UserError(
                "the run has ended: its model is in the folders of its islands; for another run, "
                "`serve` a new folder"
            )
        if self.incarnation in state.incarnations:
            raise IslandFencedError("the slot of this island was taken before the run began")
        free = self.members.slot_to_take(state, self.incarnation, now)
        if free is None or self._probation(now) > 0:
            return None
        slot, replaces = free
        who = self.incarnation
        return Take(run=state.facts.run, incarnation=who, slot=slot, replaces=replaces)

    def _probation(self, now: float) -> float:
        """Return for how long this island takes no slot, as its last start was evicted and others
        are there."""
        name, state = name_of(self.incarnation), self.state
        last = [one for one in state.incarnations if name_of(one) == name][-1:]
        if not state.owners() or not set(last).intersection(state.evicted):
            return 0.0
        return self.members.probation(sum(name_of(one) == name for one in state.evicted), now)

    def waits_for(self, now: float) -> str:
        """Return what an island that is not in the run yet waits for, empty if it need not."""
        facts, owners = self.state.facts, self.state.owners()
        if facts is not None and self.incarnation in owners.values() and not self.state.begun:
            here = ", ".join(map(name_of, owners.values()))
            return f"waiting until {facts.begin} islands are there; here are {here}"
        if (seconds := self._probation(now)) > 0:
            return f"the others have evicted this island: it takes part again in {seconds:.0f} s"
        restarts = name_of(self.incarnation) in map(name_of, owners.values())  # it takes its slot
        if len(owners) == len(self.state.slots) and not restarts and not self.members.is_new(now):
            return self._describe_slots(owners.values(), now)
        return ""

    def _describe_slots(self, owners: Collection[str], now: float) -> str:
        """Say when a slot becomes free, and what to do."""
        times = [
            (self.members.seconds_until_gone(owner, now), name_of(owner))
            for owner in owners
            if self.members.is_silent(owner, now)
        ]
        free = "".join(
            f"; that of {name}, which is silent, in {s:.0f} s" for s, name in sorted(times)
        )
        return (
            f"waiting for a free slot{free}. All {len(owners)} have an owner: `islands leave NAME` "
            f"asks one to leave ({', '.join(sorted(map(name_of, owners)))}), and `islands change "
            f"{SLOTS} {len(owners) + 1}` adds a slot"
        )

    def _decisions(
        self, island: Island, checked: Mapping[int, Checked], now: float
    ) -> Iterator[Record | None]:
        self.notices += self.disputes.settle(now)
        if island.fenced or self.state.ended:
            if self.incarnation in self.state.evicted and not self.state.ended:
                raise IslandFailedError(
                    "the others have evicted this island, as its numbers were wrong or it made no "
                    "step: look at its memory and machine. Started again, it takes their copies, "
                    "and waits before it takes part"
                )
            if island.fenced and not island.left:
                raise IslandFencedError(
                    f"slot {island.slot} of this island was taken by "
                    f"{self.state.slots[island.slot].owner}: it ends; what it has done since its "
                    "last part is not in the run"
                )
            return
        for rounds in island.rounds:
            yield rounds.open()
            yield rounds.close(checked, self._lr, now)
            if rounds.under_way and rounds.is_stored:
                yield rounds.sent
        yield from island.votes(now)
        yield island.last_record(now)

    def store(self, part: Part) -> None:
        """Note that the chunks of an own part are stored, so that it can be appended."""
        rounds = self.joined.rounds[part.fragment]
        rounds.sent, rounds.is_stored = part, True

    def take_skipped(self) -> list[tuple[int, int]]:
        """Return fragments and versions that will not be applied, and need not be kept."""
        found = list[tuple[int, int]]()
        for fragment, rounds in enumerate(self.island.rounds if self.island else ()):
            found += [(fragment, version) for version in rounds.skipped]
            rounds.skipped.clear()
        return found

    def hint(self, *, caught_up: bool) -> Hint:
        """Return the heartbeat. `caught_up`: with the log."""
        island = self.island
        known = [(one.version, one.checksums.get(one.version)) for one in self.state.fragments]
        copies = tuple((version, checksum) for version, checksum in known if checksum)
        return Hint(
            self.incarnation,
            step=island.step if island else 0,
            tokens=island.tokens if island else 0,
            step_seconds=island.step_seconds if island else 0.0,
            caught_up=caught_up,
            leaving=island is not None and island.leaving,
            copies=copies if len(copies) == len(known) else (),
        )

    def flags_of(self, owner: str) -> int:
        return self.island.flags.get(owner, 0) if self.island else 0

    def standing(self) -> list[str]:
        """Describe what this island does about others."""
        return standing(self.island.conduct.copy()) if self.island else []

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
            settings=self._settings,
        )

    def _applies(self, now: float) -> tuple[list[Due], float | None]:
        """Return what to apply, and until when training waits for more."""
        applied, limits = list[Due](), list[float]()
        for rounds in self.joined.rounds:
            while (due := rounds.take_due(now)) is not None:
                applied.append(due)
            limit = rounds.wait_until()
            if limit is not None and now < limit:
                limits.append(limit)
        return applied, min(limits, default=None)

    def _sends(self, now: float) -> list[Part]:
        return [rounds.send(now) for rounds in self.joined.rounds if rounds.send_is_due(now)]

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
