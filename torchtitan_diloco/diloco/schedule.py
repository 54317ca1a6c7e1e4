"""When each fragment is sent, applied, measured and dropped: arithmetic without torch."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Turns of the fragments: each is sent every `sync_every` steps, applied `delay` steps later.

    Steps are counted from 1. Everything follows from the step alone, so a run can be resumed at any
    step, and all workers do the same things in the same order.
    """

    sync_every: int
    """H."""
    fragments: int
    """P."""
    delay: int
    """tau < H. It may exceed the distance of two sends: then several fragments are in flight."""

    def offset(self, fragment: int) -> int:
        """Return t_p, the step of the cycle of H steps after which the fragment is sent."""
        return fragment * max(1, self.sync_every // self.fragments) % self.sync_every

    def first_send(self, fragment: int) -> int:
        return self.sync_every + self.offset(fragment)

    def sent_at(self, step: int) -> list[int]:
        """Return the fragments to send after this step, several if there are more than H."""
        return [p for p in range(self.fragments) if self._is_sent(p, step)]

    def applied_at(self, step: int) -> list[int]:
        return self.sent_at(step - self.delay)

    def outer_round(self, fragment: int, step: int) -> int:
        """Return how often the fragment has been sent by the end of this step."""
        return max(0, (step - self.first_send(fragment)) // self.sync_every + 1)

    def _is_sent(self, fragment: int, step: int) -> bool:
        since = step - self.first_send(fragment)
        return since >= 0 and since % self.sync_every == 0


def is_measured(outer_round: int, every: int) -> bool:
    """Return whether norms, cosines and drift are measured in this round; `every` 0 is never."""
    return every > 0 and (outer_round == 1 or outer_round % every == 0)


def is_dropped(probability: float, seed: int, worker: int, fragment: int, outer_round: int) -> bool:
    """Return whether a worker misses a round on purpose. A resumed run draws the same rounds."""
    if not probability:
        return False
    digest = hashlib.sha256(f"{seed}/{worker}/{fragment}/{outer_round}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < probability * 2**64
