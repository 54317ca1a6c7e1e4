"""How much of its training time a run computed, beside what the planner says of such links and steps."""

import math
import statistics
from collections import deque

from torchtitan_diloco.components.round_records import RoundRecord
from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo
from torchtitan_diloco.planner.conditions import Conditions, Links
from torchtitan_diloco.planner.outer_loop import payloads_of, predict_diloco

KEPT = 1000
"""Rounds of which medians are taken."""
FASTEST_LINK = 1e12
"""Bits a second of a link that nobody had to wait for."""


def measured_utilisation(totals: dict[str, float]) -> float | None:
    """Share of the training's time that neither the outer loop took or waited for, nor the ranks to agree on something; None
    without training steps."""
    agreement = totals.get("time/agreement_seconds", 0.0)
    whole = totals.get("time/step_seconds", 0.0) + agreement
    return (
        max(0.0, 1 - (totals.get("diloco/exposed_seconds", 0.0) + agreement) / whole)
        if whole
        else None
    )


def worker_key(worker: int, name: str) -> str:
    return f"worker_{worker}/{name}"


class Observed:
    """Links, coding and steps as this run has met them, for the planner."""

    def __init__(self, workers: int, ranks_per_worker: int) -> None:
        self._workers, self._ranks = workers, ranks_per_worker
        self._rounds: deque[RoundRecord] = deque(maxlen=KEPT)
        self._sizes: dict[int, int] = {}

    def add(self, record: RoundRecord) -> None:
        self._rounds.append(record)
        self._sizes[record["fragment"]] = record["parameters"]

    def predicted_utilisation(
        self, config: DiLoCo, totals: dict[str, float], steps: int
    ) -> float | None:
        """None where too little is known: one worker, or a fragment that never had its turn."""
        conditions = self.conditions(config, totals)
        if conditions is None or sorted(self._sizes) != list(range(len(self._sizes))):
            return None
        sizes = [self._sizes[fragment] for fragment in sorted(self._sizes)]
        return predict_diloco(sizes, config, conditions, ranks=self._ranks, steps=steps).utilisation

    def conditions(self, config: DiLoCo, totals: dict[str, float]) -> Conditions | None:
        means, jitter = self._step_times(totals)
        if self._workers < 2 or not means or not self._heard():
            return None
        coding, outer = self._coding(config)
        return Conditions(self.links(), means, jitter, coding, outer, config.quantization.codec)

    def links(self) -> Links:
        """A worker sends to all others at once, so the rates at which they receive from it add up."""
        rates = [
            [self._median_rate(to, source) for source in range(self._workers)]
            for to in range(self._workers)
        ]
        up = tuple(
            sum(rates[to][source] for to in range(self._workers)) for source in range(self._workers)
        )
        return Links(
            tuple(rate or FASTEST_LINK for rate in up),
            tuple(sum(row) or FASTEST_LINK for row in rates),
            latency_seconds=min(self._heard(), default=0.0),
        )

    def _median_rate(self, to: int, source: int) -> float:
        rates = (
            record["workers"][to]["received_bits_per_second_from"][source]
            for record in self._large_rounds()
        )
        known: list[float] = [rate for rate in rates if rate is not None]
        return statistics.median(known or [0.0])

    def _large_rounds(self) -> list[RoundRecord]:
        """A small fragment is over before a link has shown what it can carry."""
        largest = max(self._sizes.values())
        return [record for record in self._rounds if 2 * record["parameters"] > largest]

    def _heard(self) -> list[float]:
        """None where no round was seen, or over NCCL with several other workers, whose links are not known then."""
        told = (
            worker["heard_after_seconds"] for record in self._rounds for worker in record["workers"]
        )
        return [seconds for row in told for seconds in row if seconds is not None]

    def _coding(self, config: DiLoCo) -> tuple[float, float]:
        """fp32 bytes a second that are encoded and decoded, and that the outer step goes through; medians."""
        coding, outer = [], []
        for record in self._rounds:
            (payload,) = payloads_of(
                [record["parameters"]], config.quantization, self._workers, self._ranks
            )
            for worker in record["workers"]:
                seconds = (worker["encoding_seconds"] or 0.0) + (worker["decoding_seconds"] or 0.0)
                if seconds > 0:
                    coding.append(payload.coded_bytes / seconds)
                done, received = worker["ready_at_seconds"], worker["received_at_seconds"]
                if done is not None and received is not None and done > received:
                    outer.append(payload.state_bytes / (done - received))
        return statistics.median(coding or [math.inf]), statistics.median(outer or [math.inf])

    def _step_times(self, totals: dict[str, float]) -> tuple[tuple[float, ...], float]:
        """Of each worker's first rank, and their spread as a share of the mean."""
        means, spreads = [], []
        for worker in range(self._workers):
            steps, seconds, squares = (
                totals.get(worker_key(worker, name), 0.0)
                for name in ("steps", "seconds", "squares")
            )
            if not steps or not seconds:
                return (), 0.0
            mean = seconds / steps
            means.append(mean)
            spreads.append(math.sqrt(max(0.0, squares / steps - mean**2)) / mean)
        return tuple(means), min(1.0, statistics.fmean(spreads))
