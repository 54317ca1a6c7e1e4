"""Describe what an island or a syncer waits for, and log it at growing intervals."""

import os
import time

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import LOCAL_ISLANDS, command_line
from torchtitan_diloco.diloco.liveness import LATE_SECONDS
from torchtitan_diloco.diloco.reports import STILL_SECONDS
from torchtitan_diloco.islands.instructions import Instructions
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.names import name_of
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.store import AwayError, FullError, Store, open_store
from torchtitan_diloco.store.store import PATIENCE_SECONDS

OFTEN = 60.0
"""Longest time between two lines about the same wait, in seconds."""
OPEN_SECONDS = 5.0
"""Time for an attempt to open a store."""
AWAY_SECONDS = 10.0
"""Seconds without the store after which an island that leaves gives up."""
UNDECIDED_SECONDS = 25.0
"""Seconds without a decision after which it gives up. Another syncer takes over after ten
seconds."""


class Waiting:
    """Logs what a process waits for: after ten seconds, and then at growing intervals."""

    def __init__(self, who: str) -> None:
        """Name the process that waits. `who`: its name in the log, such as `island a`."""
        self._who = who
        self._said = 0.0

    def say(self, since: float, what: str) -> None:
        """Log what is waited for, if for long. `since`: when the wait has begun, in the time of
        `time.monotonic`."""
        waited = time.monotonic() - since
        if waited < STILL_SECONDS:
            self._said = 0.0
        elif waited > max(LATE_SECONDS, min(2 * self._said, self._said + OFTEN)):
            self._said = waited
            logger.warning(f"{self._who}: waiting since {waited:.0f} s for {what}")

    def open(self, location: str, writes: str) -> Store:
        """Open the store of a run, after waiting until it is there, and has room."""
        since = time.monotonic()
        while True:
            try:
                store = open_store(location, writes=writes, patience=OPEN_SECONDS)
            except (AwayError, FullError) as error:
                self.say(since, f"the store: {error}")
                time.sleep(STILL_SECONDS)
            else:
                return store.with_patience(PATIENCE_SECONDS)


def obstacle(link: Link, what: str) -> str:
    """Return what an island waits for: the store, the syncer, or, if both are there, `what`."""
    away = link.away_seconds
    if away > STILL_SECONDS:
        return f"the store {link.run.location}, which cannot be reached since {away:.0f} s"
    machine = link.machine
    can_begin = machine.decision is not None or machine.founds is not None
    if can_begin and time.monotonic() - machine.heard_at > STILL_SECONDS:
        command = f"{command_line('islands')} sync {link.run.location}"
        return f"a syncer: start `{command}`, if none is running"
    return what


def before_start(machine: Island) -> str:
    """Return what an island waits for until it trains, other than the store and the syncer."""
    decision = machine.decision
    if decision is None:
        return "an island that may begin the run, such as one with the join file of the owner"
    if not decision.is_founded:
        is_own = decision.founder == machine.incarnation
        founder = "its own" if is_own else f"those of island {name_of(decision.founder)}"
        return f"the first copies to be stored, {founder}"
    if decision.ended and machine.may_go_on:
        return "a change of the run, which has ended, to be made"
    if decision.ended:
        return "the final copies of the run, which has ended"
    if machine.slot is None:
        slots = decision.settings.slots
        fitting = [slot for slot in decision.slots if slot.corpus in ("", machine.corpus)]
        is_full = len(decision.slots) == slots and all(slot.owner for slot in fitting)
        if is_full and len(fitting) < slots:
            return f"a slot of its corpus: {len(fitting)} of {slots} (islands.slots) are of it"
        if is_full:
            return f"a slot: {counted(slots, 'slot')} (islands.slots) have owners"
        return "a slot" if machine.is_near() else "the newest copies"
    if not decision.begun:
        return _more_islands(decision)
    return "the newest copies"


def awaited_by_syncer(machine: Syncer, location: str) -> str:
    """Return what a syncer waits for while it has nothing to merge, an empty string if islands
    train or the run has ended."""
    decision = machine.state
    if decision is None:
        return f"islands in {location}"
    if not decision.is_founded:
        return f"the first copies of island {name_of(decision.founder)} in {location}"
    if decision.ended:
        return ""
    if all(map(machine.presence.is_silent, decision.owners())):
        return f"islands in {location}"
    return "" if decision.begun else _more_islands(decision)


def _more_islands(decision: Decision) -> str:
    return (
        f"more islands: {len(decision.owners())} of the {decision.settings.start_with} that start "
        "together (islands.begin of the run) are there"
    )


def at_boundary(machine: Island) -> str:
    """Return what training waits for between two steps."""
    decision = machine.decision
    others = [] if decision is None else list(map(name_of, decision.ready))
    others = sorted(name for name in others if name != name_of(machine.incarnation))
    senders = f", to which {' and '.join(others)} contribute" if others else ""
    return f"versions with its last parts{senders}"


def reason_to_leave_now(instructions: Instructions) -> str:
    """Return why an island that leaves does not wait for its last parts, or an empty text."""
    if instructions.away_seconds > AWAY_SECONDS:
        return f"its store cannot be reached since {AWAY_SECONDS:g} s"
    if instructions.undecided_seconds > UNDECIDED_SECONDS:
        return f"no syncer has decided for {UNDECIDED_SECONDS:g} s"
    return ""


def say_end(machine: Island, join: str) -> None:
    """Log that a run has ended before this island took a step, and what can be done."""
    decision = machine.decision
    assert decision is not None
    command = f"{command_line('islands')} change total_tokens TOKENS --join {join}"
    key = "run.folder" if LOCAL_ISLANDS in os.environ else "islands.join"
    logger.info(
        f"run {decision.run} in {join} has ended after {decision.fragments[0].clock:,} tokens, so "
        f"nothing is left to train, and island {name_of(machine.incarnation)} has its final model: "
        f"`{command}` makes it longer, and another {key} begins a new run"
    )
