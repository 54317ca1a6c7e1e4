"""When to send, apply, measure and drop fragments, without torch."""

import hashlib
from dataclasses import dataclass

from torchtitan_diloco.diloco.config import DiLoCoConfig


@dataclass(frozen=True)
class Schedule:
    """Each fragment is sent every `sync_every` steps and applied `delay` steps later.

    Steps are counted from 1. Everything is a function of the step, so a run can be resumed at any
    step, and all workers do the same in the same order.

    A new setting that changes the schedule also belongs in `state_dict.resume_settings`, so that a
    restart knows that fragments in flight no longer fit, and in tests/diloco/reference.py.
    """

    sync_every: int
    """H."""
    fragments: int
    """P."""
    delay: int
    """tau < H. If it exceeds the distance of two sends, several fragments are in flight."""
    beginning_steps: int = 0
    """Steps with `beginning_every` as H and without delay."""
    beginning_every: int = 1
    ramp: bool = False
    """H then doubles each time the run is twice as long, up to `sync_every`. tau is below each."""

    def offset(self, fragment: int, every: int = 0) -> int:
        """Return t_p, the step of a cycle after which the fragment is sent. `every`: default H."""
        every = every or self.sync_every
        return fragment * max(1, every // self.fragments) % every

    @property
    def _doublings(self) -> int:
        """Return how often H doubles. The last time it may grow less."""
        ramps = self.ramp and self.beginning_steps > 0
        return ((self.sync_every - 1) // self.beginning_every).bit_length() * ramps

    def turns(self, step: int) -> tuple[int, int]:
        """Return H in this step, and the step after which fragments take turns with it."""
        if step <= self.beginning_steps:
            return self.beginning_every, 0
        if not self._doublings:
            return self.sync_every, 0
        doublings = ((step - 1) // self.beginning_steps).bit_length()
        doublings = min(doublings, self._doublings)
        every = min(self.beginning_every << doublings, self.sync_every)
        return every, self.beginning_steps << doublings - 1

    def first_send(self, fragment: int) -> int:
        """Return the first step after which the fragment is sent, in a run without a beginning."""
        return self.sync_every + self.offset(fragment)

    def is_average(self, step: int) -> bool:
        """Return whether fragments sent after this step are waited for and averaged plainly."""
        return step <= self.beginning_steps

    def sent_at(self, step: int) -> list[int]:
        """Return the fragments to send after this step: several if there are more than H."""
        every, begin = self.turns(step)
        since = [step - begin - self.offset(fragment, every) for fragment in range(self.fragments)]
        return [p for p, steps in enumerate(since) if steps >= every and steps % every == 0]

    def applied_at(self, step: int) -> list[int]:
        if self.is_average(step):
            return self.sent_at(step)
        sent = step - self.delay
        return [] if self.is_average(sent) else self.sent_at(sent)

    def outer_round(self, fragment: int, step: int) -> int:
        """Return how often the fragment was sent by the end of this step."""
        rounds, before, first = 0, 0, self.beginning_steps
        for end in (*(first << doublings for doublings in range(self._doublings or 1)), step):
            last = min(end, step)
            if last > before:
                every, begin = self.turns(last)
                rounds += self._count(fragment, every, last - begin)
                rounds -= self._count(fragment, every, before - begin)
                before = last
        return rounds

    def _count(self, fragment: int, every: int, step: int) -> int:
        """Return how often the fragment is sent by the end of a step if H is constant."""
        return max(0, (step - self.offset(fragment, every)) // every)


def build_schedule(config: DiLoCoConfig, fragments: int) -> Schedule:
    return Schedule(
        sync_every=config.sync_every,
        fragments=fragments,
        delay=config.overlap.delay,
        beginning_steps=config.beginning.steps,
        beginning_every=config.beginning.sync_every,
        ramp=config.beginning.ramp,
    )


def is_measured(outer_round: int, every: int) -> bool:
    """Return whether norms, cosines and drift are measured in this round. `every` = 0: never."""
    return every > 0 and (outer_round == 1 or outer_round % every == 0)


def is_dropped(probability: float, seed: int, worker: int, fragment: int, outer_round: int) -> bool:
    """Return whether a worker is dropped from a round. A resumed run drops the same ones."""
    if not probability:
        return False
    digest = hashlib.sha256(f"{seed}/{worker}/{fragment}/{outer_round}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < probability * 2**64
