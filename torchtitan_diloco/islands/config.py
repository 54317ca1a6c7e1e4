"""Settings of islands: the `[islands]` section."""

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from torchtitan_diloco.diloco.config import DiLoCoConfig, Mistakes, NotNegative, Positive


@dataclass(frozen=True)
class Islands:
    """Workers as jobs of their own, which come and go while the others continue."""

    join: str = ""
    """Join string that `torchtitan_diloco.islands serve` has printed, or a file that holds it, so
    that no list of processes shows its password. Empty: all workers are one job. With islands, each
    job is one worker."""
    name: str = ""
    """Name of this island. A job with the name of one that has died takes its place."""
    slots: NotNegative = 0
    """Data streams of the run, which bound the number of islands. 0: as many as `begin`."""
    begin: NotNegative = 0
    """Islands that start together. 0: as many as `diloco.workers`."""
    quorum: Positive = 1
    """Parts that a round needs when its time is over."""
    grace_seconds: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Least time that a round, and training, wait for parts. It is longer if `diloco.overlap.delay`
    steps are. A round, but not training, also waits for parts that usually take longer."""
    local: NotNegative = 0
    """Start a server and so many islands on this machine, to try it. 0: none."""


NAME = r"[\w.-]{1,60}"


def islands_mistakes(islands: Islands, diloco: DiLoCoConfig, begin: int) -> Mistakes:
    """Check settings of an island. `begin`: how many really begin together."""
    if islands.name and not re.fullmatch(NAME, islands.name):
        yield "islands.name", 'may have letters, digits, ".", "-" and "_"'
    if islands.slots and islands.slots < begin:
        yield "islands.slots", f"must be at least {begin}, as so many islands begin together"
    refused = {
        "diloco.beginning.steps": diloco.beginning.steps > 0,
        "diloco.average_at_end": diloco.average_at_end,
        "diloco.quantization.codec": diloco.quantization.codec == "topk",
        "diloco.link.drop_probability": diloco.link.drop_probability,
        "diloco.link.outer_state": diloco.link.outer_state == "cpu",
    }
    for key, is_set in refused.items():
        if is_set:
            yield key, "does not work with islands: leave it out"
