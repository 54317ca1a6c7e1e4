"""Whether a location contains the run of an island, in the state that the island knows."""

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands_store.checkpoint import Saved
from torchtitan_diloco.islands_store.decision import Decision
from torchtitan_diloco.islands_store.note import Founding


def check_empty(founds: Founding | None, saved: Saved | None) -> None:
    """Raise a UserError if an island may not found a run in an empty location: it may be a folder
    that is not mounted, or a typo."""
    if founds is None:
        of_run = "" if saved is None else f", and the checkpoint is of run {saved.run}"
        raise UserError(
            f"the location is empty{of_run}: give the location of the run, or set "
            "--islands.found true to continue there from this checkpoint"
        )


def check_run(decision: Decision, founds: Founding | None, saved: Saved | None) -> None:
    """Raise a UserError if an island does not fit the run."""
    if saved is not None and saved.run != decision.run:
        raise UserError(
            f"the location contains run {decision.run}, but the checkpoint belongs "
            f"to run {saved.run}: give the location of that run, or another "
            "run.folder"
        )
    own = {} if founds is None else founds.settings.facts
    of_run = decision.settings.facts
    for key in sorted(own.keys() | of_run.keys()) if founds is not None else ():
        if own.get(key) != of_run.get(key):
            raise UserError(
                f"{key} is {own.get(key)} here and {of_run.get(key)} in the "
                "run: start this island with the value of the run"
            )


def went_back(before: Decision, after: Decision, slot: int | None) -> bool:
    """Return whether earlier decisions are no longer valid, because the store was restored to an
    older state and another syncer has continued from there."""
    if not before.is_founded:
        return False
    if before.run != after.run or len(after.fragments) != len(before.fragments):
        return True
    fragments = zip(before.fragments, after.fragments, strict=True)
    if any(old.version > new.version for old, new in fragments):
        return True
    if slot is None:
        return False
    if slot >= len(after.slots):
        return True
    ledgers = zip(before.slots[slot].ledgers, after.slots[slot].ledgers, strict=True)
    return any(old.number > new.number for old, new in ledgers)
