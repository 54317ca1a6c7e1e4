"""Which islands of a run are late, absent or wrong, from what the syncer has seen of them.

All follows from the newest decision, whose times are on one clock. No decision depends on it.
"""

from collections.abc import Sequence

from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.vitals import ALL_WORKERS, Report, VerdictKind, Vitals, absence
from torchtitan_diloco.islands.rules import presence
from torchtitan_diloco.islands.rules.decision import IS_IDLE, Decision, Fate, Seen, Slot
from torchtitan_diloco.islands.rules.names import name_of

KINDS = (
    VerdictKind.STOPPED,
    VerdictKind.HUNG,
    VerdictKind.STUCK,
    VerdictKind.NO_ROOM,
    VerdictKind.NUMBERS,
    VerdictKind.LOAD,
    VerdictKind.COMPUTE,
    VerdictKind.DATA,
    VerdictKind.SAVE,
    VerdictKind.SENDING,
    VerdictKind.RECEIVING,
    VerdictKind.LINK,
    VerdictKind.EVERYBODY,
)
"""Kinds of verdicts, the worst first. The code of a kind in a note is its place here, plus one."""
MOVING_STEPS = 3
"""Number of usual steps after which an island without a step counts as not moving."""

# --- codes in notes -------------------------------------------------------------------------------


def code_of(verdicts: Sequence[str], name: str) -> int:
    """Return the code of the worst verdict about this island, or 0 if there is none.

    `verdicts`: of the form `CULPRIT: KIND`. Each island finds those about others itself.
    """
    about = [
        kind
        for culprit, _, kind in (verdict.partition(": ") for verdict in verdicts)
        if culprit in (name, ALL_WORKERS) and kind in KINDS
    ]
    return 1 + min(map(KINDS.index, about)) if about else 0


def kind_of(code: int) -> str:
    """Return what an island says of itself, or an empty string."""
    return KINDS[code - 1] if 0 < code <= len(KINDS) else ""


# --- reports --------------------------------------------------------------------------------------


def reports_of(decision: Decision) -> dict[str, Report]:
    """Return the reports of all islands with a slot, by name."""
    pairs = zip(decision.slots, decision.seen, strict=False)
    return {
        name_of(slot.owner): _report(decision, slot, seen)
        for slot, seen in pairs
        if slot.owner is not None and seen is not None
    }


def is_silent(seen: Seen) -> bool:
    return seen.heard > presence.SILENT


def is_moving(seen: Seen) -> bool:
    """Return whether an island has completed a step lately."""
    return seen.still < max(presence.SILENT, MOVING_STEPS * seen.step_seconds)


def _report(decision: Decision, slot: Slot, seen: Seen) -> Report:
    """Return the report of an island. While it completes no steps, only the time of its downloads
    counts: it may wait for them, and the other values belong to old steps."""
    says = kind_of(seen.says)
    may_wait = not decision.begun or decision.ended or not seen.step or bool(seen.flags & IS_IDLE)
    absent = absence(
        answers=not is_silent(seen),
        still=seen.still,
        longest=max(presence.SILENT, decision.settings.slot_seconds),
        may_wait=may_wait,
        is_stuck=says in (VerdictKind.STUCK, VerdictKind.NO_ROOM),
    )
    if absent == VerdictKind.STUCK:
        absent = says
    flags = _flags(slot)
    if says == VerdictKind.NUMBERS:
        flags |= NOT_FINITE
    evidence = {
        VerdictKind.STOPPED: f"no note of it for {seen.heard:.0f} s",
        VerdictKind.HUNG: f"its last step, {seen.step}, was {seen.still:.0f} s ago",
        VerdictKind.STUCK: "it says so",
        VerdictKind.NO_ROOM: "it says so",
        "": "",
    }
    noted = seen.vitals
    vitals = Vitals(download=noted.download)
    if is_moving(seen):
        vitals = Vitals(
            compute=noted.compute,
            data=noted.data,
            save=noted.save,
            queued=noted.queued,
            upload=noted.upload,
            download=noted.download,
        )
    return Report(vitals, flags, absent=absent, evidence=evidence[absent])


def _flags(slot: Slot) -> int:
    """Return the flags of the part of a slot that was decided last."""
    last = max(slot.ledgers, key=lambda ledger: (ledger.since, ledger.number))
    if last.fate is Fate.NOT_FINITE:
        return NOT_FINITE
    return OUTLIER if last.fate is Fate.OUTLIER else 0
