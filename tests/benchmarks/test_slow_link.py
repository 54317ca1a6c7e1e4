"""Test the results of synthetic runs, whose numbers are known."""

import math

import pytest

from benchmarks.slow_link import (
    DATA_PARALLEL,
    LATE,
    OURS,
    Measured,
    Samples,
    cycle_of,
    references,
    run_length,
    summarise,
    utilisations,
)

TOKENS, BYTES = 512, 40_000
EXPOSED = "worker/exposed_seconds"


def made_up(length: dict[str, str], seconds: float, late: int, exposed: float | None) -> Samples:
    """Return a run of two workers, whose records come `late` steps late, except for the last."""
    steps, every = int(length["training.steps"]), int(length["metrics.log_every"])
    samples = Samples()
    for step in sorted({1, steps, *range(every, steps, every)}):
        record = {
            "step": step,
            "speed/seconds_per_step": seconds,
            "speed/tokens_per_second": TOKENS / seconds,
        }
        samples.records.append(record if exposed is None else record | {EXPOSED: exposed})
        samples.sent.append(2 * BYTES * min(step + late, steps))
    return samples


@pytest.mark.parametrize(
    ("method", "rate", "late", "exposed"),
    [
        (OURS, 13.0, LATE, 0.5),  # seconds exposed, between two records
        (DATA_PARALLEL, 13.0, 1, None),
        (DATA_PARALLEL, math.inf, LATE, None),
    ],
)
def test_the_cycle_after_the_first_is_measured(
    method: str, rate: float, late: int, exposed: float | None
) -> None:
    cycle = cycle_of(method, rate)
    measured = summarise(made_up(run_length(cycle), 0.2, late, exposed), 2, cycle)
    assert measured.steps == cycle
    assert measured.seconds_per_step == pytest.approx(0.2)
    assert measured.tokens_per_second == pytest.approx(TOKENS / 0.2)
    assert measured.exposed_seconds == (exposed and pytest.approx(2 * exposed / cycle))
    assert measured.sent_per_step == pytest.approx(BYTES), "mean over workers"


def runs(*seconds: float, sent: float = 1e5) -> list[Measured]:
    return [Measured(10, one, TOKENS / one, None, sent) for one in seconds]


def test_utilisation_is_relative_to_the_fastest_without_a_limit() -> None:
    table = {
        (math.inf, DATA_PARALLEL): runs(0.15, 0.1),
        (math.inf, OURS): runs(0.1, 0.2),
        (13.0, OURS): runs(0.4, 0.4),
    }
    assert references(table) == [TOKENS / 0.1, TOKENS / 0.1]
    assert utilisations(table, math.inf, DATA_PARALLEL) == pytest.approx([0.1 / 0.15, 1.0])
    assert utilisations(table, 13.0, OURS) == pytest.approx([0.25, 0.25])
