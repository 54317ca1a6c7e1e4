"""What a checkpoint of an island contains about the run.

A restart takes the inner optimizer and the published copy P from its checkpoint. Its parameters
become P, and what was not merged is read again.
"""

from collections.abc import Sequence

import msgspec

from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import Checksum, Count, Name, Tokens
from torchtitan_diloco.islands.rules.founding import Founding, SlotStart
from torchtitan_diloco.islands.rules.settings import Settings


class SavedFragment(msgspec.Struct, array_like=True, frozen=True):
    """The copy P of a fragment."""

    version: Count
    checksum: Checksum | None = None
    """Computed when it is loaded."""


class Saved(msgspec.Struct, frozen=True):
    run: Name
    """Empty if the checkpoint is of a job without islands, which is never stored."""
    fragments: list[SavedFragment]
    """Empty before the island has all copies."""
    clocks: list[Tokens]
    """Merged tokens of each fragment, with which a run can be founded in a new location."""
    slots: list[SlotStart]
    settings: Settings | None
    """Those of the run, with all changes. None: the checkpoint is of a job without islands."""
    slot: Count | None = None
    """Slot of the island, if it has one."""
    position: Count = 0
    """Next sample of the slot. What is not merged before it is read again after a restart."""

    @classmethod
    def of_job(cls, tokens: int, fragments: int, slots: Sequence[SlotStart]) -> "Saved":
        """Return what the checkpoint of a job contains. `slots`: where their samples begin.

        Its tokens are those of a run that is founded from it, and say nothing about others.
        """
        clocks = [tokens] * fragments
        return cls("", fragments=[], clocks=clocks, slots=list(slots), settings=None)

    def with_checksums(self, checksums: Sequence[str]) -> "Saved":
        """Return the same with the checksums of the copies as they were loaded."""
        fragments = [
            SavedFragment(fragment.version, checksum)
            for fragment, checksum in zip(self.fragments, checksums, strict=True)
        ]
        return msgspec.structs.replace(self, fragments=fragments)

    def found(self, founding: Founding) -> Founding:
        """Return the founding that continues from this checkpoint in a new location.

        A run whose location is lost keeps its name, so that the other islands can return with their
        checkpoints, and its settings: slots may have been added, and their positions are those of
        its streams.
        """
        founding = msgspec.structs.replace(founding, clocks=self.clocks, slots=self.slots)
        if self.settings is None:
            return founding
        settings = self.settings.founded_again(founding.settings)
        return msgspec.structs.replace(founding, run=self.run, settings=settings)


def save(decision: Decision, versions: Sequence[int], *, slot: int | None, position: int) -> Saved:
    """Return the content of a checkpoint. `versions`: of the copies P, -1 where there is none."""
    has_all = min(versions, default=-1) >= 0
    return Saved(
        run=decision.run,
        fragments=[SavedFragment(version) for version in versions] if has_all else [],
        clocks=[shared.clock for shared in decision.fragments],
        slots=[
            SlotStart(slot.furthest, list(slot.entered), slot.corpus) for slot in decision.slots
        ],
        settings=decision.settings,
        slot=slot,
        position=position,
    )
