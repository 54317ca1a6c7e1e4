"""A nats-server for tests, and a connection that records what it receives."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection, LogRecord
from torchtitan_diloco.islands.server import Server, local_server
from torchtitan_diloco.islands.server import free_port as free_port
from torchtitan_diloco.islands.server_folder import find_server

PATIENCE = 150
"""Seconds after which a test counts as hanging."""


def need_server() -> None:
    """Skip the tests of a module if nats-server or openssl is missing."""
    try:
        find_server()
    except ValueError as error:
        pytest.skip(str(error), allow_module_level=True)
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command", allow_module_level=True)


def running_server(folder: Path, run: str = "test") -> AbstractContextManager[Server]:
    return local_server(folder, run=run, keep_gb=0.1)


class Listener:
    """A connection that keeps everything that it receives."""

    def __init__(self, join: Join, name: str, after: int = 0) -> None:
        self.join = join
        self.connection = Connection(join, name)
        self.connection.connect()
        self.connection.follow(after)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def wait_disconnected(self) -> None:
        wait_until(lambda: self.connection.problem, "the end of the connection")

    def wait_connected(self) -> int:
        """Wait for the server. Return the number of records in the log at that moment."""
        wait_until(lambda: self.connection.last >= 0 and not self.connection.problem, "the server")
        return self.connection.last

    def read_to(self, sequence: int) -> list[LogRecord]:
        """Wait for this record. Return all records received so far."""
        wait_until(lambda: self.connection.received >= sequence, f"record {sequence}")
        return self.records

    @property
    def records(self) -> list[LogRecord]:
        return list(self.connection.records)


def wait_until(reached: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until, f"waited too long for {what}"
        time.sleep(0.01)
