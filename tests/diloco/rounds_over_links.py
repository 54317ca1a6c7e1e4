"""A worker of test_slow_links.py: prints as JSON what it knows of each other worker's arrivals.

Started in a network namespace for each worker, with a rank's environment. The worker given as
argument is late to every round.
"""

import json
import sys
import time
from dataclasses import replace

import torch
from torch import nn

from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.distributed.world import WORKER

WORKERS = 3
VALUES = 300_000
ROUNDS = 4
LATE_SECONDS = 1.0


def main(late_worker: int) -> None:
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
