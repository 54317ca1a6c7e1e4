"""A link that drops a connection without a word."""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network import ENVIRONMENT, run_command
from tests.islands.servers import (
    PATIENCE,
    Listener,
    need_server,
    running_server,
    wait_until,
)
from tests.network import network_of
from torchtitan_diloco.islands import connection as module
from torchtitan_diloco.islands import wire as wire_module

need_server()


def _lose_the_chunks(folder: Path, lost: str) -> None:
    """Drop the connection of the chunks in the firewall of this process's own network.

    `lost`: "one", or "all", where the new connection for the log tells that the others are dead.
    """
    wire_module.UNCONFIRMED_SECONDS = 1.0 if lost == "one" else 10 * PATIENCE
    module.FIRST_CONNECTION_SECONDS = PATIENCE
    with running_server(folder) as server, Listener(server.join, "a/1") as listener:
        connection, loopback = listener.connection, ["tc", "qdisc", "replace", "dev", "lo", "root"]
        [stream] = connection.streams._threads
        wait_until(lambda: stream._wire, "a connection")
        wire = stream._wire
        assert wire is not None
        slow = "tbf rate 8mbit burst 256kb latency 400ms"
        run_command([*loopback, *slow.split()])
        early = connection.store(b"x" * 4_000_000, "parts")  # it takes four seconds
        assert stream._wire is wire, "a slow link is no dead one"
        run_command([*loopback, "pfifo"])
        ports = [wire._socket.getsockname()[1]]
        if lost == "all":
            ports = _ports_to(wire._socket.getpeername()[1])
            assert len(ports) >= 2
        run_command(["nft", "add table inet filter"])
        run_command(["nft", "add chain inet filter out { type filter hook output priority 0; }"])
        for port in ports:
            for end in ("sport", "dport"):
                run_command(["nft", f"add rule inet filter out tcp {end} {port} drop"])
        begin = time.monotonic()
        fetched = connection.fetch(early, "parts")  # nothing is sent but a question and pings
        assert fetched == b"x" * 4_000_000
        assert stream._wire is not wire
        print(f"fetched after {time.monotonic() - begin:.0f} s")


def _ports_to(port: int) -> list[int]:
    """Return the ports of this machine that are connected to one."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    pairs = [[int(one.rpartition(":")[2], 16) for one in line.split()[1:3]] for line in lines]
    return [local for local, remote in pairs if remote == port]


@pytest.mark.parametrize("lost", ["one", "all"])
def test_a_connection_that_dies_without_a_word_is_noticed_in_seconds(
    tmp_path: Path, lost: str
) -> None:
    name = _lose_the_chunks.__name__
    code = f"import sys; from pathlib import Path; from {__name__} import {name}; "
    code += f"{name}(Path(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code, str(tmp_path / "server"), lost]
    with network_of(1) as network:
        if shutil.which("nft", path=ENVIRONMENT["PATH"]) is None:
            pytest.skip("needs nft")
        program = network.launch(0, command, tmp_path / "log.txt")
        assert program.wait(PATIENCE) == 0, program.printed()
    found = re.search(r"fetched after (\d+) s", program.printed())
    assert found is not None
    assert int(found[1]) < wire_module.ANSWER_SECONDS / 3
