"""One model on one set of links: what every setting of the outer loop would do there."""

import math
from dataclasses import dataclass, replace
from functools import partial

from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo
from torchtitan_diloco.planner.conditions import Conditions
from torchtitan_diloco.planner.memory import Memory, memory_of
from torchtitan_diloco.planner.outer_loop import payloads_of, predict_diloco
from torchtitan_diloco.planner.prediction import (
    Prediction,
    least_bandwidth_factor,
    predict_data_parallel,
)
from torchtitan_diloco.planner.workload import Workload

HOST_CODING = {
    "fp32": 8.5e9,
    "bf16": 13.1e9,
    "fp8_e4m3": 1.9e9,
    "fp8_e5m2": 2.0e9,
    "int8": 2.9e9,
    "fp4_e2m1": 2.1e9,
    "fp4_e3m0": 2.1e9,
    "ternary": 2.2e9,
}
"""fp32 bytes that one core encodes or decodes in a second, mean of both: docs/performance.md, an AMD EPYC of 2 cores."""
HOST_OUTER_STEP = 2.0e9
"""fp32 bytes of a fragment that one core checks, updates and sums up in a second: the same page."""


@dataclass(frozen=True)
class Scenario:
    workload: Workload
    conditions: Conditions
    """Of coding and outer step those that a run has met, if one has: `conditions_for` has them for every format."""
    on_cpu: bool = False
    """The run has no accelerator."""
    coding_bytes_per_second: float | None = None
    """Of one rank. None: as the run has met it, or else what one core was measured with where the state is in host memory, and
    no time where it is on an accelerator."""

    def predict(self, diloco: DiLoCo) -> Prediction:
        """The steady state."""
        return self._predict_at(1.0, diloco)

    def most_utilisation(self, diloco: DiLoCo) -> float:
        """An upper bound at no cost: exchanges take as long as they take, one after the other."""
        conditions = self.conditions_for(diloco)
        payloads = payloads_of(
            self.workload.fragments(diloco.fragments),
            diloco.quantization,
            conditions.workers,
            self.workload.ranks,
        )
        compute = diloco.sync_every * conditions.mean_step_seconds
        return compute / max(compute, sum(payload.seconds(conditions) for payload in payloads))

    def memory(self, diloco: DiLoCo, prediction: Prediction) -> Memory:
        on_host = self.state_is_on_host(diloco) and not self.on_cpu
        return memory_of(self.workload, diloco, on_host=on_host, in_flight=prediction.in_flight)

    def needed_bits_per_second(self, diloco: DiLoCo, utilisation: float) -> float | None:
        """Of the slowest link, if all change alike; None where no bandwidth is enough."""
        factor = least_bandwidth_factor(
            lambda factor: self._predict_at(factor, diloco).utilisation, utilisation
        )
        return None if factor is None else factor * self.conditions.links.slowest

    def without_latency(self) -> "Scenario":
        links = replace(self.conditions.links, latency_seconds=0.0)
        return replace(self, conditions=replace(self.conditions, links=links))

    def hours(self, prediction: Prediction) -> float:
        return self.workload.total_steps * prediction.step_seconds / 3600

    def state_is_on_host(self, diloco: DiLoCo) -> bool:
        return self.on_cpu or diloco.link.backend == "gloo" or diloco.link.outer_state == "cpu"

    def conditions_for(self, diloco: DiLoCo) -> Conditions:
        on_host, ranks = self.state_is_on_host(diloco), self.workload.ranks
        cores, codec, met = (
            ranks * diloco.quantization.threads,
            diloco.quantization.codec,
            self.conditions,
        )
        coding = cores * HOST_CODING[codec] if on_host else math.inf
        if self.coding_bytes_per_second is not None:
            coding = ranks * self.coding_bytes_per_second
        elif math.isfinite(
            met.coding_bytes_per_second
        ):  # other formats: in the table's proportions, which are a CPU's
            proportion = HOST_CODING[codec] / HOST_CODING[met.codec] if on_host else 1.0
            coding = met.coding_bytes_per_second * proportion
        outer = cores * HOST_OUTER_STEP if on_host else math.inf
        if math.isfinite(met.outer_bytes_per_second):
            outer = met.outer_bytes_per_second
        return replace(
            self.conditions, coding_bytes_per_second=coding, outer_bytes_per_second=outer
        )

    def _predict_at(self, bandwidth_factor: float, diloco: DiLoCo) -> Prediction:
        conditions = self.conditions_for(diloco).with_bandwidth(bandwidth_factor)
        if diloco.method == "none":
            return predict_data_parallel(self.workload.gradient_buckets(), conditions)
        fragments = self.workload.fragments(diloco.fragments)
        return predict_diloco(fragments, diloco, conditions, ranks=self.workload.ranks)

    def curve(self, diloco: DiLoCo, bits_per_second: list[float]) -> list[float]:
        """Utilisation at each bandwidth of the slowest link, the others in proportion."""
        at = partial(self._predict_at, diloco=diloco)
        return [at(rate / self.conditions.links.slowest).utilisation for rate in bits_per_second]
