"""Islands that have other bits of a shared copy than this one."""

import time

from torchtitan_diloco.islands.log import Outcome
from torchtitan_diloco.islands.members import IslandFailedError, name_of
from torchtitan_diloco.islands.records import Close, Part
from torchtitan_diloco.islands.rules import Island
from torchtitan_diloco.utils import logger


class Disputes:
    def __init__(self, patience: float) -> None:
        """`patience`: seconds in which another island may confirm the bits of this one."""
        self._patience = patience
        self._confirmed: dict[int, int] = {}
        """Newest version of each fragment that another island has with the same bits."""
        self._open: dict[int, tuple[int, float, str]] = {}
        """Version with other bits, when this island gives up, and the reason, by fragment."""

    def note(self, outcome: Outcome, incarnation: str) -> None:
        """Remember what a record of another island says of its copies."""
        record = outcome.record
        if not isinstance(record, Part | Close) or record.incarnation == incarnation:
            return
        fragment = record.fragment
        version = record.base if isinstance(record, Part) else record.version - 1
        if outcome.disputed:
            writer = name_of(record.incarnation)
            text = f"island {writer} has other bits of fragment {fragment}: {outcome.void}"
            self._open[fragment] = version, time.monotonic() + self._patience, text
        elif not outcome.void:
            self._confirmed[fragment] = max(self._confirmed.get(fragment, -1), version)

    def settle(self, island: Island) -> None:
        """Continue where another island has confirmed this one's bits, and end where none has."""
        for fragment, (version, deadline, text) in list(self._open.items()):
            if self._confirmed.get(fragment, -1) >= version:
                logger.warning(f"{text}; another island has those of this one")
                del self._open[fragment]
                island.syncs[fragment].disputed = False
            elif time.monotonic() > deadline:
                raise IslandFailedError(
                    f"{text}; no island has confirmed those of this one, so it ends: one of them "
                    "has a memory fault, or computes differently. Started again, it replays the log"
                )
