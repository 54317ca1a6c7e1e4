"""Ports for programs that tests start."""

import secrets
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, FEWEST = 10_000, 1_000
"""Lowest port that is given, and number of ports below the ephemeral ones that have to be there."""


def free_port() -> int:
    """Return a port that nobody listens at.

    The program that gets it may need seconds until it listens. It is none of the ephemeral ports,
    if there is room below them, as one of these could become that of a connection of another test.
    """
    below = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else LOWEST
    if below - LOWEST < FEWEST:
        with socket.create_server(("", 0)) as listening:
            return int(listening.getsockname()[1])
    while True:
        port = LOWEST + secrets.randbelow(below - LOWEST)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
