"""What one rank knows of one round of one fragment, from the step it was due to the step it was applied."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

NEVER = math.nan


@dataclass
class Traffic:
    """One exchange over the group between workers: bytes as the buffers that were really sent and received add up to, seconds,
    and moments on this process's own clock (time.perf_counter)."""

    bytes_sent: float = 0
    bytes_received: float = 0
    encoding_seconds: float = 0.0
    decoding_seconds: float = 0.0
    """The mean included."""
    waiting_seconds: float = 0.0
    """Of the exchange thread for other workers' messages."""
    header_sent: float = NEVER
    """This worker's header was sent."""
    encoded: float = NEVER
    """The last part of this worker's delta was encoded."""
    received: float = NEVER
    """The last payload was there."""
    heard: dict[int, float] = field(default_factory=dict)
    """When the header of each other worker was there."""
    link_bytes: dict[int, int] = field(default_factory=dict)
    """What each other worker had sent of its own accord, without waiting for anybody ..."""
    link_until: dict[int, float] = field(default_factory=dict)
    """... and when the last of it was there."""
    dot: float = NEVER
    """Scalar product of this worker's delta and the mean."""
    moments_are_known: bool = True
    """Of each other worker by itself: NCCL tells of a whole batch of messages at once."""

    def note_arrivals(self, sizes: dict[int, int], moments: dict[int, float]) -> None:
        for worker, size in sizes.items():
            self.link_bytes[worker] = self.link_bytes.get(worker, 0) + size
            self.link_until[worker] = moments[worker]

    def heard_after(self, worker: int) -> float:
        """From this worker's own arrival to the other's header: what it waited for the other, never less than the way takes."""
        return self.heard.get(worker, NEVER) - self.header_sent if self.moments_are_known else NEVER

    def link_seconds(self, worker: int) -> float:
        """How long the bytes of `link_bytes` were on their way, once the other had arrived."""
        return (
            self.link_until.get(worker, NEVER) - self.heard.get(worker, NEVER)
            if self.moments_are_known
            else NEVER
        )


@dataclass
class Round:
    """Filled in by the training thread when the fragment is sent and applied, by the background in between. Moments are on this
    process's own clock; those that never were are NaN. Sums are over this rank's part of the fragment."""

    fragment: int
    outer_round: int
    sent_step: int
    values: int
    weight: float = 0.0
    participants: int = 0
    applied_step: int = 0
    due: float = NEVER
    taken: float = NEVER
    begun: float = NEVER
    ready: float = NEVER
    asked: float = NEVER
    fetched: float = NEVER
    applied: float = NEVER
    traffic: Traffic = field(default_factory=Traffic)
    delta_square: float = NEVER
    mean_square: float = NEVER
    update_square: float = NEVER
    """Of the change of the shared parameters."""
    drift: Tensor = field(default_factory=lambda: torch.tensor(NEVER))
    """Norm of what this worker's parameters were away from the new shared ones, before both were mixed."""
    counted: bool = False
    """The exchange is in the totals already; the apply may come later."""

    @property
    def taking_seconds(self) -> float:
        return self.taken - self.due

    @property
    def waiting_seconds(self) -> float:
        return self.fetched - self.asked

    @property
    def merging_seconds(self) -> float:
        return self.applied - self.fetched

    @property
    def exchange_seconds(self) -> float:
        return self.ready - self.begun


def unknown_round(
    fragment: int, outer_round: int, sent_step: int, values: int, participants: int
) -> Round:
    """One whose result came out of a checkpoint: what it took was seen by a process that is gone."""
    traffic = Traffic(
        bytes_sent=NEVER, bytes_received=NEVER, encoding_seconds=NEVER, decoding_seconds=NEVER
    )
    return Round(
        fragment,
        outer_round,
        sent_step,
        values,
        weight=NEVER,
        participants=participants,
        traffic=traffic,
    )
