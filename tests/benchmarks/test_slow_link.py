"""What `benchmarks.slow_link` makes of runs: checked on runs that are made up, whose numbers are known."""

import math

import pytest

from benchmarks.slow_link import Row, Table, conclusions, expected_seconds, rate_of, rate_of_a_tenth
from benchmarks.slow_link_runs import (
    DATA_PARALLEL,
    LATE,
    OURS,
    SAMPLE_SECONDS,
    TORCHFT,
    Experiment,
    Measured,
    Seen,
    Window,
    length_of_data_parallel,
    summarise,
)

TOKENS, BYTES, SYNC_EVERY = 512, 40_000, 20


def made_up(steps: int, every: int, seconds: float, late: int) -> Seen:
    """Worker 1 sends twice as much as worker 0, the same at every step; records come `late` steps late, the last at once."""
    samples = math.ceil(steps * seconds / SAMPLE_SECONDS) + 1
    times = [number * SAMPLE_SECONDS for number in range(samples + 1)]
    sent = [[round(time / seconds * BYTES * (1 + worker)) for worker in range(2)] for time in times]
    records = []
    for step in range(1, steps + 1):
        if step == 1 or step % every == 0 or step == steps:
            comes = min(step + late, steps) * seconds
            record = {
                "step": step,
                "speed/seconds_per_step": seconds,
                "speed/tokens_per_second_global": TOKENS / seconds,
            }
            records.append((math.ceil(comes / SAMPLE_SECONDS), record))
    return Seen(times, sent, records)


@pytest.mark.parametrize("cycles", [1, 3])
def test_whole_cycles_after_the_first_are_measured(cycles: int) -> None:
    experiment = Experiment(2, SYNC_EVERY, cycles, 3, {})
    seen = made_up(experiment.steps, SYNC_EVERY // 2, 0.2, LATE)
    for _, record in seen.records:
        record["diloco/exposed_seconds_mean_over_ranks"] = 0.5  # of half a cycle
    measured = summarise(seen, SYNC_EVERY, data_parallel=False)
    assert [window.steps for window in measured.windows] == [SYNC_EVERY] * cycles
    for window in measured.windows:
        assert window.tokens_per_second == pytest.approx(TOKENS / 0.2)
        assert window.exposed_seconds == pytest.approx(2 * 0.5 / SYNC_EVERY)
    assert measured.alone == pytest.approx(TOKENS / 0.2)
    assert measured.sent_per_step == pytest.approx(1.5 * BYTES, rel=0.01), (
        "the mean of the two workers"
    )
    assert measured.peak_mbit == pytest.approx(2 * BYTES * 8e-6 / 0.2, rel=0.01), (
        "the worker that sends most"
    )


@pytest.mark.parametrize("seconds", [0.2, 3.0, 70.0])
def test_data_parallelism_is_measured_after_the_link_has_become_slow(seconds: float) -> None:
    length = length_of_data_parallel(seconds)
    measured = summarise(
        made_up(length.steps, length.every, seconds, 1), SYNC_EVERY, data_parallel=True
    )
    assert len(measured.windows) >= 2
    assert {window.steps for window in measured.windows} == {length.every}
    assert measured.alone is None
    assert measured.sent_per_step == pytest.approx(1.5 * BYTES, rel=0.01)


def test_at_the_rate_of_a_tenth_a_step_of_data_parallelism_takes_ten_times_as_long() -> None:
    def free(method: str, seconds: float, sent: float) -> Row:
        return Row(
            method,
            math.inf,
            [Measured([Window(10, seconds, TOKENS / seconds, None)], None, sent, 0.0)],
        )

    table = Table(
        Experiment(2, 100, 1, 5, {}), [free(DATA_PARALLEL, 0.15, 2e7), free(OURS, 0.1, 3e4)]
    )
    assert expected_seconds(rate_of_a_tenth(table), table) == pytest.approx(10 * 0.1)
    assert rate_of("2x", table) == pytest.approx(2 * rate_of_a_tenth(table), rel=0.05)
    assert (rate_of("inf", table), rate_of("2.5", table)) == (math.inf, 2.5)
    assert table.references() == [TOKENS / 0.1], "the fastest"
    assert table.utilisation(DATA_PARALLEL, math.inf) == pytest.approx(100 * 0.1 / 0.15)


def test_nothing_is_concluded_that_was_not_measured() -> None:
    def row(method: str, rate: float, *seconds: float) -> Row:
        return Row(
            method,
            rate,
            [Measured([Window(10, one, TOKENS / one, None)], None, 1e5, 0.0) for one in seconds],
        )

    free = [
        row(DATA_PARALLEL, math.inf, 0.15, 0.15),
        row(OURS, math.inf, 0.1, 0.11),
        row(TORCHFT, math.inf, 0.105, 0.105),
    ]
    text = "\n".join(conclusions(Table(Experiment(2, 100, 1, 5, {}), free)))
    assert "10 % utilisation" not in text
    assert "ahead at 0, behind at 0, no difference beyond the spread at 1" in text
    slow = [
        row(DATA_PARALLEL, 100.0, 1.5, 1.5),
        row(OURS, 100.0, 0.1, 0.11),
        row(TORCHFT, 100.0, 0.2, 0.2),
    ]
    text = "\n".join(conclusions(Table(Experiment(2, 100, 1, 5, {}), free + slow)))
    assert "ahead at 1, behind at 0, no difference beyond the spread at 1" in text
    assert "at 100 Mbit/s, where it has" in text
