"""The rounds of fragments: a worker's record of one, and the timeline of all workers.

A record is of the worker's first rank: its times, its bytes, and norms over its shard. Moments are
seconds of the wall clock. Every machine has its own, so in a timeline the moments of each worker
are shifted: the last header of a round arrives at all workers at the same time, up to its latency.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.transport import FLAG_NAMES

NAN = math.nan
LEAST_LINK_BYTES = 16_384
"""A smaller message is no measure of the link: it takes as long as a thread needs to wake up."""


class RoundRecord(msgspec.Struct, tag_field="kind", tag="round"):
    """A worker's part of one exchange of one fragment. An unknown number is NaN."""

    step: int
    """After which the fragment was applied."""
    fragment: int
    fragment_name: str
    outer_round: int
    """Number of exchanges of this fragment so far."""
    sent_step: int
    parameters: int
    """Of the fragment."""
    values: int
    """Of them on the first rank."""
    participants: int = 0
    """Workers whose delta is in the mean."""
    weight: float = NAN
    """In the mean: tokens since the last exchange."""
    left_out: list[str] = []
    """Why its delta is not in the mean."""
    at_seconds: dict[str, float] = {}
    """Moments by name: see PHASES."""
    encoding_seconds: float = NAN
    decoding_seconds: float = NAN
    sent_bytes: float = NAN
    received_bytes: float = NAN
    outer_gradient_norm: float = NAN
    update_norm: float = NAN
    """Of the change of the shared parameters. This and the next are rarely measured."""
    drift_norm: float = NAN
    """Distance of its parameters from the new shared ones."""
    cosine_to_mean: float = NAN
    heard_after_seconds: list[float] = []
    """By other worker: from sending its own header to receiving that of the other."""
    received_bits_per_second_from: list[float] = []
    """By other worker."""

    def seconds(self, start: str, end: str) -> float:
        """Return the time between two moments, 0 if they are in the other order."""
        found = self.at_seconds.get(end, NAN) - self.at_seconds.get(start, NAN)
        return max(found, 0.0)  # NaN stays NaN

    @property
    def waited_seconds(self) -> float:
        """Seconds in which training waited for the result."""
        return self.seconds("asked", "arrived")

    @property
    def waited_for_headers(self) -> float:
        return max(known(self.heard_after_seconds), default=NAN)


Exchange = Sequence[RoundRecord | None]
"""One exchange of one fragment: the records of all workers, None where there is none."""


def round_record(
    found: Round, name: str, parameters: int, workers: int, clock: float
) -> RoundRecord:
    """Return the record of a round. `clock`: the wall clock less time.perf_counter."""
    traffic = found.traffic
    moments = {
        "due": found.due,
        "taken": found.taken,
        "begun": found.begun,
        "encoded": traffic.encoded,
        "heard": max(traffic.heard.values(), default=NAN),
        "received": traffic.received,
        "ready": found.ready,
        "asked": found.asked,
        "arrived": found.fetched,
        "applied": found.applied,
    }
    norms = math.sqrt(found.delta_square * found.mean_square)
    rates = [NAN] * workers
    for other, size in traffic.link_bytes.items():
        if size >= LEAST_LINK_BYTES and (seconds := traffic.link_seconds(other)) > 0:
            rates[other] = 8 * size / seconds
    return RoundRecord(
        step=found.applied_step,
        fragment=found.fragment,
        fragment_name=name,
        outer_round=found.outer_round,
        sent_step=found.sent_step,
        parameters=parameters,
        values=found.values,
        participants=found.participants,
        weight=found.weight,
        left_out=[name for flag, name in FLAG_NAMES.items() if found.flags & flag],
        at_seconds={name: clock + at for name, at in moments.items() if math.isfinite(at)},
        encoding_seconds=traffic.encoding_seconds,
        decoding_seconds=traffic.decoding_seconds,
        sent_bytes=traffic.bytes_sent,
        received_bytes=traffic.bytes_received,
        outer_gradient_norm=math.sqrt(found.delta_square),
        update_norm=math.sqrt(found.update_square),
        drift_norm=float(found.drift),
        cosine_to_mean=traffic.dot / norms if norms else NAN,
        heard_after_seconds=[traffic.heard_after(other) for other in range(workers)],
        received_bits_per_second_from=rates,
    )


def known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def last_to_arrive(exchange: Exchange) -> tuple[int | None, float]:
    """Return the worker that held up an exchange, None if it is not known, and for how long.

    This needs no common clock: the last worker waits the shortest time for the others' headers.
    """
    waited = [NAN if one is None else one.waited_for_headers for one in exchange]
    if len(shortest := sorted(known(waited))) < 2:
        return None, NAN
    return waited.index(shortest[0]), shortest[1] - shortest[0]


# --- phases ---------------------------------------------------------------------------------------

LANES = ("training", "exchange")
"""The training thread, and the thread that exchanges in the background."""
PHASES = {
    "taking": ("training", "due", "taken", "series-5"),
    "waiting": ("training", "asked", "arrived", "series-2"),
    "merging": ("training", "arrived", "applied", "series-4"),
    "encoding": ("exchange", "begun", "encoded", "series-1"),
    "waiting for others": ("exchange", "encoded", "heard", "series-8"),
    "transfer": ("exchange", "heard", "received", "series-3"),
    "outer step": ("exchange", "received", "ready", "series-6"),
}
"""Lane, start and end among the moments, and colour."""
PHASE_COLOURS = {"computing": "band"} | {name: phase[-1] for name, phase in PHASES.items()}


class Phase(NamedTuple):
    worker: int
    lane: str
    start_seconds: float
    end_seconds: float
    name: str
    """A key of PHASES."""
    round: RoundRecord

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def phases(exchanges: Iterable[Exchange]) -> list[Phase]:
    """Return the phases of both threads of all workers, sorted by worker, lane and time.

    Moments are on the clock of the first worker. Where two phases of a thread would overlap, the
    later one starts where the earlier one ends.
    """
    found, shifts = list[Phase](), dict[int, float]()
    for exchange in exchanges:
        heard = [NAN if one is None else one.at_seconds.get("heard", NAN) for one in exchange]
        for worker, one in enumerate(exchange):
            if math.isfinite(shift := heard[0] - heard[worker]):
                shifts[worker] = shift  # else, use that of the exchange before
            if one is not None:
                found += _phases_of_round(worker, one, shifts.get(worker, 0.0))
    found.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = []
    for _, lane in itertools.groupby(found, key=lambda phase: (phase.worker, phase.lane)):
        latest = -math.inf
        for phase in lane:
            start = max(phase.start_seconds, latest)
            latest = max(phase.end_seconds, start)
            ordered.append(phase._replace(start_seconds=start, end_seconds=latest))
    return ordered


def _phases_of_round(worker: int, record: RoundRecord, shift: float) -> Iterator[Phase]:
    for name, (lane, *moments, _) in PHASES.items():
        start, end = (record.at_seconds.get(moment, NAN) + shift for moment in moments)
        if -math.inf < start <= end < math.inf:
            yield Phase(worker, lane, start, end, name, record)
