"""What workers tell each other about their steps and links, and what can be wrong with them."""

import math
from enum import StrEnum
from typing import NamedTuple


class Vitals(NamedTuple):
    """Vitals that a worker reports about itself, in seconds. 0: unknown."""

    compute: float = 0.0
    """Time of a step, without waiting for data or other workers."""
    data: float = 0.0
    """Time of waiting for data, per step."""
    save: float = 0.0
    """Time for which checkpoints pause training, per step."""
    queued: float = 0.0
    """Time for which the training thread was ready to run but had no core, per step."""
    upload: float = 0.0
    """Time of sending to the store, per cycle."""
    download: float = 0.0
    """Time of receiving from the store, per cycle."""
    transfers: tuple[float, ...] = ()
    """Time of receiving from each worker of one job, per cycle, at the rate of the last round."""

    @property
    def step(self) -> float:
        return self.compute + self.data + self.save

    @property
    def longest_transfer(self) -> float:
        """Seconds for which the link of this worker is busy in a cycle."""
        return max(self.upload, self.download, *self.transfers)


NOTHING_SAID = Vitals()
ALL_WORKERS = "all"
"""The culprit of a verdict about all workers."""


class VerdictKind(StrEnum):
    """What is wrong: with the first ones, a worker is absent."""

    STOPPED = "stopped"
    """It does not answer, or sends no heartbeats."""
    HUNG = "hung outside communication"
    """It answers, but completes no step."""
    STUCK = "hung in communication"
    """Only its payload does not arrive."""
    NO_ROOM = "full store"
    """Its payload does not arrive, as the store has no room for it."""
    LOAD = "busy cores"
    COMPUTE = "slow compute"
    DATA = "slow data"
    SAVE = "slow save"
    LINK = "slow link"
    SENDING = "slow sending"
    RECEIVING = "slow receiving"
    NUMBERS = "wrong numbers"
    EVERYBODY = "everybody slow"


def absence(
    *,
    answers: bool,
    still: float = 0.0,
    longest: float = math.inf,
    may_wait: bool = False,
    is_stuck: bool = False,
) -> str:
    """Return why a worker for which others wait is absent, or an empty string if it is not.

    Args:
        answers: whether it answers, or sends heartbeats.
        still: seconds since its last step.
        longest: seconds after which a step hangs.
        may_wait: whether it may have a reason to complete no step, such as waiting for others.
        is_stuck: whether only its payload does not arrive.
    """
    if not answers:
        return VerdictKind.STOPPED
    if still >= longest and not may_wait:
        return VerdictKind.HUNG
    return VerdictKind.STUCK if is_stuck else ""


class Report(NamedTuple):
    """What is known of a worker after a round."""

    vitals: Vitals = Vitals()
    flags: int = 0
    """Flags of its delta."""
    absent: str = ""
    """Why the worker does not take part in rounds."""
    evidence: str = ""
    """Numbers that support this."""


class Action(NamedTuple):
    """Action about a worker that begins or ends."""

    culprit: str
    what: str
    evidence: str
    over: bool = False

    def __str__(self) -> str:
        return f"{self.culprit}: {self.what}" + (" is over" if self.over else f": {self.evidence}")
