"""Predict the share of its time that a run computes, from links, step times, model and settings.

The rules are those of `diloco/streaming.py`. A fragment is sent after an inner step. Its exchange
starts when the last worker has reached that step and the previous exchange is done, because one
background thread does them in order. The result is applied `delay` steps after the send, and
training waits if it is not there. Each worker has its own clock.

Not in the model: passes over memory in the training thread, cores that coding takes from training
on a CPU, packet loss and other traffic. The paper's model is in `paper.py`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from torchtitan_diloco.components.records import Conditions, RoundRecord, Summary
from torchtitan_diloco.components.run_plan import RunPlan, plan_run
from torchtitan_diloco.components.summary import coded_bytes
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import (
    Beginning,
    DiLoCoConfig,
    Fragments,
    Overlap,
    Quantization,
)
from torchtitan_diloco.diloco.exchange import chunk_and_window, slice_owners
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.schedule import Schedule, build_schedule
from torchtitan_diloco.diloco.transport import HEADER_BYTES
from torchtitan_diloco.models import LanguageModel, build_model
from torchtitan_diloco.utils import all_reduce_bytes

APPLY, SEND, APPLY_AT_ONCE = range(3)
"""Order of events after a step. With no delay and at the end a send is applied at once."""
STEADY_ROUNDS = 30
"""Simulated rounds of every fragment in the steady state."""
MAX_ROUNDS = 300
"""Longer runs are predicted as the steady state."""
JITTERED_STEPS = 2000
"""Steps that are drawn to find the mean of the slowest worker in data parallelism."""
_codec = cache(build_codec)
HOST_OUTER_STEP = 2.0e9
"""fp32 bytes of a fragment that one core processes in a second of the outer step
(docs/performance.md, AMD EPYC)."""


class CodecTraits(NamedTuple):
    host_coding: float
    """fp32 bytes that one core encodes or decodes in a second (docs/performance.md)."""
    risk: float
    """Percent of loss (docs/measurements.md)."""


CODEC_TRAITS: dict[str, CodecTraits] = {
    "fp32": CodecTraits(8.5e9, 0.0),
    "bf16": CodecTraits(13.1e9, 0.0),
    "fp8_e4m3": CodecTraits(1.9e9, 0.03),
    "fp8_e5m2": CodecTraits(2.0e9, 0.05),
    "int8": CodecTraits(2.9e9, 0.02),
    "fp4_e2m1": CodecTraits(2.1e9, 0.3),
    "fp4_e3m0": CodecTraits(2.1e9, 0.3),
    "ternary": CodecTraits(2.2e9, 1.7),
    "topk": CodecTraits(0.5e9, 2.5),
}


@dataclass(frozen=True)
class Prediction:
    """Means over workers."""

    compute_seconds_per_step: float
    exposed_seconds_per_step: float
    """Waiting of the training thread."""
    sent_bytes_per_step: float

    def after(self, beginning: "Prediction", share: float) -> "Prediction":
        """Return the means of a run whose beginning has this share of the steps."""
        early, late = (np.array(astuple(one)) for one in (beginning, self))
        return Prediction(*(min(1.0, share) * early + max(0.0, 1 - share) * late).tolist())

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds_per_step + self.exposed_seconds_per_step

    @property
    def utilisation(self) -> float:
        return self.compute_seconds_per_step / self.step_seconds


# --- Streaming DiLoCo ----------------------------------------------------------------------------


def predict(
    fragments: Sequence[int],
    diloco: DiLoCoConfig,
    conditions: Conditions,
    *,
    ranks: int = 1,
    steps: int | None = None,
) -> Prediction:
    """Predict a run of `steps` steps, which drains at its end, or (None) the steady state.

    `fragments` are the numbers of parameters, in the order in which fragments are sent. `ranks`
    share the link of a worker.
    """
    if steps is None:
        diloco = replace(diloco, beginning=Beginning())
    elif steps > MAX_ROUNDS * diloco.sync_every:
        often = replace(diloco, sync_every=diloco.beginning.sync_every, overlap=Overlap(delay=0))
        early, later = (predict(fragments, one, conditions, ranks=ranks) for one in (often, diloco))
        return later.after(early, diloco.beginning.steps / steps)
    schedule = build_schedule(diloco, len(fragments), steps or 0)
    total_steps = STEADY_ROUNDS * schedule.sync_every if steps is None else steps
    exchanges = [
        predict_exchange(values, max(fragments), diloco.quantization, conditions, ranks)
        for values in fragments
    ]
    events = _events(schedule, steps)
    last_step = events[-1][0] if events else 0
    computed = draw_steps(conditions, last_step).cumsum(axis=0)
    waited = np.zeros(conditions.workers)
    thread_free, sent_bytes = 0.0, 0
    ready: dict[int, float] = {}
    for step, kind, fragment in events:
        now = computed[step - 1] + waited
        if kind == SEND:
            sent, seconds = exchanges[fragment]
            thread_free = ready[fragment] = max(thread_free, float(now.max())) + seconds
            sent_bytes += sent
        else:
            waited += np.maximum(0.0, ready.pop(fragment) - now)
    return Prediction(
        compute_seconds_per_step=fmean(conditions.step_seconds),
        exposed_seconds_per_step=float(waited.mean()) / total_steps,
        sent_bytes_per_step=sent_bytes / total_steps,
    )


def draw_steps(conditions: Conditions, steps: int) -> NDArray[np.float64]:
    """Return the seconds of compute as [steps, workers]. Every call returns the same numbers."""
    if not conditions.jitter:
        return np.tile(conditions.step_seconds, (steps, 1))
    noise = np.random.default_rng(0).standard_normal((steps, conditions.workers))
    return np.asarray(conditions.step_seconds * (1 + conditions.jitter * noise).clip(min=0.1))


def predict_observed(
    summary: Summary, diloco: DiLoCoConfig, rounds: Iterable[RoundRecord], ranks: int
) -> float:
    """Predict the utilisation in percent under the observed conditions, NaN if not known."""
    sizes = {record.fragment: record.parameters for record in rounds}
    if summary.observed is None or sorted(sizes) != list(range(len(sizes))):
        return math.nan
    fragments = [sizes[fragment] for fragment in sorted(sizes)]
    steps = summary.step - summary.counted_after_step
    first = max(0, diloco.beginning.steps - summary.counted_after_step)
    diloco = replace(diloco, beginning=replace(diloco.beginning, steps=first))
    return 100 * predict(fragments, diloco, summary.observed, ranks=ranks, steps=steps).utilisation


@cache
def _events(schedule: Schedule, steps: int | None) -> list[tuple[int, int, int]]:
    """Return (inner step, kind, fragment) of all sends and applies, in order."""
    found = []
    last = (STEADY_ROUNDS + 1) * schedule.sync_every - 1 if steps is None else steps
    for sent in range(1, last + 1):
        delay = 0 if schedule.is_average(sent) else schedule.delay
        due = sent + delay
        applied = due if steps is None else min(due, steps)
        kind = APPLY if delay and (applied == due or schedule.last_step) else APPLY_AT_ONCE
        for fragment in schedule.sent_at(sent):
            found += [(sent, SEND, fragment), (applied, kind, fragment)]
    return sorted(found)


def predict_exchange(
    values: int,
    largest: int,
    quantization: Quantization,
    conditions: Conditions,
    ranks: int = 1,
) -> tuple[int, float]:
    """Return the bytes that each worker sends and receives for a fragment, and the seconds.

    Encoding, transfer and decoding of chunks overlap. `largest` is the size of the largest
    fragment. Chunks are those of a CPU: on a GPU more are in flight, so long links idle less.
    """
    others = conditions.workers - 1
    outer = 4 * values / conditions.outer_bytes_per_second
    if not others:
        return 0, outer
    codec = _codec(quantization)
    chunk, window = chunk_and_window(-(-largest // ranks), codec)
    hops, sent = 1, others * codec.wire_bytes(values)
    if slice_owners(conditions.workers, codec) > 1:
        # The others' slices of the delta, and the mean of the own slice to each other.
        hops, sent = 2, (sent + others * codec.wire_bytes(values)) // (others + 1)
    sent += others * ranks * HEADER_BYTES
    chunks = -(-values // (ranks * chunk))
    idle = chunks / max(1, window // hops) - 1  # a long link idles while the window is in flight
    transfer = max(8 * sent / conditions.bits_per_second, idle * conditions.latency_seconds)
    coded = coded_bytes(values, conditions.workers, quantization.codec)
    coding = coded / conditions.coding_bytes_per_second
    pipelined = max(transfer, coding) + min(transfer, coding) / chunks
    return sent, hops * conditions.latency_seconds + pipelined + outer


# --- data parallelism ----------------------------------------------------------------------------


def predict_data_parallel(buckets: Sequence[int], conditions: Conditions) -> Prediction:
    """Predict data parallelism: a ring all-reduce of all gradients at every step.

    The backward pass takes the last two thirds of the step and yields the buckets (in parameters)
    in this order, at equal intervals. The optimizer waits for all of them.
    """
    workers, compute = conditions.workers, fmean(conditions.step_seconds)
    latency = 2 * (workers - 1) * conditions.latency_seconds
    done = 0.0
    for number, parameters in enumerate(buckets, start=1):
        ready = compute * (1 / 3 + 2 / 3 * number / len(buckets))
        transfer = 8 * all_reduce_bytes(parameters, workers) / conditions.bits_per_second
        done = max(done, ready) + transfer + latency
    slowest = draw_steps(conditions, JITTERED_STEPS).max(axis=1).mean()
    exposed = max(0.0, float(slowest) - compute) + max(0.0, done - compute)
    return Prediction(compute, exposed, all_reduce_bytes(sum(buckets), workers))


# --- a configured run ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Model and length of a run, for which any settings of the outer loop can be predicted."""

    model: LanguageModel
    """On the meta device."""
    plan: RunPlan
    layers: int
    flops_per_step: float
    """FLOPs of one worker."""
    workers: int
    ranks: int
    """Ranks of one worker, over which FSDP2 shards it."""
    on_cpu: bool
    """The run has no accelerator."""

    @staticmethod
    def of(config: Config, vocabulary: int) -> "Workload":
        length, workers = config.training.sequence_length, config.diloco.workers
        ranks = max(1, config.parallel.fsdp)
        model = build_model(config.model, vocabulary, length)
        counts = model.parameter_counts()
        plan = plan_run(config.training, workers * ranks, counts["total"], counts["embedding"])
        flops = model.flops_per_token(length) * plan.tokens_per_step / workers
        on_cpu = config.run.device == "cpu"
        return Workload(model, plan, len(model.blocks), flops, workers, ranks, on_cpu)

    def fragments(self, config: Fragments) -> tuple[int, ...]:
        """Return the parameters of each fragment, in the order in which fragments are sent."""
        return _fragment_sizes(self.model, config)

    def predict(self, diloco: DiLoCoConfig, conditions: Conditions) -> Prediction:
        """Predict the steady state, or the whole run if it has a beginning."""
        if diloco.method == "none":
            layers = Fragments(pattern="sequential", layers_per_fragment=1)
            *blocks, rest = self.fragments(layers)
            return predict_data_parallel((*reversed(blocks), rest), conditions)
        speeds = self.with_speeds(diloco, conditions)
        steps = self.plan.total_steps if diloco.beginning.steps else None
        fragments = self.fragments(diloco.fragments)
        return predict(fragments, diloco, speeds, ranks=self.ranks, steps=steps)

    def needed_bits_per_second(
        self, diloco: DiLoCoConfig, conditions: Conditions, utilisation: float
    ) -> float | None:
        """Return the rate of the slowest link that reaches a utilisation, within half a percent.

        Return None if latency, coding or uneven steps make it impossible at any rate.
        """

        def is_enough(rate: float) -> bool:
            found = self.predict(diloco, replace(conditions, bits_per_second=rate))
            return found.utilisation >= utilisation

        low, high = 1.0, 1e18
        if not is_enough(high):
            return None
        while high / low > 1.005:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high

    def with_speeds(self, diloco: DiLoCoConfig, conditions: Conditions) -> Conditions:
        """Return the conditions with the speeds of coding and outer step under these settings.

        Keep measured speeds. If there are none, only work on the host takes time.
        """
        link, codec = diloco.link, diloco.quantization.codec
        if not (self.on_cpu or link.outer_state == "cpu"):
            return conditions
        cores = self.ranks * diloco.quantization.threads
        coding, outer = conditions.coding_bytes_per_second, conditions.outer_bytes_per_second
        if math.isinf(coding):
            coding = cores * CODEC_TRAITS[codec].host_coding
        elif conditions.codec:  # measured with another codec: in the proportions of the table
            measured_with = CODEC_TRAITS[conditions.codec]
            coding *= CODEC_TRAITS[codec].host_coding / measured_with.host_coding
        if math.isinf(outer):
            outer = cores * HOST_OUTER_STEP
        return replace(conditions, coding_bytes_per_second=coding, outer_bytes_per_second=outer)


@cache
def _fragment_sizes(model: nn.Module, config: Fragments) -> tuple[int, ...]:
    return tuple(fragment.parameters for fragment in build_fragments(model, config))
