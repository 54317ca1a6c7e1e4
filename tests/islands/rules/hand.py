"""An island by hand: a test plays its syncer and its store."""

from typing import Any

import msgspec

from tests.islands.rules.desk import SHAPES, A, checksum, founded
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.islands.rules.checkpoint import Saved
from torchtitan_diloco.islands.rules.decision import Decision, Fate, Kept
from torchtitan_diloco.islands.rules.founding import Founding
from torchtitan_diloco.islands.rules.fragment import Boundary
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.note import Note, Part, decode_note


def build_island(fragments: int = 1, **options: Any) -> Island:
    return Island(A, **({"facts": {}, "shapes": [SHAPES] * fragments} | options))


def founding(**changed: Any) -> Founding:
    fields: dict[str, Any] = {"run": "r", "settings": founded().settings, "shapes": [SHAPES]}
    return Founding(**(fields | {"checksums": ["0"]} | changed))


class Hand:
    """An island by hand, which holds what it wants at once."""

    def __init__(self, state: Decision, **options: Any) -> None:
        self.now = 0.0
        self.state = state
        self.island = build_island(**options)
        self.applied: list[tuple[int, Mode, float]] = []
        self.read()

    def read(self, **changed: Any) -> None:
        """Let it read a decision with these fields, and download what it wants."""
        for key, value in changed.items():
            setattr(self.state, key, value)
        self.state.number += 1
        raw = msgspec.json.encode(self.state)
        self.island.on_decision(msgspec.json.decode(raw, type=Decision), self.now)
        self.download()

    def download(self) -> None:
        while wanted := self.island.wanted():
            self.island.on_held(wanted[0], self.now)

    def boundary(self) -> Boundary:
        """Do what is due, and return what is left."""
        total = Boundary(0)
        while True:
            due = self.island.boundary(self.now)
            for apply in due.applies:
                self.applied.append((apply.version, apply.mode, apply.share))
                self.island.on_checksum(apply.fragment, apply.version, checksum(apply.version))
            for send in due.sends:
                self.island.on_stored(send.part, 100, self.now)
            total.applies += due.applies
            total.sends += due.sends
            if not due.applies and not due.sends:
                total.waits_until = due.waits_until
                total.clock = due.clock
                total.is_training = due.is_training
                return total

    def step(self, count: int = 1, *, is_decided: bool = True) -> Boundary:
        """Train. `is_decided`: a new decision has been read."""
        for _ in range(count):
            self.now += 0.1
            if is_decided:
                self.island.heard_at = self.now
            self.island.finish_step(1, 1, 0.1)
            due = self.boundary()
        return due

    @property
    def sent(self) -> Part:
        outstanding = self.island.fragments[0].sent
        assert outstanding is not None
        return outstanding.part

    @property
    def note(self) -> Note:
        return decode_note(self.island.note())

    def publish(self, *, fate: Fate = Fate.MERGED, own: bool = True, keeps: int = 99) -> None:
        """Let the syncer make the next version, with the own part or without."""
        shared = self.state.fragments[0]
        ledger = self.state.slots[0].ledgers[0]
        if own:
            ledger.number = self.sent.number
            ledger.fate = fate
            if fate is Fate.MERGED or fate.is_lost:
                ledger.taken = self.sent.end
        if fate is Fate.MERGED:
            shared.version += 1
            shared.clock += 20
            shared.kept.append(Kept(shared.version, checksum(shared.version), self.state.number))
            shared.kept = shared.kept[-keeps:]
            ledger.version = shared.version if own else ledger.version
        self.read()


def build_hand() -> Hand:
    """Return an island that has begun, alone."""
    hand = Hand(founded((A,), sync_every=10, delay=2, mixing=0.25))
    hand.boundary()
    return hand


def saved_of(hand: Hand) -> Saved:
    saved = hand.island.save()
    assert saved is not None
    return saved.with_checksums([checksum(fragment.version) for fragment in saved.fragments])
