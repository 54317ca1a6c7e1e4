"""Programs of `benchmarks.islands --torchft`: a worker of torchft, and the lighthouse.

    .venv/bin/python -m benchmarks.islands_torchft island '{"join": ..., "name": ..., ...}'
    .venv/bin/python -m benchmarks.islands_torchft lighthouse 0.0.0.0:29510

A worker trains the model of an island, with the same fragments and tau, in fp32. torchft needs an H
that is a multiple of the number of fragments, and a tau below H / fragments.
"""

import json
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.islands_program import CONFIG, DELAY, Net, inner_step, notes
from benchmarks.torchft_loop import TorchftLoop, serve_lighthouse
from torchtitan_diloco.diloco.fragments import build_fragments

TIMEOUT = 10
"""Seconds after which torchft gives up an exchange or a quorum. Its default is 60."""


def train(
    join: str,
    name: str,
    path: str,
    address: str,
    *,
    begin: int,
    step_seconds: float = 0.1,
    blocks: int = 4,
    width: int = 32,
    **_: Any,
) -> None:
    """Train until this process is killed."""
    with notes(path) as note:
        note(event="started")
        model = Net(blocks, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fragments = len(build_fragments(model, CONFIG.fragments))
        turn = round(CONFIG.sync_every / fragments)
        overlap = replace(CONFIG.overlap, delay=min(DELAY, turn - 1))
        outer = TorchftLoop(
            model,
            optimizer,
            replace(CONFIG, sync_every=turn * fragments, overlap=overlap),
            begin,
            name,
            lighthouse=join,
            address=address,
            timeout_seconds=TIMEOUT,
            alone=True,
        )
        step, joined = 0, False
        while True:
            step, started, before = step + 1, time.time(), outer.exposed_seconds
            time.sleep(step_seconds)
            inner_step(model, optimizer, int(name.rpartition("-")[2]), step)
            if outer.commits and not joined:
                joined = True
                note(event="joined")
            note(
                step=step,
                seconds=time.time() - started,
                exposed=outer.exposed_seconds - before,
                rounds=outer.commits,
                own=outer.commits,
                lost=outer.lost_steps,
            )


def main(command: str, text: str) -> None:
    torch.set_num_threads(1)
    if command == "island":
        train(**json.loads(text))
    else:
        lighthouse = serve_lighthouse(text, 1)
        print("ready", lighthouse.address(), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
