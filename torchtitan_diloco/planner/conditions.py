"""Where a run takes place: links, step times and the speed of what is done beside training. Measured or given, the numbers
come in here, and here alone."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Links:
    """Every worker's connection to the others: it sends at `up` and receives at `down` at the same time, whatever the number
    of others on the far side. A link between two workers is as fast as the slower of its ends."""

    up: tuple[float, ...]
    """Bits a second, one for each worker."""
    down: tuple[float, ...]
    latency_seconds: float = 0.0
    """One way, between any two workers: half of what ping shows."""

    def __post_init__(self) -> None:
        assert len(self.up) == len(self.down) > 0
        for rate in (*self.up, *self.down):
            if not rate > 0:
                raise ValueError(
                    f"a link of {rate:g} bits a second carries nothing: give a bandwidth above 0"
                )
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(
                f"a latency of {self.latency_seconds:g} s cannot be: give 0 or more, such as 30ms"
            )

    @property
    def slowest(self) -> float:
        return min(*self.up, *self.down)

    def scaled(self, factor: float) -> "Links":
        return replace(
            self,
            up=tuple(factor * rate for rate in self.up),
            down=tuple(factor * rate for rate in self.down),
        )


def even_links(workers: int, bits_per_second: float, latency_seconds: float = 0.0) -> Links:
    return Links((bits_per_second,) * workers, (bits_per_second,) * workers, latency_seconds)


@dataclass(frozen=True)
class Conditions:
    links: Links
    step_seconds: tuple[float, ...]
    """Compute of one inner step, one for each worker: nothing of the exchanges is in it."""
    jitter: float = 0.0
    """Standard deviation of a step's time as a share of it; every step of every worker is drawn on its own."""
    coding_bytes_per_second: float = math.inf
    """fp32 bytes of a worker that are encoded or decoded in a second, all its ranks together."""
    outer_bytes_per_second: float = math.inf
    """fp32 bytes of a fragment whose outer step, check and checksum take a second, all ranks of a worker together."""
    codec: str = ""
    """Format with which a run has met both speeds; empty where none has."""

    def __post_init__(self) -> None:
        assert len(self.step_seconds) == self.workers
        for seconds in self.step_seconds:
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"a step time of {seconds:g} s cannot be: give what one inner step computes, such as 0.5s"
                )
        if not 0 <= self.jitter <= 1:
            raise ValueError(
                f"a jitter of {self.jitter:g} cannot be: give the standard deviation as a share, such as 0.05"
            )

    @property
    def workers(self) -> int:
        return len(self.links.up)

    @property
    def mean_step_seconds(self) -> float:
        return math.fsum(self.step_seconds) / self.workers

    def with_bandwidth(self, factor: float) -> "Conditions":
        return replace(self, links=self.links.scaled(factor))
