"""Which fragment is sent and which is applied after which inner step: arithmetic on (step, H, offsets, tau), no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Fragments take turns: each is sent once every `sync_every` steps, `delay` steps later what came back is applied.

    Steps are counted from 1. Nothing is remembered, so a run can be resumed at any step, and every worker that is given
    the same numbers does the same things in the same order.
    """

    sync_every: int
    """H."""
    fragments: int
    """P."""
    delay: int
    """tau, smaller than H. It may exceed the distance between two fragments: several are in flight then."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay < self.sync_every:
            raise ValueError(
                f"diloco.overlap.delay = {self.delay} must be at least 0 and smaller than diloco.sync_every = "
                f"{self.sync_every}: a fragment has to be back before it is sent again"
            )

    def offset(self, fragment: int) -> int:
        """t_p: where in the cycle of H steps the fragment has its turn."""
        return fragment * max(1, self.sync_every // self.fragments) % self.sync_every

    def first_send(self, fragment: int) -> int:
        return self.sync_every + self.offset(fragment)

    def sent_at(self, step: int) -> list[int]:
        """Fragments sent after this step, in order; several where there are more fragments than steps in a cycle."""
        return [fragment for fragment in range(self.fragments) if self._is_turn(fragment, step)]

    def applied_at(self, step: int) -> list[int]:
        """Fragments applied after this step."""
        return self.sent_at(step - self.delay)

    def outer_round(self, fragment: int, step: int) -> int:
        """How often the fragment has been sent after this step."""
        return max(0, (step - self.first_send(fragment)) // self.sync_every + 1)

    def _is_turn(self, fragment: int, step: int) -> bool:
        first = self.first_send(fragment)
        return step >= first and (step - first) % self.sync_every == 0
