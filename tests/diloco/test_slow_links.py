"""Round records tell a slow worker from a slow link, over links between three namespaces."""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import Network, NoNetworkError
from tests.conftest import REPOSITORY
from tests.diloco.rounds_over_links import LATE_SECONDS, ROUNDS, WORKERS

FAST, SLOW = 80.0, 6.0
"""Mbit/s."""
CULPRIT = 2
NOBODY = -1


def rounds(folder: Path, up: list[float], late_worker: int) -> list[dict[str, Any]]:
    """Return the records of all rounds but the first, in which connections and memory are cold."""
    try:
        with Network(WORKERS, up=up, down=FAST) as network:
            programs = []
            for worker in range(WORKERS):
                variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
                command = [sys.executable, "-m", "tests.diloco.rounds_over_links", str(late_worker)]
                output = (folder / f"worker-{worker}.txt").open("w")
                programs.append(network.start(worker, command, variables, output))
            codes = [program.wait(120) for program in programs]
    except NoNetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    text = (folder / "worker-0.txt").read_text()
    assert codes == [0] * WORKERS, text
    found: list[dict[str, Any]] = json.loads(text.splitlines()[-1])
    assert len(found) == ROUNDS
    return found[1:]


def rate(records: list[dict[str, Any]], source: int) -> float:
    """Return the median rate at which a worker sends to the one that receives fastest.

    What goes to a worker with a throttled uplink is slow as well, because the acknowledgements
    come back through it.
    """
    best: list[float] = []
    for record in records:
        receivers = [
            worker["received_bits_per_second_from"][source] for worker in record["workers"]
        ]
        best.append(max(found for found in receivers if found is not None))
    return statistics.median(best)


def ahead(records: list[dict[str, Any]], worker: int) -> float:
    seconds: list[float] = [
        record["workers"][worker]["ahead_of_last_seconds"] for record in records
    ]
    return statistics.median(seconds)


def test_a_throttled_link_is_slow_and_nobody_is_late(tmp_path: Path) -> None:
    up = [SLOW if worker == CULPRIT else FAST for worker in range(WORKERS)]
    found = rounds(tmp_path, up, NOBODY)
    others = [rate(found, worker) for worker in range(WORKERS) if worker != CULPRIT]
    assert rate(found, CULPRIT) < min(others) / 3
    assert rate(found, CULPRIT) < 1.2 * SLOW * 1e6, "not faster than its bucket lets it be"
    assert all(ahead(found, worker) < LATE_SECONDS / 2 for worker in range(WORKERS))


def test_a_slow_worker_is_late_and_its_link_is_not_slow(tmp_path: Path) -> None:
    found = rounds(tmp_path, [FAST] * WORKERS, CULPRIT)
    assert [record["last_worker"] for record in found] == [CULPRIT] * len(found)
    assert all(record["late_by_seconds"] > LATE_SECONDS / 2 for record in found)
    assert all(
        ahead(found, worker) > LATE_SECONDS / 2 for worker in range(WORKERS) if worker != CULPRIT
    )
    others = [rate(found, worker) for worker in range(WORKERS) if worker != CULPRIT]
    assert rate(found, CULPRIT) > min(others) / 3
