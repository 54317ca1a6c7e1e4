"""Rounds tell a slow worker from a slow link, over real links: three network namespaces."""

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from tests.network import network_of, processes_in
from tests.processes import PATIENCE
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.distributed.world import WORKER

WORKERS = 3
VALUES = 300_000
ROUNDS = 4
LATE_SECONDS = 1.0
FAST, SLOW = 80.0, 6.0
"""Mbit/s."""
CULPRIT, NOBODY = 2, -1

Seen = dict[tuple[int, int], tuple[float, float]]
"""(worker, other) -> seconds until the other was heard, and its bits per second; medians."""


def run_worker(second_part: Path) -> None:
    """Print when this worker hears the others, and how fast they send: a line of JSON each time.

    Runs in a network namespace of its own, as a rank. In the second part the culprit is late to
    every round; it begins when its file exists.
    """
    world = join(WORKERS)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(VALUES))})
    chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec="int8"))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    for late_worker in (NOBODY, CULPRIT):
        while late_worker != NOBODY and not second_part.exists():
            time.sleep(0.05)
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
        print(json.dumps(found), flush=True)


def seen_in(lines: list[str]) -> Seen:
    """Return what the workers have printed, one line each."""
    seen: Seen = {}
    for worker, line in enumerate(lines):
        for other, values in json.loads(line).items():
            heard_after, rates = map(statistics.median, zip(*values, strict=True))
            seen[worker, int(other)] = heard_after, rates
    return seen


def run_both_parts(folder: Path) -> tuple[Seen, Seen]:
    """Return what is seen behind a slow link without a late worker, and the other way round."""
    second_part = folder / "second part"
    logs = [folder / f"worker-{worker}.txt" for worker in range(WORKERS)]

    def found(part: int) -> list[str]:
        texts = [log.read_text() for log in logs if log.exists()]
        lines = [[one for one in text.splitlines() if one[:1] == "{"] for text in texts]
        return [one[part] for one in lines if len(one) > part]

    with (
        network_of(WORKERS, up=FAST, down=FAST) as network,
        processes_in(network, logs, run_worker, second_part) as programs,
    ):
        network.set_rate(CULPRIT, up=SLOW, down=FAST)
        deadline = time.monotonic() + PATIENCE
        while len(found(0)) < WORKERS:
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.05)
        network.set_rate(CULPRIT, up=FAST, down=FAST)
        second_part.touch()
        for program in programs:
            program.join(PATIENCE)
        codes = [program.exitcode for program in programs]
    assert codes == [0] * WORKERS, [log.read_text() for log in logs]
    return seen_in(found(0)), seen_in(found(1))


def rate(seen: Seen, source: int) -> float:
    """Return the rate to the worker that gets most. What goes to one with a slow uplink is held up
    as well, as the acknowledgements come back through it."""
    return max(bits for (_, other), (_, bits) in seen.items() if other == source)


def waited_for(seen: Seen) -> set[int]:
    return {other for (_, other), (seconds, _) in seen.items() if seconds > LATE_SECONDS / 2}


def test_a_slow_link_and_a_slow_worker_are_told_apart(tmp_path: Path) -> None:
    throttled, late = run_both_parts(tmp_path)
    bucket = 1.2 * SLOW * 1e6
    assert rate(throttled, CULPRIT) < bucket < min(rate(throttled, 0), rate(throttled, 1))
    assert waited_for(throttled) == set()
    assert waited_for(late) == {CULPRIT}
    assert rate(late, CULPRIT) > bucket
