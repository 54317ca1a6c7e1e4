"""Predict the share of its time that a run computes, from links, step times, model and settings.

The rules are those of `diloco/gloo_peers.py`. A fragment is sent after an inner step. Its exchange
starts when the last worker has reached that step and the previous exchange is done, because one
background thread does them in order. The result is applied `delay` steps after the send, and
training waits if it is not there. Each worker has its own clock.

Not in the model: passes over memory in the training thread, cores that coding takes from training
on a CPU, packet loss and other traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from torchtitan_diloco.base.formatting import clock, counted, markdown_table
from torchtitan_diloco.base.hardware import GIB, PEAK_BF16_FLOPS
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.metrics import GRADIENTS, all_reduce_bytes
from torchtitan_diloco.components.run_plan import RunPlan, plan_run
from torchtitan_diloco.components.traffic import RunTraffic, traffic_of
from torchtitan_diloco.config.loader import load_config, shipped_configs
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import (
    STREAM_BYTES,
    Beginning,
    DiLoCoConfig,
    Fragments,
    Quantization,
)
from torchtitan_diloco.diloco.exchange import chunk_and_window, exchange_bytes, slice_owners
from torchtitan_diloco.diloco.formats import FORMATS
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import state_bytes
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.interface import flops_per_token, parameter_counts

STEADY_ROUNDS = 30
"""Simulated rounds of every fragment in the steady state."""
JITTERED_STEPS = 2000
"""Steps that are drawn to find the mean of the slowest worker in data parallelism."""
_codec = cache(build_codec)


@dataclass(frozen=True)
class Conditions:
    """Link and speeds of a run: what its settings do not determine."""

    bits_per_second: float
    """Slowest rate at which a worker sends to, or receives from, all others together. Links are
    full duplex. All workers send the same amount, so the slowest rate counts for all."""
    step_seconds: tuple[float, ...]
    """Compute of one inner step of each worker, without any exchange."""
    latency_seconds: float = 0.0
    """One-way latency between any two workers: half of what ping shows."""
    jitter: float = 0.0
    """Standard deviation of a step's time as a share of its mean."""
    coding_bytes_per_second: float = math.inf
    """fp32 bytes that all ranks of a worker together encode or decode in a second, as measured in
    a run, whatever its format was."""
    outer_bytes_per_second: float = math.inf
    """fp32 bytes of a fragment that the outer step of a worker processes in a second."""
    backward_waits: bool = False
    """Whether the backward pass of data parallelism waits for each all-reduce, as on a CPU."""
    all_reduce_bits_per_second: float = math.inf
    """Rate at which each worker sends in an all-reduce, if that does not fill the link."""

    def __post_init__(self) -> None:
        steps = all(0 < seconds < math.inf for seconds in self.step_seconds)
        latency = 0 <= self.latency_seconds < math.inf
        if not (self.bits_per_second > 0 and steps and latency and 0 <= self.jitter <= 1):
            raise UserError(
                f"bandwidth {self.bits_per_second:g} bit/s, steps of {self.step_seconds} s, "
                f"latency {self.latency_seconds:g} s: give a bandwidth and step times above 0, and "
                "a latency from 0 up"
            )

    @property
    def workers(self) -> int:
        return len(self.step_seconds)

    @property
    def bytes_in_flight(self) -> float:
        """Bytes that fill the link to one other worker for a round trip."""
        rate = self.bits_per_second / 8 / max(1, self.workers - 1)
        return rate * 2 * self.latency_seconds if self.latency_seconds else 0.0


class Prediction(NamedTuple):
    """Means over workers."""

    compute_seconds_per_step: float
    exposed_seconds_per_step: float
    """Time for which the training thread waits."""
    sent_bytes_per_step: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds_per_step + self.exposed_seconds_per_step

    @property
    def utilization(self) -> float:
        return self.compute_seconds_per_step / self.step_seconds


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
    beginning = Beginning() if steps is None else diloco.beginning.in_steps(steps)
    schedule = build_schedule(replace(diloco, beginning=beginning), len(fragments))
    streams = diloco.link.streams_of_rank(ranks)
    exchanges = [
        predict_exchange(
            values,
            largest=max(fragments),
            quantization=diloco.quantization,
            conditions=conditions,
            ranks=ranks,
            streams=streams,
        )
        for values in fragments
    ]
    if steps is None:
        total_steps = STEADY_ROUNDS * schedule.sync_every
        last_send = total_steps + schedule.sync_every - 1
        last_step = last_send + schedule.delay
    else:
        total_steps = steps
        last_send = steps
        last_step = steps
    computed = draw_steps(conditions, last_step).cumsum(axis=0)
    waited = np.zeros(conditions.workers)
    thread_free = 0.0
    sent_bytes = 0
    due = dict[int, float]()
    """Step -> when the last exchange that is applied after it is done."""
    for step in range(1, last_step + 1):
        sent = schedule.sent_at(step) if step <= last_send else []
        if not (sent or step in due):
            continue
        waited = np.maximum(waited, due.pop(step, 0.0) - computed[step - 1])
        for fragment in sent:
            sent_here, seconds = exchanges[fragment]
            thread_free = max(thread_free, float((computed[step - 1] + waited).max())) + seconds
            sent_bytes += sent_here
        if sent:
            delay = 0 if schedule.is_average(step) else schedule.delay
            due[min(step + delay, last_step)] = thread_free
        if step in due:  # without a delay, and at the end
            waited = np.maximum(waited, due.pop(step) - computed[step - 1])
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


