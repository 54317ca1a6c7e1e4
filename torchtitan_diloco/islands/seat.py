"""The place that an island takes when it joins a run."""

from dataclasses import dataclass

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.islands.rules.island import Island


@dataclass(frozen=True)
class Seat:
    """Position of an island in the run."""

    slot: int
    """0 if the run has ended before it had one, so that it reads nothing."""
    slots: int
    streams: int
    block: int
    position: int
    """First sample of the slot for this island."""
    entered: tuple[int, ...] = ()
    """Positions at which the stream of the slot has entered phases of the data."""


def take_seat(name: str, machine: Island) -> Seat:
    """Log and return the seat of an island that begins to train."""
    settings = machine.settings
    decision = machine.decision
    slot = machine.slot
    assert decision is not None
    if slot is not None:
        copy = f"takes the newest shared copy, of {machine.clock.tokens:,} tokens, and " * (
            machine.clock.tokens > 0
        )
        logger.info(
            f"island {name} has slot {slot} of {settings.slots} in run {decision.run}, "
            f"{copy}starts at its sample {machine.position:,}"
        )
    if machine.dropped_samples:
        logger.info(
            f"island {name} reads {machine.dropped_samples:,} samples again: its work on them was "
            "not merged, and is dropped"
        )
    return Seat(
        slot or 0,
        settings.slots,
        settings.streams,
        settings.block,
        machine.position,
        tuple(machine.entered),
    )
