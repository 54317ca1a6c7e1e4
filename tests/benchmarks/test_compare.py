"""Test what is read from the output of `compare`, and which runs it is checked against."""

from dataclasses import replace

import pytest

from benchmarks import core
from benchmarks.compare import (
    ALONE,
    OWN,
    Checked,
    length,
    link_of,
    mean,
    predict_again,
    predictions,
    rows_of,
    settings_of,
)
from benchmarks.slow_link import COMMON
from torchtitan_diloco.launching.preflight import vocabulary_rows_of
from torchtitan_diloco.machines.comparison import Row, compare, table
from torchtitan_diloco.planner.prediction import Conditions, Workload

PLAIN = COMMON | {"diloco.method": "streaming"} | OWN
CONFIG = core.load(PLAIN)
LOAD = Workload.of(CONFIG, vocabulary_rows_of(CONFIG))
SLOW = Conditions(
    13e6,
    (0.1, 0.1),
    latency_seconds=20e-6 / 2,
    backward_waits=True,
    all_reduce_bits_per_second=12e6,
)
ROWS = compare(LOAD, SLOW, CONFIG.diloco, ["10.0.0.1", "10.0.0.2"])
PRINTED = f"""
10.0.0.1: CPU; a step in 100.0 ms +- 0.0 ms (100 steps)
link: round trip 20 us; 13 Mbit/s with 1 TCP stream, ...; 12 Mbit/s in an all-reduce

{table(LOAD, ROWS, ROWS[-1])}

the row with * makes
"""


def test_what_compare_prints_is_read() -> None:
    found = predictions(PRINTED)
    assert list(found) == [row.name for row in ROWS]
    for row in ROWS:
        assert found[row.name] == pytest.approx(row.tokens_per_second, abs=0.5)
    link = link_of(PRINTED)
    assert replace(SLOW, step_seconds=link.step_seconds) == replace(
        link, latency_seconds=SLOW.latency_seconds
    )
    assert link.latency_seconds == pytest.approx(SLOW.latency_seconds)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_run_has_the_settings_of_its_row_and_is_predicted_alike(row: Row) -> None:
    settings = settings_of(row.name, PLAIN)
    diloco = core.load(settings).diloco
    if row.diloco.method == "none":
        assert (diloco.method, diloco.workers) == (row.diloco.method, row.diloco.workers)
    else:
        assert diloco == row.diloco
    steps = [[{"worker/compute_seconds": 0.1, "worker/wall_seconds": 0.1}] * 9] * 2
    again = predict_again(settings, link_of(PRINTED), steps)
    assert again == pytest.approx(row.tokens_per_second, rel=1e-3)


def test_a_cycle_passes_before_the_measured_steps() -> None:
    assert length(settings_of("streaming, H 30, tau 1", PLAIN), 13.0) == (30, 60)
    assert length(settings_of("streaming, 4 bits, H 120, tau 10", PLAIN), 13.0) == (120, 240)
    assert length(settings_of("data parallelism", PLAIN), 13.0) == (1, 4)
    assert length(settings_of("10.0.0.1 alone", PLAIN), 13.0) == (10, 60)


def test_means_and_rows() -> None:
    assert mean([{"a": 1.0}, {"b": 7.0}, {"a": 3.0}], "a") == 2.0
    rows = rows_of({(13.0, ALONE): [Checked(90, 100, 110, 60), Checked(100, 100, 100, 60)]})
    ratios = ["0.95 (0.90 ... 1.00)", "1.05 (1.00 ... 1.10)"]
    assert rows == [["13", "alone", "95 (90 ... 100)", "100", *ratios, "2 (60)"]]
