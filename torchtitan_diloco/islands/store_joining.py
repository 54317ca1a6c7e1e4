"""What an island takes when it joins a run in a store, and what it waits for.

(The name of this file is temporary: it becomes `joining.py` when the islands with a log go.)
"""

import os
import time
from dataclasses import dataclass

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import LOCAL_ISLANDS, RunOverError, command_line
from torchtitan_diloco.diloco.liveness import LATE_SECONDS
from torchtitan_diloco.diloco.witness import STILL_SECONDS
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.store_witness import StoreWitness
from torchtitan_diloco.islands_store.island import Island
from torchtitan_diloco.islands_store.names import name_of


@dataclass(frozen=True)
class Seat:
    """Position of an island in the run."""

    slot: int
    slots: int
    streams: int
    block: int
    position: int
    """First sample of the slot for this island."""
    entered: tuple[int, ...] = ()
    """Positions at which the stream of the slot has entered phases of the data."""


def take_seat(name: str, machine: Island, clock: int) -> Seat:
    """Log and return the seat of an island that begins to train. `clock`: tokens of the run."""
    settings = machine.settings
    decision = machine.decision
    slot = machine.slot
    assert decision is not None
    assert slot is not None
    copy = f"takes the newest shared copy, of {clock:,} tokens, and " * (clock > 0)
    logger.info(
        f"island {name} has slot {slot} of {settings.slots} in run {decision.run}, {copy}starts "
        f"at its sample {machine.position:,}"
    )
    return Seat(
        slot,
        settings.slots,
        settings.streams,
        settings.block,
        machine.position,
        tuple(machine.entered),
    )


def raise_if_ended(join: str, machine: Island) -> None:
    """Raise a RunOverError if a run has ended before this island has joined. `join`: its
    location."""
    decision = machine.decision
    if decision is not None and decision.ended and machine.slot is None:
        command = f"{command_line('islands')} change total_tokens TOKENS --join {join}"
        key = "run.folder" if LOCAL_ISLANDS in os.environ else "islands.join"
        raise RunOverError(
            f"run {decision.run} in {join} has ended after {decision.fragments[0].clock:,} "
            f"tokens, so nothing is left to train: `{command}` makes it longer, and another "
            f"{key} begins a new run"
        )


class WaitLog:
    """Logs what training waits for, at growing intervals."""

    def __init__(self, witness: StoreWitness) -> None:
        """`witness`: its watcher is told about the islands that are missing."""
        self._witness = witness
        self._said_seconds = 0.0

    def say(self, link: Link | None, since: float, usual: str) -> None:
        """Log a wait that began at a time of `time.monotonic`.

        `link`: only the first rank has one, and logs. `usual`: for what training waits, if store
        and syncer are heard.
        """
        if link is None:
            return
        waited = time.monotonic() - since
        watcher = self._witness.watcher
        if waited >= STILL_SECONDS and watcher is not None:
            watcher.missing(self._witness.late())
        if waited < STILL_SECONDS:
            self._said_seconds = 0.0
        elif waited > max(LATE_SECONDS, 2 * self._said_seconds):
            self._said_seconds = waited
            name = name_of(link.machine.incarnation)
            what = _describe_wait(link, usual)
            logger.warning(f"island {name}: waiting since {waited:.0f} s for {what}")


def _describe_wait(link: Link, usual: str) -> str:
    place = link.run.location
    if link.away_seconds > STILL_SECONDS:
        return f"the store {place}, which cannot be reached since {link.away_seconds:.0f} s"
    if time.monotonic() - link.machine.heard_at > STILL_SECONDS:
        command = f"{command_line('islands')} sync {place}"
        return f"a syncer: start `{command}`, if none is running"
    return usual
