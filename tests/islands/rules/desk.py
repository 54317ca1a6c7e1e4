"""A syncer by hand: its jobs are done at once, or left undone."""

from typing import Any

import msgspec

from torchtitan_diloco.islands.rules.decision import (
    PROTOCOL,
    Decision,
    Fate,
    Kept,
    Ledger,
    SharedFragment,
    Slot,
    Stored,
    decode_decision,
)
from torchtitan_diloco.islands.rules.fields import Shape
from torchtitan_diloco.islands.rules.history import Bin, decode_bin, encode_bin
from torchtitan_diloco.islands.rules.jobs import (
    Commit,
    DeleteObjects,
    Fetch,
    Job,
    Load,
    MergeParts,
    Record,
    Settle,
    Snapshot,
    Upload,
)
from torchtitan_diloco.islands.rules.note import Note, Part, encode_note
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.rules.syncer import Syncer

A = "a/0000"
B = "b/0000"
C = "c/0000"
SHAPES: list[Shape] = [(100, 10)]


def checksum(version: int) -> str:
    return f"{version:x}"


def settings(**changed: Any) -> Settings:
    fields: dict[str, Any] = {
        "sync_every": 10,
        "delay": 1,
        "total_tokens": 10_000,
        "slots": 3,
        "start_with": 1,
        "fastest": 100.0,
        "grace": 1.0,
        "slot_seconds": 10.0,
        "norm_limit": 0.0,
        "streams": 3,
        "block": 1,
    }
    return Settings(**(fields | changed))


def founded(owners: tuple[str, ...] = (A, B), fragments: int = 1, **changed: Any) -> Decision:
    """Return a decision with islands in slots, and version 0 of all fragments."""
    return Decision(
        protocol=PROTOCOL,
        number=1,
        session="before",
        run="r",
        settings=settings(**changed),
        fragments=[
            SharedFragment(SHAPES, kept=[Kept(0, checksum(0), 0)], copies=[Stored(0, 1)])
            for _ in range(fragments)
        ],
        slots=[Slot([Ledger() for _ in range(fragments)], owner) for owner in owners],
        begun=bool(owners),
    )


class Desk:
    def __init__(self, state: Decision, wall: float = 0.0) -> None:
        """`wall`: time of day at the start."""
        self.now = 0.0
        self.syncer = Syncer(state, "session", self.now, wall)
        self.decisions = [state]
        self.merges: list[MergeParts] = []
        self.loads: list[int] = []
        """Fragments that were loaded."""
        self.deleted: list[str] = []
        self.settled: list[Settle] = []
        self.history: list[Bin] = []
        self.commits_last = False
        """Whether commits do not end for now."""
        self.merges_last, self.is_finite = False, True
        """Whether merges do not end for now, and whether they are finite."""
        self.fate = Fate.NONE
        """Fate of a part that is fetched."""
        self.norms: dict[str, float] = {}
        """Norm of the parts of an incarnation, or 1."""
        self.notes: dict[str, bytes] = {}
        """Newest note of each incarnation."""
        self._counters: dict[str, int] = {}
        self.pass_time(0.0)

    @property
    def state(self) -> Decision:
        return self.decisions[-1]

    def ledger(self, slot: int, fragment: int = 0) -> Ledger:
        return self.state.slots[slot].ledgers[fragment]

    def note(self, incarnation: str, *parts: Part | bytes, **fields: Any) -> None:
        """Let an island write a note."""
        counter = self._counters.get(incarnation, 0) + 1
        self._counters[incarnation] = counter
        raws = [
            msgspec.Raw(part if isinstance(part, bytes) else msgspec.json.encode(part))
            for part in parts
        ]
        fields = {"counter": counter, "step_seconds": 0.1, **fields}
        self.notes[incarnation] = encode_note(Note(parts=raws, **fields))
        self.syncer.on_note(incarnation, self.notes[incarnation])

    def part(self, slot: int, samples: int = 10, **changed: Any) -> Part:
        """Return the next part of a slot."""
        ledger = self.ledger(slot)
        shared = self.state.fragments[0]
        fields: dict[str, Any] = {
            "fragment": 0,
            "number": ledger.number + 1,
            "base": shared.version,
            "checksum": checksum(shared.version),
            "start": ledger.taken,
            "end": ledger.taken + samples,
            "weight": samples,
            "size": 100,
        }
        return Part(**(fields | changed))

    def pass_time(self, seconds: float, *, listens: bool = True) -> None:
        """Let time pass, and do all jobs. `listens`: the store is there."""
        end = self.now + seconds
        while True:
            self.now = min(end, self.now + 0.1)
            if listens:
                self.syncer.on_poll(self.now)
            for _ in range(4):
                for job in self.syncer.tick(self.now):
                    self._do(job)
            if self.now >= end:
                return

    def _do(self, job: Job) -> None:
        syncer = self.syncer
        match job:
            case Commit():
                if not self.commits_last:
                    self.decisions.append(decode_decision(job.content, job.number))
                    syncer.on_committed()
            case Load():
                self.loads.append(job.fragment)
                syncer.on_loaded(job.fragment)
            case Fetch():
                syncer.on_part(job.incarnation, job.part, self.fate)
            case MergeParts():
                self.merges.append(job)
                norms = [
                    self.norms.get(waiting_part.incarnation, 1.0) for waiting_part in job.parts
                ]
                if not self.merges_last and syncer.on_norms(job.fragment, norms):
                    known = checksum(job.version) if self.is_finite else None
                    syncer.on_merged(job.fragment, job.version, known)
            case Snapshot():
                syncer.on_snapshot(job.fragment, job.version)
            case Upload():
                syncer.on_uploaded(job.stored)
            case Settle():
                self.settled.append(job)
            case Record():
                if job.number == len(self.history):
                    self.history.append(decode_bin(job.content))
                assert encode_bin(self.history[job.number]) == job.content, "once, or the same"
                syncer.on_recorded(job.number)
            case DeleteObjects():
                self.deleted += job.names


def round_of_all(
    desk: Desk, step: int, samples: int = 10, owners: tuple[str, ...] = (A, B)
) -> None:
    """Let all islands send at this step, and merge it."""
    for slot, owner in enumerate(owners):
        desk.note(owner, desk.part(slot, samples), step=step)
    desk.pass_time(0.5)
    for owner in owners:
        desk.note(owner, step=step + 1)
    desk.pass_time(0.5)
