"""Position of an island in a run in a store, and why it has none any more."""

from dataclasses import dataclass

from torchtitan_diloco.base.user import PeersLostError, UserError
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.islands.members import IslandFencedError
from torchtitan_diloco.islands_store.decision import ENDS, ORDERS
from torchtitan_diloco.islands_store.island import REJOIN, Island


@dataclass(frozen=True)
class Seat:
    """Position of an island in the run."""

    run: str
    slot: int
    slots: int
    streams: int
    block: int
    position: int
    """First sample of the slot for this island."""
    entered: tuple[int, ...] = ()
    """Positions at which the stream of the slot has entered phases of the data."""


def seat_of(machine: Island) -> Seat:
    """Return the position of an island that may train."""
    decision = machine.decision
    assert decision is not None
    assert machine.slot is not None
    settings = decision.settings
    return Seat(
        run=decision.run,
        slot=machine.slot,
        slots=settings.slots,
        streams=settings.streams,
        block=settings.block,
        position=machine.position,
        entered=tuple(machine.entered),
    )


def raise_if_over(machine: Island, islands: Islands) -> None:
    """Raise an error if another process has the place of this island, or another island its
    slot."""
    name = islands.name
    if machine.ending in ENDS:
        raise IslandFencedError(f"island {name} ends: {ORDERS[machine.ending]}")
    if machine.ending == REJOIN:
        raise PeersLostError(
            f"island {name} was silent for long, and another one has its slot: start it again, "
            "from its latest checkpoint, to get the newest shared copy and a slot"
        )


def raise_if_ended(machine: Island, islands: Islands) -> None:
    """Raise an error if there is nothing left to train."""
    decision = machine.decision
    if decision is not None and decision.ended and machine.slot is None:
        raise UserError(
            f"run {decision.run} in {islands.join} has ended after "
            f"{decision.fragments[0].clock:,} tokens: join another one, or make this one "
            f"longer with a larger total_tokens"
        )
