"""Deaths and silence over real links: three network namespaces, one behind a slow or cut link."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.network import port_of
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from tests.network import network_of, processes_in
from tests.processes import PATIENCE
from torchtitan_diloco.diloco import Link, StreamingDiLoCo, WorkerLostError
from torchtitan_diloco.diloco.heartbeat import Pace
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.distributed.world import WORKER, leave_world

WORKERS, CULPRIT = 3, 2
VALUES = 2_000_000
SLOW = 8.0
"""Mbit/s: a payload of 8 MB takes eight seconds."""


def run_worker(steps: int) -> None:
    world = join(WORKERS)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(VALUES))})
    liveness = Liveness(dist.new_group(backend="gloo"), pace=Pace(beat=0.2, silence=1.5))
    chosen = replace(AVERAGE_EVERY_STEP, link=Link(timeout_seconds=600))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen, liveness=liveness)
    try:
        for _ in range(steps):
            outer.step()
    except WorkerLostError as error:
        print(error)
    time.sleep(1.0)
    print("the end", flush=True)
    outer.close()
    liveness.close()
    leave_world(world)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cut_link_is_told_and_passes_and_a_death_in_a_payload_is_named(tmp_path: Path) -> None:
    logs = [tmp_path / str(worker) for worker in range(WORKERS)]

    def others_say(pattern: str) -> bool:
        return all(log.exists() and re.search(pattern, log.read_text()) for log in logs[:CULPRIT])

    with (
        network_of(WORKERS, up=80.0, down=80.0) as network,
        processes_in(network, logs, run_worker, 100) as programs,
    ):
        network.set_rate(CULPRIT, up=SLOW, down=80.0)
        # Above what the start sends: the broadcast comes from worker 0.
        until(lambda: network.counters(CULPRIT)[0] > 3e6)
        network._run(network.switch, f"ip link set {port_of(CULPRIT)} down")
        until(lambda: others_say(r"waiting for worker 2 since \d+ s: no sign of life"))
        network._run(network.switch, f"ip link set {port_of(CULPRIT)} up")
        until(lambda: others_say("worker 2 goes on after"))
        assert not any("left or did not answer" in log.read_text() for log in logs)
        sent = network.counters(CULPRIT)[0]
        until(lambda: network.counters(CULPRIT)[0] > sent + 1e6)
        programs[CULPRIT].kill()
        for worker in range(CULPRIT):
            programs[worker].join(PATIENCE)
            said = logs[worker].read_text()
            assert "worker 2 left or did not answer" in said, said
