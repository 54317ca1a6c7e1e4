"""Test the results of synthetic runs, whose numbers are known."""

import math

import pytest

from benchmarks.slow_link import (
    DATA_PARALLEL,
    LATE,
    OURS,
    Measured,
    Samples,
    Table,
    run_length,
    summarise,
)

TOKENS, BYTES, SYNC_EVERY = 512, 40_000, 20
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


def test_the_cycle_after_the_first_is_measured() -> None:
    length = run_length(SYNC_EVERY, 3, limited=True)
    half_a_cycle = 0.5  # seconds exposed, between two records
    measured = summarise(made_up(length, 0.2, LATE, half_a_cycle), 2, SYNC_EVERY)
    assert measured.steps == SYNC_EVERY
    assert measured.tokens_per_second == pytest.approx(TOKENS / 0.2)
    assert measured.exposed_seconds == pytest.approx(2 * half_a_cycle / SYNC_EVERY)
    assert measured.sent_per_step == pytest.approx(BYTES), "mean over workers"


@pytest.mark.parametrize(("seconds", "limited"), [(0.2, False), (3.0, True)])
def test_data_parallelism_is_measured_after_the_link_became_slow(
    seconds: float, limited: bool
) -> None:
    length = run_length(None, 3, limited=limited)
    measured = summarise(made_up(length, seconds, 1, None), 2, None)
    assert measured.steps >= 2
    assert measured.seconds_per_step == pytest.approx(seconds)
    assert measured.sent_per_step == pytest.approx(BYTES)


def runs(*seconds: float, sent: float = 1e5) -> list[Measured]:
    return [Measured(10, one, TOKENS / one, None, sent) for one in seconds]


def test_utilisation_is_relative_to_the_fastest_without_a_limit() -> None:
    table = Table(
        {
            (math.inf, DATA_PARALLEL): runs(0.15, 0.1),
            (math.inf, OURS): runs(0.1, 0.2),
            (13.0, OURS): runs(0.4, 0.4),
        }
    )
    assert table.references() == [TOKENS / 0.1, TOKENS / 0.1]
    assert table.utilisations(math.inf, DATA_PARALLEL) == pytest.approx([0.1 / 0.15, 1.0])
    assert table.utilisations(13.0, OURS) == pytest.approx([0.25, 0.25])
