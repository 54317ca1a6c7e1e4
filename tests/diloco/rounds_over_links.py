"""Worker of test_slow_links.py: some rounds, after which worker 0 prints the records as JSON.

The worker whose number is given is late to every round.
"""

import json
import sys
import time

import torch
from torch import nn

from torchtitan_diloco.components.round_records import PendingRounds
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, Overlap, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.distributed.world import WORKER, join_world

WORKERS = 3
VALUES = 300_000
ROUNDS = 4
LATE_SECONDS = 1.0


def main(late_worker: int) -> None:
    world = join_world(Distributed(), Link(), device="cpu", workers=WORKERS, fsdp=0)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(VALUES))})
    chosen = DiLoCoConfig(
        sync_every=1,
        fragments=Fragments(layers_per_fragment=0),
        overlap=Overlap(delay=0),
        quantization=Quantization(codec="int8"),
    )
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    for _ in range(ROUNDS):
        with torch.no_grad():
            model["weight"].add_(0.01 * torch.randn(VALUES))
        if world.worker == late_worker:
            time.sleep(LATE_SECONDS)
        outer.step()
    records = PendingRounds(
        world, outer.rounds(), outer.fragment_names, clock_start=0.0, where=""
    ).records()
    if world.is_first:
        print(json.dumps(records))


if __name__ == "__main__":
    main(int(sys.argv[1]))
