"""Measurements of rounds of fragments on this rank, and their totals between two reports."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

NEVER = math.nan
LEAST_LINK_BYTES = 16_384
"""A smaller message is no measure of the link: it takes as long as a thread needs to wake up."""
Span = tuple[torch.cuda.Event | None, torch.cuda.Event | None]
"""Begin and end of work that the training thread has queued on a GPU; None on a CPU."""


class Vitals(NamedTuple):
    """What a worker says of itself, in seconds. 0: not known."""

    compute: float = 0.0
    """Of a step, without waiting for data or for others."""
    data: float = 0.0
    """Waiting for data, of a step."""
    save: float = 0.0
    """Pauses of training for checkpoints, of a step."""
    transfer: float = 0.0
    """Transfers of a cycle from the slowest of the others, at the rate of the last round."""
    fastest_transfer: float = 0.0
    """The same from the fastest."""
    upload: float = 0.0
    """Of what it sends in a cycle to a server."""
    slowest: int = 0
    """The slowest of the others."""

    @property
    def step(self) -> float:
        return self.compute + self.data + self.save


class Report(NamedTuple):
    """What is known of a worker after a round."""

    vitals: Vitals = Vitals()
    flags: int = 0
    """Of its delta."""
    absent: str = ""
    """Why it takes no part in rounds."""


@dataclass
class Traffic:
    """Bytes, seconds and moments of one exchange. Moments are those of `time.perf_counter`."""

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
    """Bytes that each other worker sent without waiting for anybody."""
    link_until: dict[int, float] = field(default_factory=dict)
    """When the last of them arrived."""
    dot: float = NEVER  # dot product of this worker's delta and the mean

    def note_arrivals(self, sizes: dict[int, int], moments: dict[int, float]) -> None:
        for worker, size in sizes.items():
            self.link_bytes[worker] = self.link_bytes.get(worker, 0) + size
            self.link_until[worker] = moments[worker]

    def heard_after(self, worker: int) -> float:
        """Return the seconds from sending this worker's header to receiving the other's."""
        return self.heard.get(worker, NEVER) - self.header_sent

    def link_seconds(self, worker: int) -> float:
        """Return the seconds of `link_bytes`, since the other worker began to send."""
        return self.link_until.get(worker, NEVER) - self.heard.get(worker, NEVER)

    def rate(self, worker: int) -> float:
        """Return the bytes per second from a worker, NaN if there were too few to measure it."""
        size, seconds = self.link_bytes.get(worker, 0), self.link_seconds(worker)
        return size / seconds if size >= LEAST_LINK_BYTES and seconds > 0 else NEVER

    def with_transfers(self, vitals: Vitals, cycle_bytes: float) -> Vitals:
        """Return the vitals with the transfers of this exchange.

        `cycle_bytes`: from each other worker in a cycle.
        """
        seconds = {one: cycle_bytes / self.rate(one) for one in self.link_bytes}
        known = {one: found for one, found in seconds.items() if math.isfinite(found)}
        if not known:
            return vitals
        slowest = max(known, key=known.__getitem__)
        fastest = min(known.values())
        return vitals._replace(transfer=known[slowest], fastest_transfer=fastest, slowest=slowest)


@dataclass
class Round:
    """One round of one fragment on this rank, from send to apply.

    The training thread sets the fields of the send and the apply, the background thread the others.
    What is not known is NaN. Squares are sums over this rank's shard of the fragment.
    """

    fragment: int
    outer_round: int
    sent_step: int
    values: int
    weight: float = 0.0
    participants: int = 0  # workers whose delta went into the mean
    flags: int = 0  # of this worker's header
    applied_step: int = 0
    due: float = NEVER
    taken: float = NEVER
    begun: float = NEVER
    ready: float = NEVER
    asked: float = NEVER
    fetched: float = NEVER
    applied: float = NEVER
    traffic: Traffic = field(default_factory=Traffic)
    delta_square: float = NEVER  # the only norm that is known in every round
    mean_square: float = NEVER
    applying: Span = (None, None)
    drift: Tensor = field(default_factory=lambda: torch.tensor(NEVER))
    """Distance of this worker's parameters from the new shared ones, before mixing."""

    @staticmethod
    def loaded(fragment: int, outer_round: int, values: int, facts: Mapping[str, Any]) -> "Round":
        """Return a round in flight from the facts of a save. It was measured by another process."""
        round_ = Round(fragment, outer_round, facts["sent_step"], values, weight=NEVER)
        round_.participants, round_.flags = facts["participants"], facts["flags"]
        round_.traffic = Traffic(NEVER, NEVER, NEVER, NEVER)
        return round_

    def exchange_sums(self) -> dict[str, float]:
        """Return what the exchange adds to the totals; nothing if another process did it."""
        traffic, seconds = self.traffic, self.ready - self.begun
        if math.isnan(seconds):
            return {}
        return {
            "worker/exchange_seconds": seconds,
            "worker/coding_seconds": traffic.encoding_seconds + traffic.decoding_seconds,
            "worker/transfer_waiting_seconds": traffic.waiting_seconds,
            "worker/sent_bytes": traffic.bytes_sent,
            "worker/received_bytes": traffic.bytes_received,
        }


