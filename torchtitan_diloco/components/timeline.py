"""Round records -> what each worker's two threads did when, on one clock.

Every worker's moments are on a clock of its own. The moment at which all headers have arrived is the same on all workers but
for the latency of a header, so a round's moments are shifted until those fall together with the first worker's. They are
moved, never stretched: only where the latency, another one each round, would make two phases of a thread overlap, does the
later phase begin where the earlier ends.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Lane = Literal["training", "exchange"]
"""The training thread, and the thread that exchanges in the background."""
LANES: tuple[Lane, ...] = ("training", "exchange")

TRAINING_PHASES = (
    ("taking", "due_at_seconds", "taken_at_seconds"),
    ("waiting", "asked_at_seconds", "arrived_at_seconds"),
    ("merging", "arrived_at_seconds", "applied_at_seconds"),
)
EXCHANGE_PHASES = (
    ("encoding", "encoded_at_seconds"),
    ("waiting for others", "heard_at_seconds"),
    ("transfer", "received_at_seconds"),
    ("outer step", "ready_at_seconds"),
)
"""One after the other from `begun_at_seconds`, each with its end. Where one ends before the one before it, because they went
on at the same time, only the first is told."""
PHASE_NAMES = tuple(name for name, *_ in (*TRAINING_PHASES, *EXCHANGE_PHASES))


@dataclass(frozen=True)
class Phase:
    worker: int
    lane: Lane
    name: str
    """One of PHASE_NAMES."""
    fragment: int
    fragment_name: str
    outer_round: int
    start_seconds: float
    """On the first worker's clock; a run that was taken up again goes on where its clock had stopped."""
    end_seconds: float
    sent_bytes: float | None = None
    """By this worker, in the whole of this round."""
    received_bytes: float | None = None

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def phases(rounds: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Of round records in their order, as metrics.jsonl holds them. By worker, lane and time; without what has no moments."""
    found: list[Phase] = []
    for session in _sessions(rounds):
        of_session = list(_aligned(session))
        start = min((phase.start_seconds for phase in of_session), default=0.0)
        end = max((phase.end_seconds for phase in found), default=-math.inf)
        late = max(0.0, end - start)  # the clocks of a new session begin at zero again
        found += [_moved(phase, late) for phase in of_session]
    return _one_after_the_other(found)


def _sessions(rounds: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Rounds between two restarts, which are where the first worker's clock does not go on."""
    session: list[Mapping[str, Any]] = []
    before = -math.inf
    for record in rounds:
        moment = _first_worker_moment(record)
        if moment is not None and moment <= before:
            yield session
            session = []
        before = before if moment is None else moment
        session.append(record)
    if session:
        yield session


def _first_worker_moment(record: Mapping[str, Any]) -> float | None:
    workers = _workers(record) or [{}]
    moments = (_number(workers[0].get(f"{name}_at_seconds")) for name in ("applied", "due"))
    return next((moment for moment in moments if moment is not None), None)


def _workers(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of a damaged record: nothing is known of a worker that is no table."""
    return [
        moments if isinstance(moments, Mapping) else {} for moments in record.get("workers") or []
    ]


def _aligned(session: Sequence[Mapping[str, Any]]) -> Iterator[Phase]:
    shifts: dict[int, float] = {0: 0.0}
    """By worker: what to add to its clock. Kept from one round to the next, for rounds that do not tell."""
    for record in session:
        workers = _workers(record)
        common = _number(workers[0].get("heard_at_seconds")) if workers else None
        for worker, moments in enumerate(workers):
            heard = _number(moments.get("heard_at_seconds"))
            if common is not None and heard is not None:
                shifts[worker] = common - heard
            if worker in shifts:
                yield from (
                    _moved(phase, shifts[worker]) for phase in _of_worker(record, worker, moments)
                )


def _of_worker(
    record: Mapping[str, Any], worker: int, moments: Mapping[str, Any]
) -> Iterator[Phase]:
    """On the worker's own clock."""

    def phase(lane: Lane, name: str, start: float, end: float) -> Phase:
        return Phase(
            worker,
            lane,
            name,
            fragment=int(record.get("fragment") or 0),
            fragment_name=str(record.get("fragment_name") or ""),
            outer_round=int(record.get("outer_round") or 0),
            start_seconds=start,
            end_seconds=end,
            sent_bytes=_number(moments.get("sent_bytes")),
            received_bytes=_number(moments.get("received_bytes")),
        )

    for name, start_key, end_key in TRAINING_PHASES:
        start, end = _number(moments.get(start_key)), _number(moments.get(end_key))
        if start is not None and end is not None and end >= start:
            yield phase("training", name, start, end)
    reached = _number(moments.get("begun_at_seconds"))
    for name, end_key in EXCHANGE_PHASES:
        end = _number(moments.get(end_key))
        if reached is not None and end is not None and end < reached:
            continue
        if reached is not None and end is not None:
            yield phase("exchange", name, reached, end)
        reached = end


def _one_after_the_other(found: list[Phase]) -> list[Phase]:
    ordered = sorted(
        found,
        key=lambda phase: (
            phase.worker,
            phase.lane != "training",
            phase.start_seconds,
            phase.end_seconds,
        ),
    )
    result: list[Phase] = []
    for phase in ordered:
        before = result[-1] if result else None
        if before is not None and (before.worker, before.lane) == (phase.worker, phase.lane):
            start = max(phase.start_seconds, before.end_seconds)
            phase = replace(phase, start_seconds=start, end_seconds=max(start, phase.end_seconds))
        result.append(phase)
    return result


def _moved(phase: Phase, seconds: float) -> Phase:
    if not seconds:
        return phase
    return replace(
        phase, start_seconds=phase.start_seconds + seconds, end_seconds=phase.end_seconds + seconds
    )


def _number(value: object) -> float | None:
    """Records hold null for what is not known, and text for what JSON has no number for."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
