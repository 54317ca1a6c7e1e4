"""When the syncer writes copies of the fragments, from which islands and later syncers start."""

from torchtitan_diloco.islands.rules.decision import SharedFragment
from torchtitan_diloco.islands.rules.settings import Settings

COPY_VERSIONS = 8
"""Number of versions after which a newer copy is a smaller download."""
COPY_SECONDS = 600.0
"""Maximum seconds between two copies of a fragment that has new versions."""


class CopySchedule:
    def __init__(self, fragments: range, now: float) -> None:
        self.is_asked = False
        """Whether an island without a slot is far behind, and asks for newer copies."""
        self._begun_at = dict.fromkeys(fragments, now)

    def is_due(self, number: int, shared: SharedFragment, settings: Settings, now: float) -> bool:
        """Return whether a fragment needs a newer copy: the last one of the run in any case."""
        behind = shared.version - shared.copies[-1].version
        is_late = now - self._begun_at[number] > COPY_SECONDS
        is_last = shared.clock >= settings.total_tokens
        return (
            behind >= settings.copies_every
            or (behind >= COPY_VERSIONS and self.is_asked)
            or (behind > 0 and (is_late or is_last))
        )

    def note_begun(self, number: int, now: float) -> None:
        """Take note that a copy of a fragment is being written."""
        self._begun_at[number] = now
