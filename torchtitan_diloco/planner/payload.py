"""What one exchange of one fragment moves and does, in numbers: the input of the prediction."""

import math
from dataclasses import dataclass

from torchtitan_diloco.planner.conditions import Conditions


@dataclass(frozen=True)
class Payload:
    sent: tuple[int, ...]
    """Bytes, one for each worker."""
    received: tuple[int, ...]
    hops: int
    """Messages that follow on each other: 1 with two workers, 2 with more, 0 with one."""
    chunks: int
    """Pieces that are encoded, sent and decoded at the same time as each other."""
    window: int
    """Chunks that are under way at once in one hop: the next one waits until the first has arrived."""
    coded_bytes: int
    """fp32 bytes that a worker encodes and decodes."""
    state_bytes: int
    """fp32 bytes of the fragment, which the outer step goes through."""

    def link_seconds(self, conditions: Conditions) -> float:
        """From the first bit to the last, latency left out: the slowest end decides, and a long link with few chunks under
        way stands still until they have arrived."""
        links = conditions.links
        ends = [
            *zip(self.sent, links.up, strict=True),
            *zip(self.received, links.down, strict=True),
        ]
        serial = max(8 * count / rate for count, rate in ends)
        return max(serial, max(0.0, self.chunks / self.window - 1) * links.latency_seconds)

    def seconds(self, conditions: Conditions) -> float:
        """From the moment when all workers have begun until the next shared parameters are there. Coding of one chunk goes
        on while others travel; what is longer decides, and of the other the share of one chunk is not hidden."""
        if not self.hops:
            return self.state_bytes / conditions.outer_bytes_per_second
        travelling, coding = (
            self.link_seconds(conditions),
            self.coded_bytes / conditions.coding_bytes_per_second,
        )
        pipelined = max(travelling, coding) + min(travelling, coding) / self.chunks
        latency = self.hops * conditions.links.latency_seconds
        return latency + pipelined + self.state_bytes / conditions.outer_bytes_per_second

    def peak_bits_per_second(self, conditions: Conditions) -> float:
        """That the busiest worker sends while the exchange is on the link."""
        sent, seconds = 8 * max(self.sent), self.link_seconds(conditions)
        return sent / seconds if seconds else (math.inf if sent else 0.0)
