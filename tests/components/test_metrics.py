"""Totals merge records as their metrics are declared, and documentation is made from these."""

import math

import pytest

from tests.metrics_table import BEGIN, END, PAGE, table
from torchtitan_diloco.components.metrics import (
    CORPUS_BITS,
    CORPUS_LOSS,
    OVER_STEPS,
    add_totals,
    described,
    merge_totals,
)
from torchtitan_diloco.diloco.metrics import Merge

SENT = "worker/sent_bytes"
SPREAD = "worker/compute_spread"
LARGEST = "sync/largest_mean_delta"


def records() -> list[dict[str, object]]:
    """Return the records of one step, of three steps, and of a validation."""
    return [
        {"step": 1, "worker/steps": 1, SENT: 5.0, SPREAD: 0.0, LARGEST: 3.0, "train/lr": 1.0},
        {"step": 4, "worker/steps": 3, SENT: 7.0, SPREAD: 4.0, LARGEST: math.inf},
        {"step": 4, "loss/val": 2.0},
    ]


def test_totals_are_merged_as_declared() -> None:
    totals: dict[str, float] = {}
    for record in records():
        add_totals(totals, record)
    assert totals == {"worker/steps": 4, SENT: 12.0, SPREAD: 3.0, LARGEST: 3.0}
    assert OVER_STEPS[SPREAD] is Merge.MEAN


def test_totals_of_islands_are_those_of_as_many_steps() -> None:
    early = {"worker/steps": 10.0, SENT: 100.0, SPREAD: 1.0, LARGEST: 4.0}
    late = {"worker/steps": 5.0, SENT: 60.0, SPREAD: 2.0, LARGEST: 6.0}
    expected = {"worker/steps": 10.0, SENT: 110.0, SPREAD: 1.5, LARGEST: 6.0}
    assert merge_totals([early, late]) == expected
    assert merge_totals([early, {}]) == merge_totals([{}, early]) == early, "of those that know it"
    assert merge_totals([{"worker/steps": 10.0}, late]) == {
        **late,
        "worker/steps": 10.0,
        SENT: 120.0,
    }
    assert merge_totals([{}, {}]) == {}


@pytest.mark.parametrize(
    ("name", "workers", "whose"),
    [
        ("loss/train", 2, "; all workers"),
        ("loss/train", 1, "; this worker"),
        ("worker/steps", 2, "; this worker"),
        (f"{CORPUS_LOSS}data/web", 1, "; all workers"),
        (f"{CORPUS_BITS}data/web", 1, "; all workers"),
    ],
)
def test_a_board_says_whose_a_number_is(name: str, workers: int, whose: str) -> None:
    assert described(name, workers).endswith(whose)


def test_the_page_has_the_table_of_all_metrics() -> None:
    section = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert section == table(), "renew it: .venv/bin/python -m tests.metrics_table --write"
