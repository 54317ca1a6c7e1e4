"""Test the results of synthetic runs, whose numbers are known."""

import math

import pytest

from benchmarks.slow_link import (
    DATA_PARALLEL,
    HALF_GRADIENTS,
    OURS,
    Measured,
    cycle_of,
    references,
    run_length,
    summarize,
    utilizations,
)

TOKENS = 512
BYTES = 40_000


@pytest.mark.parametrize(
    ("method", "rate", "exposed"),
    [
        (OURS, 13.0, 0.5),  # seconds exposed, between two records
        (DATA_PARALLEL, 13.0, None),
        (DATA_PARALLEL, math.inf, None),
        (HALF_GRADIENTS, 13.0, None),
    ],
)
def test_the_cycle_after_the_first_is_measured(
    method: str, rate: float, exposed: float | None
) -> None:
    """The first cycle is slower, and sends more."""
    cycle = cycle_of(method, rate)
    length = run_length(cycle)
    moment = 100.0
    sent = 0
    samples = [(moment, sent)]
    records = []
    for step in range(1, int(length["training.steps"]) + 1):
        seconds = 0.2 if step > cycle else 0.9
        moment = moment + seconds
        sent = sent + 2 * BYTES * (1 if step > cycle else 3)
        samples += [(moment - 0.01, sent - 100), (moment, sent)]
        if step % int(length["metrics.log_every"]) == 0:
            speed = {"speed/seconds_per_step": seconds, "speed/tokens_per_second": TOKENS / seconds}
            records.append({"step": step, "time": moment} | speed)
            records[-1] |= {} if exposed is None else {"worker/exposed_seconds": exposed}
    measured = summarize(records, samples, 2, cycle)
    assert measured.steps == cycle
    assert measured.seconds_per_step == pytest.approx(0.2)
    assert measured.tokens_per_second == pytest.approx(TOKENS / 0.2)
    assert measured.exposed_seconds == (exposed and pytest.approx(2 * exposed / cycle))
    assert measured.sent_per_step == pytest.approx(BYTES), "mean over workers"


def runs(*seconds: float, sent: float = 1e5) -> list[Measured]:
    return [Measured(10, one, TOKENS / one, None, sent) for one in seconds]


def test_utilization_is_relative_to_the_fastest_without_a_limit() -> None:
    table = {
        (math.inf, DATA_PARALLEL): runs(0.15, 0.1),
        (math.inf, OURS): runs(0.1, 0.2),
        (13.0, OURS): runs(0.4, 0.4),
    }
    assert references(table) == [TOKENS / 0.1, TOKENS / 0.1]
    assert utilizations(table, math.inf, DATA_PARALLEL) == pytest.approx([0.1 / 0.15, 1.0])
    assert utilizations(table, 13.0, OURS) == pytest.approx([0.25, 0.25])
