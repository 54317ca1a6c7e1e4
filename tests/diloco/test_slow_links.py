"""Rounds tell a slow worker from a slow link, over real links: three network namespaces."""

import json
import os
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks.link import NoNetworkError
from benchmarks.network import Network
from tests.conftest import REPOSITORY
from tests.diloco.rounds_over_links import LATE_SECONDS, WORKERS

FAST, SLOW = 80.0, 6.0
"""Mbit/s."""
CULPRIT, NOBODY = 2, -1

Seen = dict[tuple[int, int], tuple[float, float]]
"""(worker, other) -> seconds until the other was heard, and its bits per second; medians."""


def rounds(folder: Path, up: list[float], late_worker: int) -> Seen:
    try:
        with Network(WORKERS, up=up, down=FAST) as network:
            programs = []
            for worker in range(WORKERS):
                variables = network.launch_variables(worker) | {
                    "RANK": str(worker),
                    "WORLD_SIZE": str(WORKERS),
                    "LOCAL_RANK": "0",
                    "MASTER_ADDR": network.address(0),
                    "MASTER_PORT": "29500",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(REPOSITORY),
                }
                command = [sys.executable, "-m", "tests.diloco.rounds_over_links", str(late_worker)]
                output = (folder / f"worker-{worker}.txt").open("w")
                programs.append(network.start(worker, command, os.environ | variables, output))
            codes = [program.wait(120) for program in programs]
    except NoNetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    texts = [(folder / f"worker-{worker}.txt").read_text() for worker in range(WORKERS)]
    assert codes == [0] * WORKERS, texts
    seen: Seen = {}
    for worker, text in enumerate(texts):
        for other, values in json.loads(text.splitlines()[-1]).items():
            heard_after, rates = map(statistics.median, zip(*values, strict=True))
            seen[worker, int(other)] = heard_after, rates
    return seen


def rate(seen: Seen, source: int) -> float:
    """Return the rate to the worker that gets most. What goes to one with a slow uplink is held up
    as well, as the acknowledgements come back through it."""
    return max(bits for (_, other), (_, bits) in seen.items() if other == source)


def waited_for(seen: Seen) -> set[int]:
    return {other for (_, other), (seconds, _) in seen.items() if seconds > LATE_SECONDS / 2}


def test_a_throttled_link_is_slow_and_nobody_is_late(tmp_path: Path) -> None:
    seen = rounds(tmp_path, [FAST, FAST, SLOW], NOBODY)
    assert rate(seen, CULPRIT) < min(rate(seen, 0), rate(seen, 1)) / 3
    assert rate(seen, CULPRIT) < 1.2 * SLOW * 1e6, "not faster than its bucket allows"
    assert waited_for(seen) == set()


def test_a_slow_worker_is_late_and_its_link_is_not_slow(tmp_path: Path) -> None:
    seen = rounds(tmp_path, [FAST] * WORKERS, CULPRIT)
    assert waited_for(seen) == {CULPRIT}
    assert rate(seen, CULPRIT) > min(rate(seen, 0), rate(seen, 1)) / 3
