import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network import INTERFACE, Network, run_command
from tests.network import network_of

SENT = 200_000
RECEIVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
for _ in range(2):
    peer, address = server.accept()
    print(address[0], sum(map(len, iter(lambda: peer.recv(65536), b""))))
"""
SEND = """
import socket, sys, time
deadline = time.monotonic() + 30
while True:
    try:
        peer = socket.create_connection(("10.0.0.1", 5000))
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
peer.sendall(bytes(int(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three workers, of which the last sends over a slow link."""
    with network_of(3, down=100) as network:
        network.set_rate(2, up=8, down=100)
        yield network


def test_what_is_sent_arrives_and_is_counted_on_both_links(
    network: Network, tmp_path: Path
) -> None:
    before = [network.counters(worker) for worker in range(3)]
    started = [
        network.launch(worker, [sys.executable, "-S", "-c", *words], tmp_path / str(worker))
        for worker, words in enumerate(([RECEIVE], [SEND, str(SENT)], [SEND, str(SENT // 2)]))
    ]
    for program in started:
        assert program.wait() == 0, program.printed()
    assert sorted(started[0].printed().split()) == sorted(
        [network.address(1), str(SENT), network.address(2), str(SENT // 2)]
    )
    after = [network.counters(worker) for worker in range(3)]
    sent, received = (
        [new[way] - old[way] for old, new in zip(before, after, strict=True)] for way in (0, 1)
    )
    assert received[0] >= 1.5 * SENT
    assert SENT <= sent[1] <= 1.3 * SENT, "with headers, and what TCP may have sent twice"
    assert SENT / 2 <= sent[2] <= 0.65 * SENT


def test_a_bucket_holds_each_end_of_a_link_to_its_rate(network: Network) -> None:
    network.set_rate(1, up=2, down=math.inf)
    for worker, rates in enumerate((("", "100Mbit"), ("2Mbit", ""), ("8Mbit", "100Mbit"))):
        ends = (network.namespace(worker), INTERFACE), (network.switch, f"port{worker}")
        for (namespace, device), rate in zip(ends, rates, strict=True):
            shown = ["tc", "qdisc", "show", "dev", device]
            words = run_command([*network.inside(namespace), *shown]).split()
            assert (words[words.index("rate") + 1] if "tbf" in words else "") == rate


def test_closing_ends_what_still_runs_and_the_namespaces(tmp_path: Path) -> None:
    with network_of(1) as network:
        sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        program = network.launch(0, sleeps, tmp_path / "log")
        holders = [network.switch, network.namespace(0)]
    assert not program.running
    assert all(holder.returncode == 0 for holder in holders)
