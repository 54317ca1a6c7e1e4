"""A log with shortcuts for records that are valid."""

from typing import Any

from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.records import (
    Close,
    Facts,
    Open,
    Part,
    Record,
    Refusal,
    Take,
    encode,
)

FACTS = Facts(
    run="r",
    slots=2,
    begin=1,
    total_tokens=100,
    cycle=80,
    outer_lr=0.5,
    checksums=("v0", "v0"),
    fingerprints={"code": "a"},
)


class Log:
    def __init__(self, facts: Facts = FACTS, checksum: str = "v") -> None:
        """`checksum`: what this reader computes, before the number of the version."""
        self.raw: list[bytes] = []
        self.checksum, self.state = checksum, State()
        self.write(facts)
        self.take(0, "a")
        self.take(1, "b")

    @property
    def waiting(self) -> dict[int, Part]:
        return self.state.fragments[0].waiting

    def write(self, record: Record) -> Outcome:
        self.raw.append(encode(record))
        return self.read(self.raw[-1])

    def read(self, raw: bytes) -> Outcome:
        outcome = self.state.read(self.state.sequence + 1, raw)
        if (entry := outcome.entry) is not None:
            version = entry.close.version
            self.state.learn(entry.close.fragment, version, f"{self.checksum}{version}")
        return outcome

    def owner(self, slot: int) -> dict[str, Any]:
        return {"run": "r", "slot": slot, "incarnation": self.state.slots[slot].owner or "a"}

    def take(self, slot: int, name: str, replaces: str | None = None) -> Outcome:
        return self.write(Take(run="r", slot=slot, incarnation=name, replaces=replaces))

    def part(self, slot: int, end: int, **changed: Any) -> Outcome:
        version, ledger = self.state.fragments[0].version, self.state.slots[slot].ledgers[0]
        fields = self.owner(slot) | {
            "fragment": 0,
            "number": ledger.number + 1,
            "base": version,
            "checksum": f"v{version}",
            "start": ledger.taken_to,
            "end": end,
            "weight": end - ledger.taken_to,
        }
        return self.write(Part(**{**fields, **changed}))

    def open(self, slot: int = 0) -> Outcome:
        version = self.state.fragments[0].version + 1
        return self.write(Open(**self.owner(slot), fragment=0, version=version, grace=1.0))

    def build(self, *parts: int, slot: int = 0, refused: tuple[Refusal, ...] = ()) -> Close:
        by = slot, self.state.slots[slot].owner or "a"
        return self.state.build_close(0, by, dict.fromkeys(parts, 1.0), refused, 0.5)

    def round(self, *ends: int) -> Outcome:
        """Merge a part of each slot."""
        self.open()
        for slot, end in enumerate(ends):
            assert not self.part(slot, end).void
        return self.write(self.build(*self.waiting))
