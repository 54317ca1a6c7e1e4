"""Settings of islands: the `[islands]` section."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Islands:
    """Workers as jobs of their own, which come and go while the others continue."""

    join: str = ""
    """Join string that `torchtitan_diloco.islands serve` has printed. Empty: all workers are one
    job. With islands, each job is one worker."""
    name: str = ""
    """Name of this island. A job with the name of one that has died takes its place."""
    slots: NotNegative = 0
    """Data streams of the run, which bound the number of islands. 0: as many as `begin`."""
    begin: NotNegative = 0
    """Islands that start together. 0: as many as `diloco.workers`."""
    quorum: Positive = 1
    """Parts that a round needs when its time is over."""
    grace_seconds: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Least time that a round waits for parts. It is longer if `diloco.overlap.delay` steps are."""
