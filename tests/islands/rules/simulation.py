"""A whole run in virtual time, and what has to hold in it whatever happens.

Each decision that counts is compared with the one before it: what it merges, loses and names.
"""

from itertools import pairwise
from typing import Any
from unittest.mock import patch

from tests.islands.rules import toy
from tests.islands.rules.island_process import READ_SECONDS, Checkpoint, IslandProcess, Nature
from tests.islands.rules.syncers import SyncerProcess
from tests.islands.rules.world import Plan, World
from torchtitan_diloco.islands.rules import copies, history, presence, writer
from torchtitan_diloco.islands.rules.decision import (
    VERSIONS_LATE,
    Decision,
    Fate,
    Ledger,
    decode_decision,
)
from torchtitan_diloco.islands.rules.history import decode_bin
from torchtitan_diloco.islands.rules.island import ENDED, LEFT, Island
from torchtitan_diloco.islands.rules.jobs import MergeParts
from torchtitan_diloco.islands.rules.names import (
    CHANGE,
    HISTORY,
    ISLAND,
    history_name,
    incarnation_of,
    run_number,
)
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.settings import Settings

FORGOTTEN, KEPT_SECONDS, COPY_SECONDS = 12.0, 3.0, 120.0
"""Runs here last half a minute, so what is old gets old sooner."""
MOST_OBJECTS = 250
MOST_NOTE_BYTES = 2000
MOST_DECISION_BYTES = 4000


