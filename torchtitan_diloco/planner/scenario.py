"""A run in numbers: its model, its exchanges to the byte, its memory, and its conditions.

`Scenario` answers for any setting of the outer loop: utilisation, memory, hours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
from torch import nn

from torchtitan_diloco.components.run_plan import INNER_BYTES, plan_run
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco.chunks import chunk_and_window, slice_bounds, slice_size
from torchtitan_diloco.diloco.codecs import Codec, build_codec, build_gather_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig, Fragments, Quantization
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_optimizer import STATE_BUFFERS
from torchtitan_diloco.diloco.outer_state import pinned_bytes
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.diloco.transport import HEADER_BYTES
from torchtitan_diloco.models import build_model
from torchtitan_diloco.planner.prediction import (
    Conditions,
    Payload,
    Prediction,
    predict,
    predict_data_parallel,
)

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
"""fp32 bytes that one core encodes or decodes in a second (docs/performance.md, AMD EPYC)."""
HOST_OUTER_STEP = 2.0e9
"""fp32 bytes of a fragment that one core checks, updates and sums up in a second (same page)."""


@dataclass(frozen=True)
class Workload:
    """Model and length of a run."""

    model: nn.Module
    """On the meta device."""
    parameters: int
    embedding_parameters: int
    layers: int
    flops_per_step: float
    """FLOPs of one worker."""
    tokens_per_step: int
    """Tokens of all workers together."""
    total_steps: int
    workers: int
    ranks: int
    """Ranks of one worker, over which FSDP2 shards it."""

    @staticmethod
    def of(config: Config, vocabulary: int) -> "Workload":
        length, workers = config.training.sequence_length, config.diloco.workers
        ranks = max(1, config.parallel.fsdp)
        model = build_model(config.model, vocabulary, length)
        counts = model.parameter_counts()
        plan = plan_run(config.training, workers * ranks, counts["total"], counts["embedding"])
        return Workload(
            model,
            plan.parameters,
            plan.embedding_parameters,
            len(model.blocks),
            model.flops_per_token(length) * plan.tokens_per_step / workers,
            plan.tokens_per_step,
            plan.total_steps,
            workers,
            ranks,
        )

    def fragments(self, config: Fragments) -> tuple[int, ...]:
        """Return the parameters of each fragment in the order of their turns."""
        return _fragment_sizes(self.model, config)

    def gradient_buckets(self) -> tuple[int, ...]:
        """Return the parameters of each bucket of data parallelism, the last block first."""
        *blocks, rest = self.fragments(Fragments(pattern="sequential", layers_per_fragment=1))
        return (*reversed(blocks), rest)


@cache
def _fragment_sizes(model: nn.Module, config: Fragments) -> tuple[int, ...]:
    return tuple(fragment.parameters for fragment in build_fragments(model, config))


# --- bytes of an exchange ------------------------------------------------------------------------


def predict_diloco(
    fragments: Sequence[int],
    diloco: DiLoCoConfig,
    conditions: Conditions,
    *,
    ranks: int = 1,
    steps: int | None = None,
) -> Prediction:
    """Predict a run from the parameters of each fragment; see `prediction.predict`."""
    schedule = Schedule(diloco.sync_every, len(fragments), diloco.overlap.delay)
    payloads = payloads_of(fragments, diloco.quantization, conditions.workers, ranks)
    return predict(payloads, schedule, conditions, steps)


def payloads_of(
    fragments: Sequence[int], quantization: Quantization, workers: int, ranks: int = 1
) -> list[Payload]:
    chunk, window = chunk_and_window(-(-max(fragments) // ranks), _codecs(quantization)[0])
    return [_payload(size, quantization, workers, ranks, chunk, window) for size in fragments]


@cache
def _codecs(quantization: Quantization) -> tuple[Codec, Codec]:
    return build_codec(quantization), build_gather_codec(quantization)


@cache
def _payload(
    values: int, quantization: Quantization, workers: int, ranks: int, chunk: int, window: int
) -> Payload:
    """Return the payload of a fragment. The ranks of a worker share its one link."""
    share = -(-values // ranks)
    traffic = np.zeros((2, workers), dtype=np.int64)
    for part, count in ((share, values // share), (values % share, 1)):
        traffic += count * _traffic(part, quantization, workers, chunk)
    sent, received = (tuple(map(int, row)) for row in traffic)
    # Two workers encode their own delta and decode both. More encode their own and the mean of
    # their slice, and decode all parts of that slice and all means.
    passes = {1: 0.0, 2: 3.0}.get(workers, 3.0 + 1 / workers)
    return Payload(
        sent,
        received,
        hops=min(workers - 1, 2),
        chunks=max(1, -(-share // chunk)),
        window=window if workers <= 2 else max(1, window // 2),
        coded_bytes=round(4 * values * passes),
        state_bytes=4 * values,
    )


def _traffic(
    values: int, quantization: Quantization, workers: int, chunk: int
) -> npt.NDArray[np.int64]:
    """Return the bytes that one rank of each worker sends, and receives, with headers."""
    codec, gather = _codecs(quantization)
    traffic = np.full((2, workers), (workers - 1) * HEADER_BYTES if values else 0)
    for part, count in ((chunk, values // chunk), (values % chunk, 1)):
        bounds = [slice_bounds(part, workers, worker) for worker in range(workers)]
        own = count * np.array([codec.wire_bytes(end - start) for start, end in bounds])
        traffic += [own.sum() - own, (workers - 1) * own]
        if workers > 2:
            means = count * np.array([gather.wire_bytes(end - start) for start, end in bounds])
            traffic += [(workers - 1) * means, means.sum() - means]
    return traffic


# --- one model on one set of links ---------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    workload: Workload
    conditions: Conditions
    """Links and steps; coding and outer step as a run measured them, if one did."""
    on_cpu: bool = False
    """The run has no accelerator."""
    coding_bytes_per_second: float | None = None
    """Coding rate of one rank. None: as measured by a run, else HOST_CODING on a host and no time
    on an accelerator."""

    def predict(self, diloco: DiLoCoConfig, bandwidth_factor: float = 1.0) -> Prediction:
        """Predict the steady state."""
        conditions = self.conditions_for(diloco).with_bandwidth(bandwidth_factor)
        if diloco.method == "none":
            return predict_data_parallel(self.workload.gradient_buckets(), conditions)
        fragments = self.workload.fragments(diloco.fragments)
        return predict_diloco(fragments, diloco, conditions, ranks=self.workload.ranks)

    def utilisation_bound(self, diloco: DiLoCoConfig) -> float:
        """Return a cheap upper bound: exchanges back to back never take less time."""
        conditions, load = self.conditions_for(diloco), self.workload
        sizes = load.fragments(diloco.fragments)
        payloads = payloads_of(sizes, diloco.quantization, conditions.workers, load.ranks)
        compute = diloco.sync_every * conditions.mean_step_seconds
        return compute / max(compute, sum(payload.seconds(conditions) for payload in payloads))

    def needed_bits_per_second(self, diloco: DiLoCoConfig, utilisation: float) -> float | None:
        """Return the rate of the slowest link, within half a percent, if all links scale alike.

        Return None where no rate is enough because of latency, coding or uneven steps.
        """
        low, high = 1e-6, 1e6
        if self.predict(diloco, high).utilisation < utilisation:
            return None
        while high / low > 1.005:
            middle = math.sqrt(low * high)
            if self.predict(diloco, middle).utilisation >= utilisation:
                high = middle
            else:
                low = middle
        return high * self.conditions.links.slowest

    def conditions_for(self, diloco: DiLoCoConfig) -> Conditions:
        """Return the conditions with the speeds of coding and outer step under these settings."""
        on_host, ranks = self._state_is_on_host(diloco), self.workload.ranks
        cores, codec = ranks * diloco.quantization.threads, diloco.quantization.codec
        measured = self.conditions
        coding = cores * HOST_CODING[codec] if on_host else math.inf
        outer = cores * HOST_OUTER_STEP if on_host else math.inf
        if self.coding_bytes_per_second is not None:
            coding = ranks * self.coding_bytes_per_second
        elif math.isfinite(measured.coding_bytes_per_second):
            # Other codecs: in the proportions of HOST_CODING, which are those of a CPU.
            ratio = HOST_CODING[codec] / HOST_CODING[measured.codec] if on_host else 1.0
            coding = measured.coding_bytes_per_second * ratio
        if math.isfinite(measured.outer_bytes_per_second):
            outer = measured.outer_bytes_per_second
        return replace(measured, coding_bytes_per_second=coding, outer_bytes_per_second=outer)

    def memory(self, diloco: DiLoCoConfig, in_flight: int) -> tuple[float, float]:
        """Return the bytes of one rank on the device and on the host, without activations.

        With the outer state in (pinned) host memory, the device holds a copy of what is in flight.
        """
        load, ranks = self.workload, self.workload.ranks
        inner = INNER_BYTES * load.parameters / ranks
        if diloco.method == "none":
            return inner, 0.0
        sizes = sorted(load.fragments(diloco.fragments), reverse=True)
        exchange = _exchange_buffers(-(-sizes[0] // ranks), diloco.quantization, load.workers)
        per_parameter = outer_bytes_per_parameter(diloco)
        if self.on_cpu or not self._state_is_on_host(diloco):
            return inner + per_parameter * sum(sizes) / ranks + exchange, 0.0
        pinned = per_parameter // 4 * sum(pinned_bytes(4 * -(-size // ranks)) for size in sizes)
        return inner + 4 * sum(sizes[:in_flight]) / ranks, pinned + exchange

    def _state_is_on_host(self, diloco: DiLoCoConfig) -> bool:
        return self.on_cpu or diloco.link.backend == "gloo" or diloco.link.outer_state == "cpu"


def outer_bytes_per_parameter(diloco: DiLoCoConfig) -> int:
    """Return the bytes of outer parameters, delta, outer optimizer and error feedback."""
    buffers = 2 + STATE_BUFFERS[diloco.outer_optimizer.name]
    return 4 * (buffers + diloco.quantization.error_feedback)


def _exchange_buffers(largest: int, quantization: Quantization, workers: int) -> int:
    """Return the bytes that one rank keeps for chunks in flight."""
    codec, gather = _codecs(quantization)
    chunk, window = chunk_and_window(largest, codec)
    values = min(chunk, slice_size(chunk, workers))
    buffers = (workers - 1) * codec.wire_bytes(values)
    buffers += 0 if codec.is_fp32 else codec.wire_bytes(chunk)
    if workers == 2:
        return window * buffers
    return window * (buffers + workers * gather.wire_bytes(values)) + 4 * values