InFlight = tuple[Round, "Future[None]"]
"""A round and the future of its exchange."""


def total(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum dictionaries by key."""
    added: dict[str, float] = {}
    for one in sums:
        for name, value in one.items():
            added[name] = added.get(name, 0.0) + value
    return added


class Meter:
    """Totals of the outer loop since the last call of `take`, and its latest rounds."""

    TOTALS: Final = {
        "worker/fragments_applied": 0.0,
        "worker/participants": 0.0,
        "worker/healed_fragments": 0.0,
        "worker/exposed_seconds": 0.0,
        "worker/exposed_waiting_seconds": 0.0,
        "worker/exchange_seconds": 0.0,
        "worker/coding_seconds": 0.0,
        "worker/transfer_waiting_seconds": 0.0,
        "worker/sent_bytes": 0.0,
        "worker/received_bytes": 0.0,
    }

    def __init__(self) -> None:
        self._exposed_seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._sums = self.TOTALS.copy()
        self._rounds: deque[Round] = deque(maxlen=256)

    def applied(self, round_: Round) -> None:
        self.waited(round_.fetched - round_.asked)
        self.expose(round_.applied - round_.fetched, round_.applying)
        counts = {"worker/participants": round_.participants, "worker/fragments_applied": 1}
        self._sums = total([self._sums, round_.exchange_sums(), counts])
        self._rounds.append(round_)

    def healed(self) -> None:
        self._sums["worker/healed_fragments"] += 1

    def take(self) -> dict[str, float]:
        self._read_spans()
        taken, self._sums = self._sums, self.TOTALS.copy()
        return taken

    @property
    def exposed_seconds(self) -> float:
        """Since the start of the process."""
        self._read_spans()
        return self._exposed_seconds

    def take_rounds(self) -> list[Round]:
        taken = list(self._rounds)
        self._rounds.clear()
        return taken

    def waited(self, seconds: float) -> None:
        """Count seconds in which the training thread waited."""
        self.expose(seconds)
        self._sums["worker/exposed_waiting_seconds"] += seconds

    def expose(self, seconds: float, span: Span = (None, None)) -> None:
        """Count seconds of the training thread or, as it only queues work on a GPU, those of the
        work as soon as they are known."""
        begin, end = span
        if begin is None or end is None:
            self._sums["worker/exposed_seconds"] += seconds
            self._exposed_seconds += seconds
        else:
            self._spans.append((begin, end))

    def _read_spans(self) -> None:
        spans, self._spans = self._spans, []
        for begin, end in spans:
            if end.query():
                self.expose(begin.elapsed_time(end) / 1000)
            else:
                self._spans.append((begin, end))
