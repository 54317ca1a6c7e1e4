"""Deaths and silence over real links: three network namespaces, one behind a slow or cut link."""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.network import Network, NoNetworkError, port_of
from tests.conftest import REPOSITORY
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from torchtitan_diloco.diloco import Link, StreamingDiLoCo, WorkerLostError
from torchtitan_diloco.diloco.heartbeat import Pace
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.distributed.world import WORKER, leave_world

MODULE = "tests.diloco.test_cut_links"
WORKERS, CULPRIT = 3, 2
VALUES = 2_000_000
SLOW = 8.0
"""Mbit/s: a payload of 8 MB takes eight seconds."""
CUT_SECONDS = 4.0


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


def start(network: Network, folder: Path, steps: int) -> list["Popen[bytes]"]:
    programs = []
    for worker in range(WORKERS):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-u", "-m", MODULE, str(steps)]
        with (folder / str(worker)).open("w") as output:
            programs.append(network.start(worker, command, environment, output))
    return programs


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cut_link_is_told_and_passes_and_a_death_in_a_payload_is_named(tmp_path: Path) -> None:
    def log(worker: int) -> str:
        return (tmp_path / str(worker)).read_text()

    try:
        with Network(WORKERS, up=[80.0, 80.0, SLOW], down=80.0) as network:
            programs = start(network, tmp_path, 100)
            # Above what the start sends: the broadcast comes from worker 0.
            until(lambda: network.counters(CULPRIT)[0] > 3e6)
            network._run(network.switch, f"ip link set {port_of(CULPRIT)} down")
            time.sleep(CUT_SECONDS)
            network._run(network.switch, f"ip link set {port_of(CULPRIT)} up")
            until(lambda: all("worker 2 goes on after" in log(worker) for worker in (0, 1)))
            for worker in (0, 1):
                assert re.search(r"waiting for worker 2 since \d+ s: no sign of life", log(worker))
                assert "left or did not answer" not in log(worker)
            sent = network.counters(CULPRIT)[0]
            until(lambda: network.counters(CULPRIT)[0] > sent + 1e6)
            programs[CULPRIT].kill()
            for worker in (0, 1):
                programs[worker].wait(60)
                assert "worker 2 left or did not answer" in log(worker), log(worker)
    except NoNetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")


if __name__ == "__main__":
    run_worker(int(sys.argv[1]))
