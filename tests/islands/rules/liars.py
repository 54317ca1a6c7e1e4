"""Logins that write valid notes, and far too many of them or false ones."""

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tests.islands.rules import toy
from tests.islands.rules.island_process import Payload
from torchtitan_diloco.islands.rules.changes import Change, Set
from torchtitan_diloco.islands.rules.names import CHANGE, ISLAND, part_name
from torchtitan_diloco.islands.rules.note import Note, Part, encode_note

if TYPE_CHECKING:
    from tests.islands.rules.simulation import Simulation

NOTE_SECONDS = 0.25


@dataclass
class Liar:
    """An island without tensors. All its parts and losses are valid."""

    simulation: "Simulation"
    name: str
    samples: int = 1
    """Samples of each part."""
    is_idle: bool = False
    """Whether it says that it has stopped, so that its parts open rounds at once."""
    faster: int = 1
    """Factor by which its step counter is too high."""
    losses: bool = False
    """Whether it declares its work lost, and as much as is possible each time."""
    notes: int = 80
    incarnation: str = ""
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    """Those that are not decided, by fragment and number."""

    def __post_init__(self) -> None:
        self.incarnation = f"{self.name}/{self.simulation.next_nonce():08x}"
        self._counter = 0
        self.write()

    def write(self) -> None:
        world = self.simulation.world
        self._counter += 1
        note = Note(
            counter=self._counter,
            wish="join",
            step=self._counter * self.faster,
            step_seconds=self.simulation.plan.step,
            is_idle=self.is_idle,
            parts=[msgspec.Raw(msgspec.json.encode(part)) for part in self.next_parts()],
        )
        if world.now >= world.store.away_until:
            world.store.put(ISLAND + self.incarnation, encode_note(note), replaces=True)
        if self._counter < self.notes:
            world.schedule(NOTE_SECONDS, None, self.write)

    def next_parts(self) -> list[Part]:
        """Return the next part of each fragment. A number is used once."""
        simulation = self.simulation
        store = simulation.world.store
        if not simulation.decisions:
            return []
        last = simulation.last
        number = last.slot_of(self.incarnation)
        if number is None or not last.is_founded:
            return []
        slot = last.slots[number]
        for fragment, ledger in enumerate(slot.ledgers):
            for key in [key for key in self.parts if key[0] == fragment]:
                if key[1] <= ledger.number:
                    del self.parts[key]
                    store.delete(part_name(self.incarnation, *key))
            shared = last.fragments[fragment]
            key = (fragment, ledger.number + 1)
            if key in self.parts:
                continue
            fastest = last.settings.fastest
            samples = int(fastest * NOTE_SECONDS) if self.losses else self.samples
            part = Part(
                fragment=fragment,
                number=ledger.number + 1,
                base=shared.version,
                checksum=shared.kept[-1].checksum,
                start=ledger.taken,
                end=ledger.taken + max(1, samples),
                weight=0 if self.losses else toy.TOKENS * samples,
                size=0 if self.losses else 100,
                is_loss=self.losses,
            )
            self.parts[key] = part
            simulation.parts[self.incarnation, fragment, part.number] = part
            for sample in range(part.start, part.end) if not self.losses else ():
                phase = sum(position <= sample for position in slot.entered)
                simulation.phases[self.incarnation, sample] = phase
            if not self.losses:
                payload = Payload(toy.Vector(1, 8), norm=1.0)
                store.put(part_name(self.incarnation, *key), payload, replaces=False)
        return list(self.parts.values())


def start_often(simulation: "Simulation", name: str, starts: int = 100, seconds: int = 10) -> None:
    """Write the notes of many starts of one name."""
    incarnations = [f"{name}/{simulation.next_nonce():08x}" for _ in range(starts)]
    counters = itertools.count(1)

    def write() -> None:
        counter = next(counters)
        for incarnation in incarnations:
            note = encode_note(Note(counter=counter, wish="join", step=counter))
            simulation.world.store.put(ISLAND + incarnation, note, replaces=True)
        if counter < seconds:
            simulation.world.schedule(1.0, None, write)
        else:
            for incarnation in incarnations:
                simulation.world.store.delete(ISLAND + incarnation)

    simulation.extra_objects += starts
    write()


def ask(simulation: "Simulation", change: Change) -> str:
    """Request a change after all earlier ones."""
    name = f"{CHANGE}{simulation.next_nonce():08}"
    simulation.world.store.put(name, msgspec.json.encode(change), replaces=False)
    return name


def change_often(simulation: "Simulation", changes: int = 100) -> None:
    """Request changes that show in which order they are made, and how often."""
    simulation.extra_objects += changes
    for _ in range(changes):
        ask(simulation, Set("slot_seconds", f"{8 + simulation.next_nonce() / 1e6:.6f}"))
