"""How much of its time a real run computes: every exchange of the schedule on the links there are.

The rules are those of `diloco/streaming.py` and `diloco/exchange.py`. A fragment is sent after an inner step; its exchange
begins when the last worker has come so far and the exchange before it is done, as the background thread does one after the
other; it is applied `delay` steps after the send, and training waits if it is not back. Several may be in flight. Each worker
has a clock of its own, so a slow step of one makes the others wait, at the next apply and not before.

What the paper's model (`paper_model.py`) leaves out is here: latency, the embedding's fragment, coding, unequal links, more
than two workers, uneven step times and any delay. What is left out here: the passes over memory in the training thread (taking
a delta, merging), cores that coding on a CPU takes from training, losses and congestion on the link.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.planner.conditions import Conditions
from torchtitan_diloco.planner.payload import Payload

if TYPE_CHECKING:  # the planner's core is imported without torch, which that package needs
    from torchtitan_diloco.diloco.schedule import Schedule

Array = npt.NDArray[np.float64]

ROUNDS = 30
"""Of every fragment that stand for the steady state."""
MOST_ROUNDS = 300
"""That are gone through of a given run; the rest of it goes on alike."""
JITTERED_STEPS = 2000
"""Of data parallelism, which waits for the slowest in every one."""

GRADIENT_BYTES = 2
"""Of a parameter: data parallelism is counted with gradients in bf16, as the papers count it."""
JITTER_SEED = 0


@dataclass(frozen=True)
class Prediction:
    utilisation: float
    """Compute / all time, mean over workers; above 0, at most 1."""
    step_seconds: float
    """Mean of compute and waiting."""
    exposed_seconds_per_step: float
    """That training waits, mean over workers."""
    sent_bytes_per_step: float
    """By the worker that sends most."""
    peak_bits_per_second: float
    """That the busiest worker sends while something is on the link."""
    in_flight: int
    """Fragments under way at once, at most."""

    @property
    def mean_bits_per_second(self) -> float:
        """That the busiest worker sends, over all time."""
        return 8 * self.sent_bytes_per_step / self.step_seconds


def predict(
    payloads: Sequence[Payload],
    schedule: "Schedule",
    conditions: Conditions,
    steps: int | None = None,
) -> Prediction:
    """`payloads`: what the exchange of each fragment moves. `steps`: length of a run, which begins with `sync_every` steps
    without an exchange and ends when all is back; None: the steady state in the middle of a long one."""
    assert len(payloads) == schedule.fragments
    horizon = (
        ROUNDS * schedule.sync_every
        if steps is None
        else min(steps, MOST_ROUNDS * schedule.sync_every)
    )
    events = list(_events(schedule, None if steps is None else horizon))
    counted = sum(is_send for _, is_send, _ in events)
    total_steps, sends = (
        (horizon, counted) if steps is None else (steps, _sends_until(schedule, steps))
    )
    waited, in_flight = _waiting(payloads, events, conditions)
    exposed = waited / total_steps * (sends / counted if counted else 1.0)
    sent = np.zeros(conditions.workers)
    for _, is_send, fragment in events:
        if is_send:
            sent += payloads[fragment].sent
    compute = conditions.mean_step_seconds
    return Prediction(
        utilisation=compute / (compute + exposed),
        step_seconds=compute + exposed,
        exposed_seconds_per_step=exposed,
        sent_bytes_per_step=float(sent.max()) * (sends / counted if counted else 0.0) / total_steps,
        peak_bits_per_second=max(payload.peak_bits_per_second(conditions) for payload in payloads),
        in_flight=in_flight,
    )


def all_reduce_bytes(parameters: float, workers: int) -> float:
    """That one worker sends in a ring all-reduce of all gradients."""
    return 2 * (workers - 1) / workers * GRADIENT_BYTES * parameters


def predict_data_parallel(buckets: Sequence[int], conditions: Conditions) -> Prediction:
    """The control: a ring all-reduce of all gradients at every step. `buckets`: parameters of each, in the order in which the
    backward pass has them ready, which is spread evenly over the last two thirds of the step. The optimizer waits for all of
    them, one follows the other on the ring, and each takes 2 (M - 1) messages."""
    workers, links = conditions.workers, conditions.links
    sent = all_reduce_bytes(sum(buckets), workers)
    compute = conditions.mean_step_seconds
    link_free = link_seconds = 0.0
    for number, parameters in enumerate(buckets, start=1):
        ready = compute * (1 / 3 + 2 / 3 * number / len(buckets))
        on_link = 8 * all_reduce_bytes(parameters, workers) / links.slowest
        link_seconds += on_link
        link_free = max(link_free, ready) + on_link + 2 * (workers - 1) * links.latency_seconds
    slowest = _step_times(conditions, JITTERED_STEPS if conditions.jitter else 1).max(axis=0).mean()
    exposed = (max(link_free, compute) - compute if workers > 1 else 0.0) + max(
        0.0, float(slowest) - compute
    )
    return Prediction(
        utilisation=compute / (compute + exposed),
        step_seconds=compute + exposed,
        exposed_seconds_per_step=exposed,
        sent_bytes_per_step=sent,
        peak_bits_per_second=8 * sent / link_seconds
        if link_seconds
        else (math.inf if sent else 0.0),
        in_flight=min(1, workers - 1),
    )


def least_bandwidth_factor(utilisation_at: Callable[[float], float], wanted: float) -> float | None:
    """What all bandwidths have to be multiplied with so that `wanted` is reached, within half a percent; None where no
    bandwidth is enough, as latency, coding or uneven steps stand in the way. `utilisation_at` grows with its argument."""
    low, high = 1e-6, 1e6
    if utilisation_at(high) < wanted:
        return None
    if utilisation_at(low) >= wanted:
        return low
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilisation_at(middle) >= wanted else (middle, high)
    return high


Event = tuple[int, bool, int]
"""Inner step, whether the fragment is sent after it or applied, fragment."""


def _events(schedule: "Schedule", steps: int | None) -> Iterator[Event]:
    """In the order in which a worker does them: after a step applies come first, unless they are those of what was sent after
    the same step. What is in flight at the end of a run is waited for there."""
    found: list[tuple[int, int, Event]] = []
    for fragment in range(schedule.fragments):
        first = schedule.first_send(fragment)
        last = first + ROUNDS * schedule.sync_every - 1 if steps is None else steps
        for sent in range(first, last + 1, schedule.sync_every):
            applied = sent + schedule.delay if steps is None else min(sent + schedule.delay, steps)
            at_end = applied < sent + schedule.delay or not schedule.delay
            found.append((sent, 1, (sent, True, fragment)))
            found.append((applied, 2 if at_end else 0, (applied, False, fragment)))
    for _, _, event in sorted(found, key=lambda one: one[:2]):
        yield event


def _sends_until(schedule: "Schedule", steps: int) -> int:
    return sum(schedule.outer_round(fragment, steps) for fragment in range(schedule.fragments))


def _waiting(
    payloads: Sequence[Payload], events: Sequence[Event], conditions: Conditions
) -> tuple[float, int]:
    """Seconds that a worker's training waits through all events, mean over workers; most fragments under way."""
    lengths = [payload.seconds(conditions) for payload in payloads]
    computed = _computed(conditions, events[-1][0] if events else 0)
    waited = np.zeros(conditions.workers)
    thread_free = 0.0
    ready: dict[int, float] = {}
    most = 0
    for step, is_send, fragment in events:
        now = computed[:, step] + waited
        if is_send:
            thread_free = max(thread_free, float(now.max())) + lengths[fragment]
            ready[fragment] = thread_free
            most = max(most, len(ready))
        else:
            waited += np.maximum(0.0, ready.pop(fragment) - now)
    return float(waited.mean()), most


def _computed(conditions: Conditions, steps: int) -> Array:
    """Seconds of compute behind each worker after each step, [workers, steps + 1]."""
    times = _step_times(conditions, steps)
    return np.concatenate([np.zeros((conditions.workers, 1)), times.cumsum(axis=1)], axis=1)


def _step_times(conditions: Conditions, steps: int) -> Array:
    means = np.array(conditions.step_seconds)[:, None]
    if not conditions.jitter:
        return np.broadcast_to(means, (conditions.workers, steps))
    factors = (
        1
        + conditions.jitter
        * np.random.default_rng(JITTER_SEED).standard_normal((steps, conditions.workers)).T
    )
    return np.asarray(means * factors.clip(min=0.1))
