"""Predict how much of its time a run computes, from links, step times and bytes.

The rules are those of `diloco/streaming.py`. A fragment is sent after an inner step. Its exchange
starts when the last worker has reached that step and the previous exchange is done, because one
background thread does them in order. The result is applied `delay` steps after the send, and
training waits if it is not there. Each worker has its own clock.

Not in the model: passes over memory in the training thread, cores that coding takes from training
on a CPU, packet loss and other traffic. The paper's model is in `paper.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.diloco.schedule import Schedule

Array = npt.NDArray[np.float64]

APPLY, SEND, APPLY_AT_ONCE = range(3)
"""Order of events after the same step. With no delay and at the end a send is applied at once."""
STEADY_ROUNDS = 30
"""Rounds of every fragment that are simulated for the steady state."""
MAX_ROUNDS = 300
"""Rounds of a given run that are simulated; the rest of the run is extrapolated."""
JITTERED_STEPS = 2000
"""Steps of data parallelism that are drawn to find the mean of the slowest worker."""
GRADIENT_BYTES = 2
"""Bytes a parameter that data parallelism sends: bf16 gradients, as the papers count them."""


@dataclass(frozen=True)
class Links:
    """Full-duplex connection of each worker to all others together, in bits a second."""

    up: tuple[float, ...]
    """Sending rate of each worker."""
    down: tuple[float, ...]
    """Receiving rate of each worker."""
    latency_seconds: float = 0.0
    """One-way latency between any two workers: half of what ping shows."""

    def __post_init__(self) -> None:
        assert len(self.up) == len(self.down) > 0
        for rate in (*self.up, *self.down):
            if not rate > 0:
                raise ValueError(f"a link of {rate:g} bits a second: give a bandwidth above 0")
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(f"a latency of {self.latency_seconds:g} s: give 0 or more, as in 30ms")

    @property
    def slowest(self) -> float:
        return min(*self.up, *self.down)


def even_links(workers: int, bits_per_second: float, latency_seconds: float = 0.0) -> Links:
    return Links((bits_per_second,) * workers, (bits_per_second,) * workers, latency_seconds)


@dataclass(frozen=True)
class Conditions:
    """Everything outside the settings that decides how long things take."""

    links: Links
    step_seconds: tuple[float, ...]
    """Compute of one inner step of each worker, without any exchange."""
    jitter: float = 0.0
    """Standard deviation of a step's time as a share of it, drawn for every step and worker."""
    coding_bytes_per_second: float = math.inf
    """fp32 bytes that all ranks of a worker together encode or decode in a second."""
    outer_bytes_per_second: float = math.inf
    """fp32 bytes of a fragment that the outer step of a worker processes in a second."""
    codec: str = ""
    """Codec with which a run measured the two speeds; empty where none was measured."""

    def __post_init__(self) -> None:
        assert len(self.step_seconds) == self.workers
        for seconds in self.step_seconds:
            if not 0 < seconds < math.inf:
                raise ValueError(f"a step time of {seconds:g} s: give seconds above 0, as in 0.5s")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"a jitter of {self.jitter:g}: give a share from 0 to 1, as in 0.05")

    @property
    def workers(self) -> int:
        return len(self.links.up)

    @property
    def mean_step_seconds(self) -> float:
        return math.fsum(self.step_seconds) / self.workers

    def with_bandwidth(self, factor: float) -> "Conditions":
        up, down = (
            tuple(factor * rate for rate in one) for one in (self.links.up, self.links.down)
        )
        return replace(self, links=replace(self.links, up=up, down=down))

    def draw_steps(self, steps: int) -> Array:
        """Return seconds of compute, [workers, steps], the same numbers at every call."""
        means = np.array(self.step_seconds)[:, None]
        if not self.jitter:
            return np.broadcast_to(means, (self.workers, steps))
        noise = np.random.default_rng(0).standard_normal((steps, self.workers)).T
        return np.asarray(means * (1 + self.jitter * noise).clip(min=0.1))


@dataclass(frozen=True)
class Payload:
    """Bytes and work of one exchange of one fragment."""

    sent: tuple[int, ...]
    """Bytes sent by each worker."""
    received: tuple[int, ...]
    """Bytes received by each worker."""
    hops: int
    """Messages in a row: 1 with two workers, 2 with more, 0 with one."""
    chunks: int
    """Chunks that are encoded, sent and decoded in a pipeline."""
    window: int
    """Chunks in flight in one hop."""
    coded_bytes: int
    """fp32 bytes that a worker encodes and decodes."""
    state_bytes: int
    """fp32 bytes of the fragment."""

    def link_seconds(self, conditions: Conditions) -> float:
        """Return seconds on the wire without latency. With a small window, a long link idles."""
        links = conditions.links
        ends = zip(self.sent + self.received, links.up + links.down, strict=True)
        serial = max(8 * count / rate for count, rate in ends)
        return max(serial, max(0.0, self.chunks / self.window - 1) * links.latency_seconds)

    def seconds(self, conditions: Conditions) -> float:
        """Return seconds of the exchange. Coding and transfer overlap except for one chunk."""
        outer = self.state_bytes / conditions.outer_bytes_per_second
        if not self.hops:
            return outer
        transfer = self.link_seconds(conditions)
        coding = self.coded_bytes / conditions.coding_bytes_per_second
        pipelined = max(transfer, coding) + min(transfer, coding) / self.chunks
        return self.hops * conditions.links.latency_seconds + pipelined + outer


