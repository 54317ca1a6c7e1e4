"""Rounds tell a slow worker from a slow link, over real links: three network namespaces."""

import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.network import Network, NoNetworkError
from tests.conftest import REPOSITORY
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.distributed.world import WORKER

MODULE = "tests.diloco.test_slow_links"
WORKERS = 3
VALUES = 300_000
ROUNDS = 4
LATE_SECONDS = 1.0
FAST, SLOW = 80.0, 6.0
"""Mbit/s."""
CULPRIT, NOBODY = 2, -1

Seen = dict[tuple[int, int], tuple[float, float]]
"""(worker, other) -> seconds until the other was heard, and its bits per second; medians."""


def run_worker(late_worker: int) -> None:
    """Print as JSON when this worker hears the others, and how fast they send.

    Runs in a network namespace of its own, as a rank. The late worker is late to every round.
    """
    world = join(WORKERS)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(VALUES))})
    chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec="int8"))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    for _ in range(ROUNDS):
        with torch.no_grad():
            model["weight"].add_(0.01 * torch.randn(VALUES))
        if world.worker == late_worker:
            time.sleep(LATE_SECONDS)
        outer.step()
    traffic = [round_.traffic for round_ in outer.rounds()]
    found = {
        other: [
            [one.heard_after(other), 8 * one.link_bytes[other] / one.link_seconds(other)]
            for one in traffic[1:]  # the first finds connections and memory cold
        ]
        for other in traffic[0].heard
    }
    print(json.dumps(found))


def rounds(folder: Path, up: list[float], late_worker: int) -> Seen:
    try:
        with Network(WORKERS, up=up, down=FAST) as network:
            programs = []
            for worker in range(WORKERS):
                variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
                command = [sys.executable, "-m", MODULE, str(late_worker)]
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


if __name__ == "__main__":
    run_worker(int(sys.argv[1]))
