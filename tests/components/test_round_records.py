"""Who came last, shares of time, what the planner is told: pure functions of what ranks measure."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.components.reports import peak_bits_per_second
from torchtitan_diloco.components.round_records import ahead_of_last
from torchtitan_diloco.components.step_time import SHARES, TimedIterator, time_shares
from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo, Overlap
from torchtitan_diloco.diloco.round import Traffic
from torchtitan_diloco.planner.utilisation import Observed, measured_utilisation, worker_key

SECONDS = st.floats(0, 100)


@given(st.lists(SECONDS, min_size=2, max_size=6), st.floats(0, 1))
def test_the_last_is_who_waited_least(arrivals: list[float], latency: float) -> None:
    """A wait is the difference of two moments on a worker's own clock, so clocks need not agree."""
    last = max(arrivals)
    ahead = ahead_of_last([last + latency - arrival for arrival in arrivals])
    for arrival, seconds in zip(arrivals, ahead, strict=True):
        assert seconds == pytest.approx(last - arrival, abs=1e-6)
    assert min(seconds for seconds in ahead if seconds is not None) == 0.0


def test_where_nobody_waited_nobody_is_last() -> None:
    assert ahead_of_last([None]) == [None]
    assert ahead_of_last([None, 0.3, None]) == [None, None, None]


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_shares_are_a_whole(compute: float, data: float, exposed: float, other: float) -> None:
    steps = compute + data + exposed
    shares = time_shares(wall=steps + other + 1e-3, steps=steps, data=data, exposed=exposed)
    assert tuple(shares) == SHARES
    known = [share for share in shares.values() if share is not None]
    assert math.fsum(known) == pytest.approx(100, abs=1e-6)
    assert time_shares(wall=1.0, steps=1.0, data=0.0, exposed=None)["exposed_communication"] is None


def test_what_a_batch_of_messages_cannot_tell_is_unknown() -> None:
    """NCCL tells of all other workers at once: no moment is one worker's, and no link is known, nor guessed to be fast."""
    apart = Traffic(header_sent=1.0, heard={1: 2.0}, link_until={1: 3.0})
    together = replace(apart, moments_are_known=False)
    assert (apart.heard_after(1), apart.link_seconds(1)) == (1.0, 1.0)
    assert math.isnan(together.heard_after(1))
    assert math.isnan(together.link_seconds(1))
    observed = Observed(2, 1)
    observed.add(record(0, rate=1e6))
    assert observed.conditions(DiLoCo(workers=2), totals(0.1)) is not None
    unheard = Observed(2, 1)
    silent = record(0, rate=1e6)
    for worker in silent["workers"]:
        worker |= {
            "heard_after_seconds": [None, None],
            "received_bits_per_second_from": [None, None],
        }
    unheard.add(silent)
    assert unheard.conditions(DiLoCo(workers=2), totals(0.1)) is None


def test_waiting_for_data_is_counted_to_the_end() -> None:
    batches = TimedIterator(iter([1, 2]))
    assert list(batches) == [1, 2]
    assert batches.take_seconds() > 0
    assert batches.take_seconds() == 0


def record(fragment: int, *, rate: float, exchange: float = 0.1) -> dict[str, Any]:
    """Of two workers that receive from each other at this rate."""

    def worker(number: int) -> dict[str, Any]:
        return {
            "received_bits_per_second_from": [
                None if other == number else rate for other in range(2)
            ],
            "heard_after_seconds": [None if other == number else 0.001 for other in range(2)],
            "encoding_seconds": 0.001,
            "decoding_seconds": 0.001,
            "ready_at_seconds": 1.0 + exchange,
            "received_at_seconds": 1.0,
            "sent_bytes": 500_000,
            "received_bytes": 400_000,
            "transfer_seconds": 0.5,
        }

    return {"fragment": fragment, "parameters": 1_000_000, "workers": [worker(0), worker(1)]}


def totals(step_seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for worker in range(2):
        values = {"steps": 10.0, "seconds": 10 * step_seconds, "squares": 10 * step_seconds**2}
        found |= {worker_key(worker, name): value for name, value in values.items()}
    return found


def test_the_peak_is_that_of_the_busier_direction() -> None:
    assert peak_bits_per_second(record(0, rate=1e9)) == 8_000_000


def test_a_faster_link_never_makes_the_prediction_worse() -> None:
    config = DiLoCo(workers=2, sync_every=10, overlap=Overlap(delay=1))
    found = []
    for rate in (1e6, 1e7, 1e8, 1e9):
        observed = Observed(2, 1)
        for fragment in (0, 1):
            observed.add(record(fragment, rate=rate, exchange=1e-3))
        assert observed.links().up == observed.links().down == (rate, rate)
        utilisation = observed.predicted_utilisation(config, totals(0.5), steps=200)
        assert utilisation is not None
        found.append(utilisation)
    assert found == sorted(found)
    assert found[0] < 0.5 < 0.99 < found[-1]


def test_what_is_not_known_is_not_predicted() -> None:
    config = DiLoCo(workers=2)
    observed = Observed(2, 1)
    assert observed.predicted_utilisation(config, totals(0.5), 100) is None, "no round yet"
    observed.add(record(1, rate=1e8))
    assert observed.predicted_utilisation(config, totals(0.5), 100) is None, (
        "fragment 0 never had its turn"
    )
    observed.add(record(0, rate=1e8))
    assert observed.predicted_utilisation(config, {}, 100) is None, "no step times"
    assert measured_utilisation({}) is None
    assert measured_utilisation({"time/step_seconds": 10.0, "diloco/exposed_seconds": 1.0}) == 0.9