@dataclass(frozen=True)
class Prediction:
    utilisation: float
    """Compute divided by all time, mean over workers."""
    step_seconds: float
    """Compute and waiting of one step, mean."""
    exposed_seconds_per_step: float
    """Waiting of the training thread, mean over workers."""
    sent_bytes_per_step: float
    """Bytes of the worker that sends most."""
    peak_bits_per_second: float
    """Rate of the busiest worker while something is on the link."""
    in_flight: int
    """Most fragments in flight at once."""

    @property
    def mean_bits_per_second(self) -> float:
        return 8 * self.sent_bytes_per_step / self.step_seconds


def predict(
    payloads: Sequence[Payload],
    schedule: Schedule,
    conditions: Conditions,
    steps: int | None = None,
) -> Prediction:
    """Predict a run of `steps` steps, which drains at its end, or (None) the steady state.

    `payloads` are the exchanges of the fragments in the order of their turns.
    """
    assert len(payloads) == schedule.fragments
    period = schedule.sync_every
    horizon = STEADY_ROUNDS * period if steps is None else min(steps, MAX_ROUNDS * period)
    events = _events(schedule, None if steps is None else horizon)
    sends = [fragment for _, kind, fragment in events if kind == SEND]
    waited, in_flight = _simulate(payloads, events, conditions)
    total_steps, scale = horizon, 1.0
    if steps is not None and sends:
        total_steps = steps
        all_sends = sum(schedule.outer_round(one, steps) for one in range(schedule.fragments))
        scale = all_sends / len(sends)
    sent = np.sum([payloads[fragment].sent for fragment in sends], axis=0) if sends else np.zeros(1)
    exposed = waited * scale / total_steps
    compute = conditions.mean_step_seconds
    return Prediction(
        utilisation=compute / (compute + exposed),
        step_seconds=compute + exposed,
        exposed_seconds_per_step=exposed,
        sent_bytes_per_step=float(sent.max()) * scale / total_steps,
        peak_bits_per_second=max(
            _rate(8 * max(one.sent), one.link_seconds(conditions)) for one in payloads
        ),
        in_flight=in_flight,
    )


def all_reduce_bytes(parameters: float, workers: int) -> float:
    """Return the bytes that one worker sends in a ring all-reduce of all gradients."""
    return 2 * (workers - 1) / workers * GRADIENT_BYTES * parameters


def predict_data_parallel(buckets: Sequence[int], conditions: Conditions) -> Prediction:
    """Predict the control, a ring all-reduce of all gradients at every step.

    The backward pass is spread evenly over the last two thirds of the step and yields the buckets
    (in parameters) in this order. The optimizer waits for all of them.
    """
    workers, links = conditions.workers, conditions.links
    sent = all_reduce_bytes(sum(buckets), workers)
    compute = conditions.mean_step_seconds
    link_free = on_link = 0.0
    for number, parameters in enumerate(buckets, start=1):
        ready = compute * (1 / 3 + 2 / 3 * number / len(buckets))
        transfer = 8 * all_reduce_bytes(parameters, workers) / links.slowest
        link_free = max(link_free, ready) + transfer + 2 * (workers - 1) * links.latency_seconds
        on_link += transfer
    slowest = conditions.draw_steps(JITTERED_STEPS if conditions.jitter else 1).max(axis=0).mean()
    exposed = max(0.0, float(slowest) - compute)
    if workers > 1:
        exposed += max(link_free, compute) - compute
    return Prediction(
        utilisation=compute / (compute + exposed),
        step_seconds=compute + exposed,
        exposed_seconds_per_step=exposed,
        sent_bytes_per_step=sent,
        peak_bits_per_second=_rate(8 * sent, on_link),
        in_flight=min(1, workers - 1),
    )


def _events(schedule: Schedule, steps: int | None) -> list[tuple[int, int, int]]:
    """Return (inner step, kind, fragment) of all sends and applies in a worker's order."""
    found = []
    for fragment in range(schedule.fragments):
        first = schedule.first_send(fragment)
        last = first + STEADY_ROUNDS * schedule.sync_every - 1 if steps is None else steps
        for sent in range(first, last + 1, schedule.sync_every):
            due = sent + schedule.delay
            applied = due if steps is None else min(due, steps)
            kind = APPLY if schedule.delay and applied == due else APPLY_AT_ONCE
            found += [(sent, SEND, fragment), (applied, kind, fragment)]
    return sorted(found)


def _simulate(
    payloads: Sequence[Payload], events: Sequence[tuple[int, int, int]], conditions: Conditions
) -> tuple[float, int]:
    """Return the mean seconds that training waits in all events, and the most in flight."""
    lengths = [payload.seconds(conditions) for payload in payloads]
    steps = conditions.draw_steps(events[-1][0] if events else 0)
    computed = np.concatenate([np.zeros((conditions.workers, 1)), steps.cumsum(axis=1)], axis=1)
    waited = np.zeros(conditions.workers)
    thread_free, most = 0.0, 0
    ready: dict[int, float] = {}
    for step, kind, fragment in events:
        now = computed[:, step] + waited
        if kind == SEND:
            thread_free = max(thread_free, float(now.max())) + lengths[fragment]
            ready[fragment] = thread_free
            most = max(most, len(ready))
        else:
            waited += np.maximum(0.0, ready.pop(fragment) - now)
    return float(waited.mean()), most


def _rate(bits: float, seconds: float) -> float:
    return bits / seconds if seconds else (math.inf if bits else 0.0)