class Simulation:
    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.world = World(plan, seed)
        self.world.store.on_create = self.on_create
        self.world.store.on_delete = self.on_delete
        self.settings = Settings(
            sync_every=plan.sync_every,
            delay=plan.delay,
            total_tokens=plan.steps * plan.start_with * plan.batch * toy.TOKENS,
            slots=plan.slots,
            start_with=plan.start_with,
            mixing=plan.alpha,
            codec="rough" if plan.is_rough else "fp32",
            grace=plan.grace,
            slot_seconds=plan.slot_seconds,
            fastest=40.0 * plan.batch / plan.step,
            tokens_per_sample=toy.TOKENS,
            norm_limit=plan.norm_limit,
            copies_every=plan.copies_every,
            commit_seconds=plan.commit_seconds,
            poll_seconds=READ_SECONDS,
            streams=plan.slots,
            block=plan.batch,
            phases=plan.phases,
        )
        self.islands: list[IslandProcess] = []
        self.syncers: list[SyncerProcess] = []
        self.decisions: list[Decision] = []
        """Those that count, in order."""
        self.parts: dict[tuple[str, int, int], Part] = {}
        self.merges: dict[tuple[str, int, int], MergeParts] = {}
        self.versions: list[tuple[float, int, list[tuple[int, Part]], bool]] = []
        """Time, fragment, parts by slot, whether all ready were in."""
        self.known: dict[tuple[int, int], set[str]] = {}
        """Checksums of versions. More than one only after the store was put back."""
        self.overflowing: set[tuple[str, int, int]] = set()
        self.clocks: dict[str, int] = {}
        self.paces: list[float] = []
        """Versions a cycle of the fastest island, by fragment."""
        self.late: list[int] = []
        self.losses: list[tuple[int, int, int]] = []
        self.fates: dict[Fate, int] = {}
        self.phases: dict[tuple[str, int], int] = {}
        """Phase of the data in which an incarnation has read a sample."""
        self.superseded = 0
        self.terms = 0
        self.restores = 0
        self.went_back = 0
        self.note_bytes = 0
        self.decision_bytes = 0
        self.extra_objects = 0
        """Objects that others have written on purpose."""
        self.slot_seconds: set[float] = set()
        """All values that this setting has had, each from a change of its own."""
        self.kills_after: set[str] = set()
        """Changes after whose commit their syncer is killed."""
        self.upload_seconds = plan.upload
        self.save_every = 0
        self.is_exact = True
        """Whether each syncer has begun with the newest outer state."""
        self.is_restored = False
        self.is_calm = False
        self.planned: list[tuple[float, str]] = []
        """Faults, and when they come."""
        self._nonce = 0

    # --- actors -----------------------------------------------------------------------------------

    def next_nonce(self) -> int:
        self._nonce += 1
        return self._nonce

    def start(
        self,
        login: str,
        nature: Nature | None = None,
        checkpoint: Checkpoint | None = None,
        *,
        after: float = 0.0,
        is_founder: bool = True,
    ) -> None:
        def begin() -> None:
            self.islands.append(
                IslandProcess(
                    self,
                    login,
                    nature or Nature(step=self.plan.step),
                    checkpoint,
                    is_founder=is_founder,
                )
            )

        self.world.schedule(after, None, begin)

    def start_syncer(self, after: float = 0.0) -> None:
        def begin() -> None:
            self.syncers.append(SyncerProcess(self, f"syncer{len(self.syncers)}"))

        self.world.schedule(after, None, begin)

    @property
    def living(self) -> list[IslandProcess]:
        return [island for island in self.islands if island.is_alive and not island.is_over]

    @property
    def leaders(self) -> list[SyncerProcess]:
        return [syncer for syncer in self.syncers if syncer.is_alive and syncer.machine is not None]

    @property
    def last(self) -> Decision:
        return self.decisions[-1]

    # --- what holds always ------------------------------------------------------------------------

    def on_create(self, name: str, content: Any) -> None:
        number = run_number(name)
        if number is None:
            return
        decision = decode_decision(content, number)
        self.decision_bytes = max(self.decision_bytes, len(content))
        if self.decisions and number <= self.last.number and not self.is_restored:
            return  # free again, as it was old: its syncer will see that it does not count
        if self.is_restored and number <= self.last.number:
            # A new syncer goes on from the older copy, and one that was not killed from its own.
            self.decisions = [decision for decision in self.decisions if decision.number < number]
        self.is_restored = False
        self.check_decision(decision)
        self.decisions.append(decision)

    def on_delete(self, name: str) -> None:
        """A syncer withdraws a decision after the store was put back."""
        if self.decisions and run_number(name) == self.last.number:
            assert self.restores
            self.decisions.pop()
            self.is_restored = True

    def check_decision(self, new: Decision) -> None:
        for fragment, shared in enumerate(new.fragments):
            for kept in shared.kept:
                known = self.known.setdefault((fragment, kept.version), set())
                known.add(kept.checksum)
                assert len(known) <= 1 + self.restores, "two versions of one number"
            assert shared.version in {kept.version for kept in shared.kept}
        if not self.decisions:
            assert new.number == 1
            return
        assert new.number == self.last.number + 1, "a decision is left out"
        old = self.last
        assert new.age >= old.age or self.restores or not old.is_founded
        if new.settings.slot_seconds != old.settings.slot_seconds and not self.restores:
            assert new.settings.slot_seconds not in self.slot_seconds, "a change is made again"
            self.slot_seconds.add(new.settings.slot_seconds)
        if not old.is_founded:
            return
        assert new.run == old.run
        for name in new.names - old.names:
            assert f"/{new.number}-" in name or name in {planned.name for planned in old.writing}, (
                name
            )
        for fragment, shared in enumerate(new.fragments):
            self.check_fragment(old, new, fragment)
            before = old.fragments[fragment]
            assert 0 <= shared.version - before.version <= 1

    def check_fragment(self, old: Decision, new: Decision, fragment: int) -> None:
        """Check what became of parts: each range once, each weight that of its tokens."""
        shared = new.fragments[fragment]
        before = old.fragments[fragment]
        merged = list[tuple[int, Part]]()
        for number, slot in enumerate(new.slots):
            after = slot.ledgers[fragment]
            is_new = number >= len(old.slots)
            ledger = Ledger() if is_new else old.slots[number].ledgers[fragment]
            owner = slot.owner if is_new else old.slots[number].owner or slot.owner
            if after.number == ledger.number:
                assert (after.taken, after.lost) == (ledger.taken, ledger.lost)
                continue
            assert after.number == ledger.number + 1, "two parts decided at once"
            assert owner is not None
            self.fates[after.fate] = self.fates.get(after.fate, 0) + 1
            if after.fate is Fate.LOSS or after.fate.is_lost:
                assert after.lost - ledger.lost == after.taken - ledger.taken > 0
                self.losses.append((fragment, ledger.taken, after.taken))
            elif after.fate is Fate.MERGED:
                part = self.parts[owner, fragment, after.number]
                assert (part.start, part.end) == (ledger.taken, after.taken)
                assert after.lost == ledger.lost
                assert after.version == shared.version == before.version + 1
                for sample in range(part.start, part.end):
                    phase = sum(position <= sample for position in slot.entered)
                    assert self.phases[owner, sample] == phase, "read in another phase"
                assert part.base >= ledger.version, "it contains the slot's last part again"
                late = shared.version - 1 - part.base
                assert 0 <= late <= VERSIONS_LATE
                self.late.append(late)
                merged.append((number, part))
            else:
                assert (after.taken, after.lost) == (ledger.taken, ledger.lost), (ledger, after)
        assert shared.clock - before.clock == sum(part.weight for _, part in merged)
        if shared.version > before.version:
            job = self.merges[new.session, fragment, shared.version]
            assert [waiting_part.slot for waiting_part in job.parts] == [
                number for number, _ in merged
            ]
            weight = sum(part.weight for _, part in merged)
            is_whole = job.weight_of_all == weight
            self.versions.append((self.world.now, fragment, merged, is_whole))

    def agree(self, machine: Island, fragment: int, version: int, checksum: str) -> None:
        assert machine.decision is not None
        known = self.known[fragment, version]
        assert checksum in known, f"fragment {fragment}, version {version}: another copy"

    def overflows(self, part: Part) -> bool:
        return any(
            self.parts.get((incarnation, fragment, number)) == part
            for incarnation, fragment, number in self.overflowing
        )

    def check_upload(self, stored: Any, session: str) -> None:
        """The session that uploads an object has announced it in a decision that counts."""
        announced = [decision for decision in self.decisions if decision.number == stored.number]
        assert announced, "uploaded before it was announced"
        assert announced[-1].session == session
        assert stored in announced[-1].writing

    def check_garbage(self, name: str) -> None:
        if not self.decisions:
            return
        assert name not in self.last.names, f"{name} is deleted and named"
        incarnation = incarnation_of(name)
        if (
            incarnation is not None
            and incarnation in self.last.owners()
            and not name.startswith("found/")
        ):
            raise AssertionError(f"{name} of an owner is deleted by a syncer")

    # --- run --------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        return bool(self.islands) and not self.living and bool(self.decisions) and self.last.ended

    def look_after(self) -> None:
        """Start somebody again if all are gone and the run has not ended."""
        if not [syncer for syncer in self.syncers if syncer.is_alive]:
            self.start_syncer()
        has_begun = False
        has_ended = False
        if self.decisions:
            has_begun = self.last.begun
            has_ended = self.last.ended
        needed = 1 if has_begun else self.plan.start_with
        if self.islands and len(self.living) < needed and not has_ended:
            self.start(f"heir{len(self.islands)}")
        self.world.schedule(5.0, None, self.look_after)

    def run(self, until: float = 600.0) -> None:
        self.world.schedule(20.0, None, self.look_after)
        with (
            patch.object(presence, "FORGOTTEN", FORGOTTEN),
            patch.object(writer, "KEPT_SECONDS", KEPT_SECONDS),
            # The only remedy if a store that was put back lacks a version that islands wait for.
            patch.object(copies, "COPY_SECONDS", COPY_SECONDS),
            patch.object(history, "BIN_SECONDS", self.plan.bin_seconds),
        ):
            is_over = self.world.run(self.is_over, until)
        assert is_over, f"no end after {until} s"
        self.check_end()

    def check_waits(self) -> None:
        """Training waits at a boundary for the grace at most, whatever happens."""
        for process in self.islands:
            longest = max(self.plan.grace, 4 * process.nature.step * process.rate)
            assert process.waited.longest <= longest + 0.3, process.waited

    def check_calm(self) -> None:
        """Nobody starves, and nothing is lost, where nothing fails."""
        assert set(self.fates) <= {Fate.MERGED, Fate.LOSS, Fate.OVER}, self.fates
        for process in self.islands:
            news = [line for line in process.machine.news.lines if not line.startswith("waiting")]
            assert not news, news
        for fragment in range(self.plan.fragments):
            made = self.last.fragments[fragment].version
            steps = max(process.machine.step for process in self.islands)
            cycles = steps / self.plan.sync_every
            self.paces.append(made / cycles)

    def check_end(self) -> None:
        self.check_waits()
        if self.is_calm:
            self.check_calm()
        last = self.last
        total = self.last.settings.total_tokens
        assert last.ended
        for fragment, shared in enumerate(last.fragments):
            assert shared.clock >= total
            first = self.first_founded
            merged = self.merged(last, fragment) - self.merged(first, fragment)
            clock = shared.clock - first.fragments[fragment].clock
            assert merged * toy.TOKENS == clock, "the clock is what was merged"
        for process in self.islands:
            read = process.machine.decision
            if process.ending != ENDED or self.restores or read is None:
                continue
            if read.settings.total_tokens != total:
                continue  # the run was made longer since
            for fragment, published in enumerate(process.tensors.published):
                shared = last.fragments[fragment]
                if not process.is_flipped:
                    assert toy.checksum(published) == shared.checksum(shared.version)
        for old, new in pairwise(self.decisions):
            assert old.number + 1 == new.number
        self.check_history()
        most = self.world.store.most - self.extra_objects
        assert most <= MOST_OBJECTS, most
        assert self.note_bytes <= MOST_NOTE_BYTES, self.note_bytes
        assert self.decision_bytes <= MOST_DECISION_BYTES, self.decision_bytes

    @property
    def first_founded(self) -> Decision:
        return next(decision for decision in self.decisions if decision.fragments)

    @staticmethod
    def merged(decision: Decision, fragment: int) -> int:
        """Return the number of samples that a fragment has merged."""
        ledgers = [slot.ledgers[fragment] for slot in decision.slots]
        return sum(ledger.taken - ledger.lost for ledger in ledgers)

    def check_history(self) -> None:
        """All merged tokens are in the history once, whoever was killed."""
        last = self.last.history
        bins = [last.open, *([last.closed] if last.closed else [])]
        entries = self.world.store.entries  # also those that are not visible yet
        for number, name in enumerate(
            sorted(entry for entry in entries if entry.startswith(HISTORY))
        ):
            assert name == history_name(number)
            if number < last.number:
                bins.append(decode_bin(entries[name].content))
            else:
                assert number == last.number
                assert last.closed is not None, "only a closed bin is stored"
        tokens = sum(sums.tokens for bin_ in bins for sums in bin_.islands.values())
        clocks = [sum(f.clock for f in d.fragments) for d in (self.first_founded, self.last)]
        assert tokens == clocks[1] - clocks[0] or self.restores


__all__ = ["CHANGE", "ENDED", "ISLAND", "LEFT", "Nature", "Plan", "Simulation"]
