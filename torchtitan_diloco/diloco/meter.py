"""Where the time of the outer loop goes, between two reports."""

import math
from collections import deque
from collections.abc import Iterable, Mapping

from torchtitan_diloco.diloco.round import Round

KEPT = 256
"""Rounds that wait to be asked for."""


class Meter:
    def __init__(self) -> None:
        self.exposed_seconds = 0.0
        """From the beginning; all else is since it was last taken."""
        self._rounds: deque[Round] = deque(maxlen=KEPT)
        self._sums = dict.fromkeys(NAMES, 0.0)

    def sent(self, facts: Round) -> None:
        self._expose(facts.taking_seconds)

    def exchanged(self, facts: Round) -> None:
        """What the background has done for a fragment; counted once, when it is known to be done. A round whose result came
        out of a checkpoint is unknown here, and counted there."""
        if not facts.counted and not math.isnan(facts.exchange_seconds):
            facts.counted = True
            self._sums = total([self._sums, exchange_sums(facts)])

    def applied(self, facts: Round) -> None:
        self.exchanged(facts)
        self._expose(facts.waiting_seconds + facts.merging_seconds)
        self._sums["diloco/exposed_waiting_seconds"] += facts.waiting_seconds
        self._sums["diloco/participants"] += facts.participants
        self._sums["diloco/fragments_applied"] += 1
        self._rounds.append(facts)

    def _expose(self, seconds: float) -> None:
        self._sums["diloco/exposed_seconds"] += seconds
        self.exposed_seconds += seconds

    def take(self, in_flight: int) -> dict[str, float]:
        """`exposed` is what the training thread spent or waited; `exchange` went on in the background meanwhile."""
        taken, self._sums = self._sums, dict.fromkeys(NAMES, 0.0)
        return taken | {"diloco/fragments_in_flight": float(in_flight)}

    def take_rounds(self) -> list[Round]:
        taken = list(self._rounds)
        self._rounds.clear()
        return taken


def exchange_sums(facts: Round) -> dict[str, float]:
    """What an exchange took, for a checkpoint or the totals. Not known where its own result came out of one."""
    if math.isnan(facts.exchange_seconds):
        return {}
    traffic = facts.traffic
    return {
        "diloco/exchange_seconds": facts.exchange_seconds,
        "diloco/coding_seconds": traffic.encoding_seconds + traffic.decoding_seconds,
        "diloco/transfer_waiting_seconds": traffic.waiting_seconds,
        "diloco/sent_bytes": traffic.bytes_sent,
        "diloco/received_bytes": traffic.bytes_received,
    }


def total(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    added: dict[str, float] = {}
    for one in sums:
        for name, value in one.items():
            added[name] = added.get(name, 0.0) + value
    return added


NAMES = (
    "diloco/fragments_applied",
    "diloco/participants",
    "diloco/exposed_seconds",
    "diloco/exposed_waiting_seconds",
    "diloco/exchange_seconds",
    "diloco/coding_seconds",
    "diloco/transfer_waiting_seconds",
    "diloco/sent_bytes",
    "diloco/received_bytes",
)
