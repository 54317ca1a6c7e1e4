"""How an island resumes from its own checkpoint.

The inner optimizer always comes from the checkpoint. Parameters and position only do if each ledger
of the slot is still at the position in the checkpoint, or at the end of the part that was
undecided.
"""

from collections.abc import Sequence

import msgspec

from torchtitan_diloco.islands_store.decision import Checksum, Count, Ledger, Name
from torchtitan_diloco.islands_store.fragment import OwnFragment
from torchtitan_diloco.islands_store.note import Part


class SavedFragment(msgspec.Struct, array_like=True, frozen=True):
    """Content of a checkpoint for a fragment, in addition to theta and P."""

    version: Count
    checksum: Checksum | None
    """Checksum of P, computed when it is loaded."""
    turn_in: int  # steps
    uncounted: Count  # own tokens whose work is in no part
    lost_to: Count
    number: Count  # of the ledger
    taken: Count
    sent: Part | None

    def fits(self, ledger: Ledger) -> bool:
        if (ledger.number, ledger.taken) == (self.number, self.taken):
            return True
        return self.sent is not None and ledger.number == self.sent.number


class Saved(msgspec.Struct, frozen=True):
    """Content of a checkpoint of an island, in addition to theta and P."""

    run: Name
    slot: Count
    position: Count
    tokens: Count
    clock: Count
    fragments: list[SavedFragment]

    def fits(self, slot: int, ledgers: Sequence[Ledger]) -> bool:
        pairs = zip(self.fragments, ledgers, strict=True)
        return self.slot == slot and all(saved.fits(ledger) for saved, ledger in pairs)


def can_save(one: OwnFragment) -> bool:
    """Return whether a restart could resume from the current theta and P."""
    is_lost = one.sent is not None and not one.is_in_theta
    return not (is_lost or one.resets or one.is_wrong)


def save(one: OwnFragment) -> SavedFragment:
    return SavedFragment(
        version=one.applied,
        checksum=None,
        turn_in=one.turn - one.island.step,
        uncounted=one.island.tokens - one.counted,
        lost_to=one.lost_to,
        number=one.ledger.number,
        taken=one.ledger.taken,
        sent=one.sent,
    )


def resume(one: OwnFragment, saved: SavedFragment) -> None:
    """Resume with theta, P and the part in flight of a checkpoint that fits."""
    one.turn, one.lost_to = saved.turn_in, saved.lost_to
    one.counted = one.island.tokens - saved.uncounted
    if saved.sent is None:
        return
    if one.ledger.number == saved.sent.number:
        one.sent, one.is_stored = saved.sent, True
        one.sent_step = -one.island.settings.delay - 1  # late
        one.on_decision(0.0)
    else:  # it was never listed: its work is in theta, and is sent again
        one.counted -= saved.sent.weight
