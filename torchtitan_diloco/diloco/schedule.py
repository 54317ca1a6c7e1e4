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
    """Steps of a cycle (H)."""
    fragments: int
    """Number of fragments (P)."""
    delay: int
    """Steps from a send to its apply (tau < H). If they exceed the distance of two sends, several
    fragments are in flight."""
    beginning_steps: int = 0
    """Number of steps with `beginning_every` as H and without delay."""
    beginning_every: int = 1

    def offset(self, fragment: int, every: int = 0) -> int:
        """Return t_p, the step of a cycle after which the fragment is sent. `every`: default H."""
        every = every or self.sync_every
        # Fragments take turns at equal distances. If there are more than steps in a cycle, the
        # modulo lets several have the same turn.
        return fragment * max(1, every // self.fragments) % every

    def first_send(self, fragment: int) -> int:
        """Return the first step after which the fragment is sent, in a run without a beginning."""
        return self.sync_every + self.offset(fragment)

    def is_average(self, step: int) -> bool:
        """Return whether training waits for fragments sent after this step, which are averaged
        plainly."""
        return step <= self.beginning_steps

    def sent_at(self, step: int) -> list[int]:
        """Return the fragments to send after this step: several if there are more than H."""
        every = self.beginning_every if step <= self.beginning_steps else self.sync_every
        due = list[int]()
        for fragment in range(self.fragments):
            steps = step - self.offset(fragment, every)
            if steps >= every and steps % every == 0:  # the first time after a whole cycle
                due.append(fragment)
        return due

    def applied_at(self, step: int) -> list[int]:
        if self.is_average(step):
            return self.sent_at(step)
        sent = step - self.delay
        return [] if self.is_average(sent) else self.sent_at(sent)

    def outer_round(self, fragment: int, step: int) -> int:
        """Return how often the fragment was sent by the end of this step."""
        # Up to the end of the beginning, count the turns of its cycle. From there on, count those
        # of the usual cycle, which has been running since the first step.
        early = min(step, self.beginning_steps)
        in_beginning = self._turns(fragment, self.beginning_every, early)
        by_now = self._turns(fragment, self.sync_every, step)
        return in_beginning + by_now - self._turns(fragment, self.sync_every, early)

    def _turns(self, fragment: int, every: int, step: int) -> int:
        """Return how often the fragment is sent by the end of a step if H is constant."""
        return max(0, (step - self.offset(fragment, every)) // every)


def build_schedule(config: DiLoCoConfig, fragments: int) -> Schedule:
    return Schedule(
        sync_every=config.sync_every,
        fragments=fragments,
        delay=config.overlap.delay,
        beginning_steps=int(config.beginning.length),
        beginning_every=config.beginning.sync_every,
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
