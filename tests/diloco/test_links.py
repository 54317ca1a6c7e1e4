"""Bytes, rates, deaths and silence over real links, in network namespaces."""

import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.network import LOOPBACK, port_of, read_counters
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from tests.network import network_of, processes_in
from tests.processes import PATIENCE
from tests.waiting import wait_until
from torchtitan_diloco.diloco import Link, Quantization, StreamingDiLoCo, WorkerLostError, liveness
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.transport import header_bytes
from torchtitan_diloco.distributed.world import WORKER, leave_world

WORKERS = 3
CULPRIT = 2
FAST = 80.0
"""Mbit/s."""


def random_values(count: int) -> nn.ParameterDict:
    return nn.ParameterDict({"weight": nn.Parameter(torch.randn(count))})


VALUES = 1_000_001
EXCHANGES = 5
CODECS: tuple[str, ...] = ("fp32", "int8", "fp4_e3m0")


def count_bytes(workers: int) -> None:
    """Print for each codec the bytes this worker counts, and those of the interface, of all.

    The least of some exchanges: on a busy machine TCP sends parts of one again.
    """
    world = join(workers)
    found = []
    for codec in CODECS:
        chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec=codec))
        outer = StreamingDiLoCo(random_values(VALUES), world.group(WORKER), chosen)
        sent = set[int]()
        on_the_wire = []
        for _ in range(EXCHANGES):
            dist.barrier()
            before = read_counters(LOOPBACK)[0]
            dist.barrier()
            outer.step()
            dist.barrier()
            on_the_wire.append(read_counters(LOOPBACK)[0] - before)
            sent.add(int(outer.metrics()["worker/sent_bytes"]))
        assert len(sent) == 1, "every exchange sends the same"
        found.append([sent.pop(), min(on_the_wire)])
    print(json.dumps(found), flush=True)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_interface_counts_what_we_count(tmp_path: Path, workers: int) -> None:
    logs = [tmp_path / str(worker) for worker in range(workers)]
    with (
        network_of(1) as network,
        processes_in(network, logs, count_bytes, workers, loopback=True) as programs,
    ):
        for program in programs:
            program.join(PATIENCE)
    said = [log.read_text() for log in logs]
    assert [program.exitcode for program in programs] == [0] * workers, said
    measured = zip(*(json.loads(text.splitlines()[-1]) for text in said), strict=True)
    for codec, results in zip(CODECS, measured, strict=True):
        counted = sum(sent for sent, _ in results)
        on_the_wire = max(wire for _, wire in results)
        assert counted <= on_the_wire <= 1.02 * counted, codec
        fragments = 2 * (workers - 1)  # sent by all workers together
        payloads = fragments * build_codec(Quantization(codec=codec)).wire_bytes(VALUES)
        headers = workers * (workers - 1) * header_bytes(workers)
        assert counted == pytest.approx(payloads + headers, abs=64)
        if codec.startswith("fp4"):
            assert 8 * counted <= 4.25 * fragments * VALUES, "with headers, scales and padding"


ROUNDS = 4
LATE, LATE_SECONDS = 1, 1.0
"""The worker that is late to every round."""
SLOW = 6.0
"""Mbit/s of the culprit's uplink."""

Seen = dict[tuple[int, int], tuple[float, float]]
"""(worker, other) -> seconds until the other was heard, and its bits per second; medians."""


def time_rounds() -> None:
    """Print when this worker hears the others, and how fast they send."""
    world = join(WORKERS)
    chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec="int8"))
    outer = StreamingDiLoCo(random_values(300_000), world.group(WORKER), chosen)
    for _ in range(ROUNDS):
        if world.worker == LATE:
            time.sleep(LATE_SECONDS)
        outer.step()
    traffic = [round_.traffic for round_ in outer.rounds()][1:]  # the first is cold
    found = {
        other: [[one.heard_after(other), 8 * one.rate(other)] for one in traffic]
        for other in traffic[0].heard
    }
    print(json.dumps(found), flush=True)
    outer.close()
    leave_world(world)  # else another one may lose this one before its last payload


def test_a_slow_link_and_a_late_worker_are_told_apart(tmp_path: Path) -> None:
    logs = [tmp_path / str(worker) for worker in range(WORKERS)]
    with network_of(WORKERS, up=FAST, down=FAST) as network:
        network.set_rate(CULPRIT, up=SLOW, down=FAST)
        with processes_in(network, logs, time_rounds) as programs:
            for program in programs:
                program.join(PATIENCE)
    seen: Seen = {}
    for worker, log in enumerate(logs):
        for other, values in json.loads(log.read_text().splitlines()[-1]).items():
            heard_after, rate = map(statistics.median, zip(*values, strict=True))
            seen[worker, int(other)] = heard_after, rate
    waited_for = {other for (_, other), (seconds, _) in seen.items() if seconds > LATE_SECONDS / 2}
    assert waited_for == {LATE}
    # To the worker that gets most. What goes to one with a slow uplink is held up as well, as the
    # acknowledgements come back through it. A busy machine reads late, and then fast, what has come
    # slowly, so that only the ratio says something.
    rates = {
        sender: max(rate for (_, heard), (_, rate) in seen.items() if heard == sender)
        for sender in range(WORKERS)
    }
    assert 2 * rates[CULPRIT] < min(rates[sender] for sender in rates if sender != CULPRIT)


def exchange_until_lost(steps: int) -> None:
    world = join(WORKERS)
    liveness.LATE_SECONDS = 2.0
    chosen = replace(AVERAGE_EVERY_STEP, link=Link(timeout_seconds=600))
    model = random_values(2_000_000)  # a payload of 8 MB takes eight seconds
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    try:
        for _ in range(steps):
            outer.step()
    except WorkerLostError as error:
        print(error)
    time.sleep(1.0)
    print("the end", flush=True)
    outer.close()
    leave_world(world)


def test_a_cut_link_is_told_and_passes_and_a_death_in_a_payload_is_named(tmp_path: Path) -> None:
    logs = [tmp_path / str(worker) for worker in range(WORKERS)]

    def wait_for(what: str, reached: Callable[[], bool]) -> None:
        wait_until(reached, what, logs[CULPRIT], PATIENCE)

    def others_say(pattern: str) -> bool:
        return all(log.exists() and re.search(pattern, log.read_text()) for log in logs[:CULPRIT])

    with (
        network_of(WORKERS, up=FAST, down=FAST) as network,
        processes_in(network, logs, exchange_until_lost, 100) as programs,
    ):
        network.set_rate(CULPRIT, up=8.0, down=FAST)
        # Above what the start sends: the broadcast comes from worker 0.
        wait_for("a payload", lambda: network.counters(CULPRIT)[0] > 3e6)
        network._run(network.switch, f"ip link set {port_of(CULPRIT)} down")
        wait_for("a report", lambda: others_say(r"waiting since \d+ s for worker "))
        network._run(network.switch, f"ip link set {port_of(CULPRIT)} up")
        assert not any("left or did not answer" in log.read_text() for log in logs)
        sent = network.counters(CULPRIT)[0]
        wait_for("more bytes", lambda: network.counters(CULPRIT)[0] > sent + 1e6)
        programs[CULPRIT].kill()
        for worker in range(CULPRIT):
            programs[worker].join(PATIENCE)
            said = logs[worker].read_text()
            assert "worker 2 left or did not answer" in said, said