def predict_exchange(
    values: int,
    largest: int,
    quantization: Quantization,
    conditions: Conditions,
    ranks: int = 1,
    streams: int = 1,
) -> tuple[int, float]:
    """Return the bytes that each worker sends and receives for a fragment, and the seconds.

    Encoding, transfer and decoding of chunks overlap. `largest` is the size of the largest
    fragment. Chunks are those of a CPU: on a GPU more are in flight, so long links idle less.
    `streams`: those of each rank to each other worker, which limit the rate of a long link.
    """
    others = conditions.workers - 1
    outer = 4 * values / conditions.outer_bytes_per_second
    if not others:
        return 0, outer
    codec = _codec(quantization)
    owners = slice_owners(conditions.workers, codec)
    chunk, window = chunk_and_window(-(-largest // ranks), codec, streams=streams, owners=owners)
    hops = 1 if owners == 1 else 2
    sent = exchange_bytes(values, conditions.workers, codec, ranks)
    chunks = -(-values // (ranks * chunk))
    idle = chunks / max(1, window // hops) - 1  # a long link idles while the window is in flight
    round_trips = sent / (others * ranks * streams * STREAM_BYTES) - 1  # after the first windows
    transfer = max(
        8 * sent / conditions.bits_per_second,
        idle * conditions.latency_seconds,
        round_trips * 2 * conditions.latency_seconds,
    )
    coded = coded_bytes(values, conditions.workers, quantization.codec)
    coding = coded / conditions.coding_bytes_per_second
    pipelined = max(transfer, coding) + min(transfer, coding) / chunks
    return sent, hops * conditions.latency_seconds + pipelined + outer


def coded_bytes(values: int, workers: int, codec: str) -> float:
    """Return the fp32 bytes that a worker encodes and decodes in an exchange.

    Two workers, or any number with a sparse format, encode their delta and decode those of all
    workers. Otherwise each encodes its delta and the mean of its slice, and decodes all parts of
    that slice and all means. `codec`: the name of the format, which two workers need not know.
    """
    if workers == 2 or FORMATS[codec].is_sparse:
        return 4 * values * (1 + workers)
    return 4 * values * (3 + 1 / workers)


def predict_data_parallel(
    buckets: Sequence[int], conditions: Conditions, *, gradient_bytes: int
) -> Prediction:
    """Predict data parallelism: a ring all-reduce of all gradients at every step.

    The backward pass takes the last two thirds of the step and yields the buckets (in parameters)
    in this order, at equal intervals. The optimizer waits for all of them.
    """
    workers = conditions.workers
    compute = fmean(conditions.step_seconds)
    latency = 2 * (workers - 1) * conditions.latency_seconds
    rate = min(conditions.bits_per_second, conditions.all_reduce_bits_per_second)
    done = 0.0
    transfers = 0.0
    for number, parameters in enumerate(buckets, start=1):
        ready = compute * (1 / 3 + 2 / 3 * number / len(buckets))
        sent = all_reduce_bytes(parameters, workers, each=gradient_bytes)
        transfer = 8 * sent / rate + latency
        transfers += transfer
        done = max(done, ready) + transfer
    slowest = draw_steps(conditions, JITTERED_STEPS).max(axis=1).mean()
    waits = transfers if conditions.backward_waits else max(0.0, done - compute)
    exposed = max(0.0, float(slowest) - compute) + waits
    return Prediction(
        compute_seconds_per_step=compute,
        exposed_seconds_per_step=exposed,
        sent_bytes_per_step=all_reduce_bytes(sum(buckets), workers, each=gradient_bytes),
    )


@dataclass(frozen=True)
class Workload:
    """Model and length of a run, for which any settings of the outer loop can be predicted."""

    config: Config
    model: nn.Module
    """Model on the meta device."""
    plan: RunPlan
    workers: int
    ranks: int
    """Ranks of one worker, over which FSDP2 shards it."""

    @staticmethod
    def of(config: Config, vocabulary: int) -> "Workload":
        """Return the workload of a configuration. `vocabulary`: rows of the embedding."""
        workers = config.workers
        ranks = max(1, config.parallel.fsdp)
        model = build_model(config.model, vocabulary, config.training.sequence_length)
        counts = parameter_counts(model)
        plan = plan_run(
            config.training,
            ranks=workers * ranks,
            parameters=counts["total"],
            embedding_parameters=counts["embedding"],
            optimizer=OPTIMIZERS[config.optimizer.name],
            reduce_dtype=config.parallel.reduce_dtype,
        )
        return Workload(config=config, model=model, plan=plan, workers=workers, ranks=ranks)

    def fragments(self, config: Fragments) -> tuple[int, ...]:
        """Return the parameters of each fragment, in the order in which fragments are sent."""
        return tuple(fragment.parameters for fragment in build_fragments(self.model, config))

    def buckets(self) -> tuple[int, ...]:
        """Return the parameters of each all-reduce of data parallelism, in the order in which the
        backward pass yields them."""
        *blocks, outside = self.fragments(Fragments("sequential", layers_per_fragment=1))
        return (*reversed(blocks), outside)

    def traffic(self, diloco: DiLoCoConfig) -> RunTraffic:
        """Return the traffic of the run with these settings."""
        return traffic_of(replace(self.config, diloco=diloco), self.plan, self.model)

    def peak_warning(self, step_seconds: float) -> str:
        """Return a warning if no GPU is fast enough for steps of this length, or ""."""
        length = self.config.training.sequence_length
        tokens = self.plan.tokens_per_step / (self.workers * self.ranks)
        flops = flops_per_token(self.model, length) * tokens
        fastest = max(PEAK_BF16_FLOPS, key=PEAK_BF16_FLOPS.__getitem__)
        peak = PEAK_BF16_FLOPS[fastest]
        if flops <= peak * step_seconds:
            return ""
        enough = math.ceil(self.ranks * flops / (peak * step_seconds))
        return (
            f"--step-time {step_seconds:g}s: with {counted(self.ranks, 'rank')} a worker, a GPU "
            f"would compute {flops / step_seconds / 1e12:,.0f} TFLOP/s, and the peak of a "
            f"{fastest} is {peak / 1e12:,.0f}: give a longer time than {flops / peak:.2g}s, or at "
            f"least {enough} ranks with --parallel.fsdp"
        )

    def predict(self, diloco: DiLoCoConfig, conditions: Conditions) -> Prediction:
        """Predict the steady state, or the whole run if it has a beginning."""
        if diloco.method == "none":
            gradient_bytes = GRADIENTS[self.plan.reduce_dtype].bytes_each
            return predict_data_parallel(self.buckets(), conditions, gradient_bytes=gradient_bytes)
        fragments = self.fragments(diloco.fragments)
        begins = diloco.beginning.length
        steps = self.plan.total_steps if begins else None
        return predict(fragments, diloco, conditions, ranks=self.ranks, steps=steps)


# --- presets --------------------------------------------------------------------------------------

GPU = "H100"
SMALL_TOKENS = 2**16
"""Vocabulary up to which a token takes two bytes of a shard."""


def presets_table(gpus: int, mfu: float) -> str:
    """Return what the presets need, for workers of so many GPUs, at a share `mfu` of the peak."""
    rows = []
    for name in shipped_configs():
        config = load_config(name)
        if config.run.device == "cpu" or config.diloco.method == "none":
            continue
        vocabulary = config.model.vocab_size or 0
        load = Workload.of(config, vocabulary)
        plan = load.plan
        workers = load.workers
        bytes_each = plan.inner_bytes + state_bytes(config.diloco)
        tokens = plan.total_steps * plan.tokens_per_step
        shard_bytes = tokens * (2 if vocabulary <= SMALL_TOKENS else 4)
        flops = flops_per_token(load.model, config.training.sequence_length) * tokens
        seconds = flops / (workers * gpus * PEAK_BF16_FLOPS[GPU] * mfu)
        conditions = Conditions(bits_per_second=math.inf, step_seconds=(1.0,) * workers)
        sent_bytes = load.predict(config.diloco, conditions).sent_bytes_per_step * plan.total_steps
        cells = [
            name,
            f"{plan.parameters / 1e6:,.0f}M",
            f"{tokens / 1e9:,.1f}B",
            f"{workers} x {gpus}",
            f"{bytes_each * plan.parameters / gpus / GIB:.1f}",
            clock(seconds),
            f"{shard_bytes / 1e9:,.1f}",
            f"{sent_bytes / 1e9:,.0f}",
        ]
        rows.append((plan.parameters, cells))
    columns = "preset, parameters, tokens, GPUs, GiB a GPU, time, GB on disk, GB sent by a worker"
    return (
        f"{markdown_table(columns.split(', '), [cells for _, cells in sorted(rows)])}\n\n"
        f"{gpus} GPUs a worker, time at {mfu:.0%} of an {GPU}'s peak; GiB without activations, "
        "with outer state (on the host if it is large); 1 GB = 10^9 bytes"
    )
