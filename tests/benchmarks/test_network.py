import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network import INTERFACE, Network, run_command
from tests.network import network_of


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three workers, of which the last sends over a slow link."""
    with network_of(3, down=100) as network:
        network.set_rate(2, up=8, down=100)
        yield network


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
