"""Measurements of rounds of fragments on this rank, and their numbers between two reports."""

import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan_diloco.diloco.metrics import OUTER_METRICS, OVER_FRAGMENTS, Merging

NEVER = math.nan
LEAST_LINK_BYTES = 16_384
"""Smaller messages do not measure the link: they take as long as a thread needs to wake up."""
Span = tuple[torch.cuda.Event | None, torch.cuda.Event | None]
"""Start and end of work that the training thread has queued on a GPU; None on a CPU."""


@dataclass
class Traffic:
    """Bytes, seconds and times of one exchange. Times are those of `time.perf_counter`."""

    bytes_sent: float = 0
    bytes_received: float = 0
    encoding_seconds: float = 0.0
    decoding_seconds: float = 0.0  # with averaging
    waiting_seconds: float = 0.0  # of the exchange thread, for messages
    header_sent: float = NEVER
    encoded: float = NEVER  # the last part of this worker's delta
    received: float = NEVER  # the last payload
    heard: dict[int, float] = field(default_factory=dict)  # when each worker's header arrived
    link_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that each other worker sent without waiting for other workers."""
    link_until: dict[int, float] = field(default_factory=dict)
    """Time at which the last of them arrived."""
    dot: float = NEVER  # dot product of this worker's delta and the mean

    def note_arrivals(self, sizes: dict[int, int], moments: dict[int, float]) -> None:
        for worker, size in sizes.items():
            self.link_bytes[worker] = self.link_bytes.get(worker, 0) + size
            self.link_until[worker] = moments[worker]

    def heard_after(self, worker: int) -> float:
        """Return the seconds from sending this worker's header to receiving the other's."""
        return self.heard.get(worker, NEVER) - self.header_sent

    def rate(self, worker: int) -> float:
        """Return the bytes per second from a worker, or NaN if there were too few to measure."""
        seconds = self.link_until.get(worker, NEVER) - self.heard.get(worker, NEVER)
        size = self.link_bytes.get(worker, 0)
        return size / seconds if size >= LEAST_LINK_BYTES and seconds > 0 else NEVER


@dataclass
class Round:
    """One round of one fragment on this rank, from send to apply.

    The training thread sets the fields of the send and the apply, the background thread the others.
    Unknown values are NaN.
    """

    fragment: int
    outer_round: int
    sent_step: int
    weight: float = 0.0
    participants: int = 0  # workers whose delta went into the mean
    flags: int = 0  # of this worker's header
    is_in_model: bool = True  # whether the parameters still contain the work that was sent
    applied_step: int = 0
    due: float = NEVER
    taken: float = NEVER
    begun: float = NEVER
    ready: float = NEVER
    asked: float = NEVER
    fetched: float = NEVER
    applied: float = NEVER
    traffic: Traffic = field(default_factory=Traffic)
    applying: Span = (None, None)
    numbers: dict[str, float | Tensor] = field(default_factory=dict)
    """Values of `OUTER_METRICS` for the shard of this rank. A tensor is read when the round is
    reported, so that training does not wait for a GPU."""

    @staticmethod
    def loaded(
        fragment: int,
        outer_round: int,
        *,
        sent_step: int,
        participants: int,
        flags: int,
        is_in_model: bool,
    ) -> "Round":
        """Return a round in flight from a saved state. It was measured by another process."""
        round_ = Round(fragment, outer_round, sent_step, weight=NEVER)
        round_.participants = participants
        round_.flags = flags
        round_.is_in_model = is_in_model
        return round_

    def exchange_numbers(self) -> dict[str, float]:
        """Return the numbers of the exchange, or none if another process made it."""
        traffic = self.traffic
        seconds = self.ready - self.begun
        if math.isnan(seconds):
            return {}
        return {
            "worker/exchange_seconds": seconds,
            "worker/coding_seconds": traffic.encoding_seconds + traffic.decoding_seconds,
            "worker/transfer_waiting_seconds": traffic.waiting_seconds,
            "worker/sent_bytes": traffic.bytes_sent,
            "worker/received_bytes": traffic.bytes_received,
            "round/dot_with_mean": traffic.dot,
        }


InFlight = tuple[Round, "Future[None]"]
"""A round and the future of its exchange."""


class Meter:
    """Numbers of the outer loop since the last call of `take`, and its latest rounds."""

    def __init__(self) -> None:
        self._exposed_seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._merged = Merging(OVER_FRAGMENTS, sums_from_zero=True)
        self._rounds: deque[Round] = deque(maxlen=256)

    def applied(self, round_: Round) -> None:
        self.waited(round_.fetched - round_.asked)
        self.expose(round_.applied - round_.fetched, round_.applying)
        round_.numbers |= round_.exchange_numbers()
        self._merged.add(
            {
                name: float(value)
                for name, value in round_.numbers.items()
                if OUTER_METRICS[name].fragments is not None
            }
        )
        counts = {"worker/participants": round_.participants, "worker/fragments_applied": 1}
        self._merged.add(counts)
        self._rounds.append(round_)

    def healed(self) -> None:
        self._merged.add({"worker/healed_fragments": 1})

    def take(self) -> dict[str, float]:
        self._read_spans()
        return self._merged.take()

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the training thread since the start of the process."""
        self._read_spans()
        return self._exposed_seconds

    def take_rounds(self) -> list[Round]:
        taken = list(self._rounds)
        self._rounds.clear()
        return taken

    def waited(self, seconds: float) -> None:
        """Count seconds in which the training thread waited."""
        self.expose(seconds)
        self._merged.add({"worker/exposed_waiting_seconds": seconds})

    def expose(self, seconds: float, span: Span = (None, None)) -> None:
        """Count seconds of the training thread. On a GPU, it only queues work, so the seconds of
        that work count as soon as they are known."""
        begin, end = span
        if begin is None or end is None:
            self._merged.add({"worker/exposed_seconds": seconds})
            self._exposed_seconds += seconds
        else:
            self._spans.append((begin, end))

    def _read_spans(self) -> None:
        spans = self._spans
        self._spans = []
        for begin, end in spans:
            if end.query():
                self.expose(begin.elapsed_time(end) / 1000)
            else:
                self._spans.append((begin, end))
